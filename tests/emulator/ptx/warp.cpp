// Instructions by which the lanes of a warp exchange values.
#include <cstring>

#include "build.h"

namespace ptx {
namespace {

// at: result, value, lane or distance, clamp and segments; flag: d[0] tells whether the source is within bounds.
void shuffle(Context& c, const Instruction& i, u32 mask) {
  const u32 *value = c.at<u32>(i.at[1]), *by = c.at<u32>(i.at[2]), *bounds = c.at<u32>(i.at[3]);
  u32 results[kLanes];
  bool inside[kLanes];
  for_lanes(mask, [&](u32 lane) {
    const u32 clamp = bounds[lane] & 31, segment = bounds[lane] >> 8 & 31, distance = by[lane] & 31;
    const int first = static_cast<int>(lane & segment), last = first | static_cast<int>(clamp & ~segment);
    int source = 0;
    switch (i.mode) {
      case 0: source = static_cast<int>(lane) - static_cast<int>(distance); break;  // up: `last` is the lowest lane
      case 1: source = static_cast<int>(lane + distance); break;                    // down
      case 2: source = static_cast<int>(lane ^ distance); break;                    // bfly
      default: source = first | static_cast<int>(distance & ~segment);              // idx
    }
    inside[lane] = i.mode == 0 ? source >= last : source <= last;
    if (!inside[lane]) source = static_cast<int>(lane);
    if (!(mask >> source & 1)) c.stop("shfl from a lane that does not execute it", i, lane);
    results[lane] = value[source];
  });
  for_lanes(mask, [&](u32 lane) {
    c.at<u32>(i.at[0])[lane] = results[lane];
    if (i.flag) c.put(i.d[0], lane, inside[lane]);
  });
}

void build_shuffle(Build& o) {
  o.i.mode = o.choose({"up", "down", "bfly", "idx"});
  for (u32 n = 0; n < 4; ++n) o.i.at[n] = o.one(n, 4).offset;
  o.i.flag = !o.operand(0).second.empty();
  if (o.i.flag) o.i.d = {o.second(0)};
  o.i.together = true;
  o.i.run = &shuffle;
}

void reduce(Context& c, const Instruction& i, u32 mask) {
  const u32* in = c.at<u32>(i.at[1]);
  u32 x = in[std::countr_zero(mask)];
  for_lanes(mask & (mask - 1), [&](u32 lane) {  // all but the first
    const u32 y = in[lane];
    const bool less = i.with_sign ? static_cast<s32>(y) < static_cast<s32>(x) : y < x;
    switch (i.mode) {
      case 0: x += y; break;
      case 1: x = less ? y : x; break;
      case 2: x = less ? x : y; break;
      case 3: x &= y; break;
      case 4: x |= y; break;
      default: x ^= y;
    }
  });
  for_lanes(mask, [&](u32 lane) { c.at<u32>(i.at[0])[lane] = x; });
}

void build_reduce(Build& o) {
  if (o.words.back() == "f32") o.refuse("redux of floats");
  o.i.mode = o.choose({"add", "min", "max", "and", "or", "xor"});
  o.i.with_sign = o.with_sign;
  for (u32 n = 0; n < 2; ++n) o.i.at[n] = o.one(n, 4).offset;
  o.i.together = true;
  o.i.run = &reduce;
}

}  // namespace

void add_warp(Builders& b) {
  b["shfl"] = &build_shuffle;
  b["redux"] = &build_reduce;
}

}  // namespace ptx
