// Loads, stores and asynchronous copies.
#include "memory.h"

#include <cstring>

#include "build.h"

namespace ptx {

u8* shared_at(Context& c, const Instruction& i, u32 lane, u64 address, u32 size) {
  const u32 at = static_cast<u32>(address);
  if (at < kSharedBase || at + size > kSharedBase + c.block.shared.size())
    c.stop("OUT OF BOUNDS of shared memory: byte " + std::to_string(static_cast<s64>(at) - kSharedBase) + " of " +
               std::to_string(c.block.shared.size()), i, lane);
  if (at % size) c.stop("MISALIGNED shared address, for " + std::to_string(size) + " bytes", i, lane);
  return &c.block.shared[at - kSharedBase];
}

u8* global_at(Context& c, const Instruction& i, u32 lane, u64 address, u32 size) {
  const std::vector<Range>& ranges = c.launch.ranges;
  for (const Range& range : ranges)
    if (address >= range.begin && address + size <= range.end) {
      if (address % size) c.stop("MISALIGNED global address, for " + std::to_string(size) + " bytes", i, lane);
      return reinterpret_cast<u8*>(address);
    }
  std::string where = "no tensor was given";
  u64 nearest = ~0ull;
  for (size_t n = 0; n < ranges.size(); ++n) {
    const u64 distance = address < ranges[n].begin ? ranges[n].begin - address : address - ranges[n].end;
    if (distance >= nearest) continue;
    nearest = distance;
    where = "byte " + std::to_string(static_cast<s64>(address - ranges[n].begin)) + " of tensor " + std::to_string(n) + ", which has " +
            std::to_string(ranges[n].end - ranges[n].begin);
  }
  c.stop("OUT OF BOUNDS of global memory: " + where, i, lane);
}

namespace {

// Checks an access, notes it for the race detector, and returns the host's address.
u8* reach(Context& c, const Instruction& i, u32 lane, u32 size, Use use, const void* value = nullptr) {
  const u64 address = c.get(i.a[0], lane) + static_cast<u64>(i.offset);
  u8* at;
  if (i.space == Space::Shared) {
    at = shared_at(c, i, lane, address, size);
    note_shared(c, i, lane, static_cast<u32>(address), size, use, value);
  } else {
    at = global_at(c, i, lane, address, size);
    note_global(c, i, lane, address, size, use, value);
  }
  return at;
}

// ---- loads and stores: a is the address, d or b the data ----
void load(Context& c, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](u32 lane) {
    const u8* from = reach(c, i, lane, i.size * i.count, Use::Read);
    for (u32 n = 0; n < i.count; ++n) {
      u64 x = 0;
      std::memcpy(&x, from + n * i.size, i.size);
      c.put(i.d[n], lane, i.with_sign ? extend(x, i.size, true) : x);
    }
  });
}

void store(Context& c, const Instruction& i, u32 mask) {
  const u32 total = i.size * i.count;
  for_lanes(mask, [&](u32 lane) {
    u8 value[32];
    for (u32 n = 0; n < i.count; ++n) {
      const u64 x = c.get(i.b[n], lane);
      std::memcpy(value + n * i.size, &x, i.size);
    }
    std::memcpy(reach(c, i, lane, total, Use::Write, value), value, total);
  });
}

void load_parameter(Context& c, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](u32 lane) {
    const u64 base = i.value + static_cast<u64>(i.offset) + (i.a.empty() ? 0 : c.get(i.a[0], lane));
    for (u32 n = 0; n < i.count; ++n) {
      const u64 at = base + n * i.size;
      if (at + i.size > c.launch.parameters.size()) c.stop("OUT OF BOUNDS of the parameters", i, lane);
      u64 x = 0;
      std::memcpy(&x, &c.launch.parameters[at], i.size);
      c.put(i.d[n], lane, extend(x, i.size, i.with_sign));
    }
  });
}

void build_load_or_store(Build& o) {
  const bool stores = o.words[0] == "st";
  Instruction& i = o.i;
  i.size = o.width;
  i.count = o.has("v8") ? 8 : o.has("v4") ? 4 : o.has("v2") ? 2 : 1;
  i.with_sign = o.with_sign;
  for (const char* word : {"relaxed", "acquire", "release", "volatile"})
    if (o.has(word)) o.refuse("ordered loads and stores");
  if (!i.size || i.size > 8 || i.size * i.count > 32) o.refuse("numbers of this size");
  const size_t address = stores ? 0 : 1;
  if (!stores && o.has("param")) {
    i.space = Space::Param;
    i.run = &load_parameter;
    i.offset = o.operand(1).offset;
    const std::string& base = o.operand(1).items[0];
    const auto& all = o.kernel.parameters;
    const auto found = std::find_if(all.begin(), all.end(), [&](const Parameter& p) { return p.name == base; });
    if (found != all.end()) i.value = found->offset;
    else i.a = o.registers(1, 4);
  } else if (o.has("shared") || o.has("shared::cta")) {
    i.a = o.address(address, Space::Shared);
    i.run = stores ? &store : &load;
    o.kernel.shared_unit = std::min(o.kernel.shared_unit, i.size);
  } else if (o.has("global")) {
    i.a = o.address(address, Space::Global);
    i.run = stores ? &store : &load;
    o.kernel.global_unit = std::min(o.kernel.global_unit, i.size);
  } else {
    o.refuse("this state space");
  }
  (stores ? i.b : i.d) = o.registers(stores ? 1 : 0, o.width);
  if ((stores ? i.b : i.d).size() != i.count) o.refuse("another number of registers than of values");
}

// ---- cp.async: a is the address in shared memory, b that in global memory, c how many bytes are given ----
void move(Context& c, Copy& copy) {
  if (copy.done) return;
  u8* to = &c.block.shared[copy.to - kSharedBase];
  if (copy.given) std::memcpy(to, reinterpret_cast<const void*>(copy.from), copy.given);
  std::memset(to + copy.given, 0, copy.size - copy.given);
  copy.done = true;
}

void copy_async(Context& c, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](u32 lane) {
    const u32 to = static_cast<u32>(c.get(i.a[0], lane) + static_cast<u64>(i.offset));
    const u64 from = c.get(i.b[0], lane) + static_cast<u64>(i.offset_b);
    const u32 given = i.c.empty() ? i.size : static_cast<u32>(c.get(i.c[0], lane));
    if (given > i.size) c.stop("cp.async gives more bytes than it copies", i, lane);
    u8* target = shared_at(c, i, lane, to, i.size);
    if (given) {
      if (from % i.size) c.stop("MISALIGNED global address of cp.async", i, lane);
      global_at(c, i, lane, from, 1);
      global_at(c, i, lane, from + given - 1, 1);
      note_global(c, i, lane, from, given, Use::Read);
    }
    note_shared(c, i, lane, to, i.size, Use::Copy);
    Copy copy{lane, to, i.size, given, from, false};
    const u32 when = c.machine.settings.copies;
    if (when == 0 || (when == 2 && c.machine.random() % 2)) move(c, copy);
    else std::memset(target, 0xff, i.size);  // what was there is lost, and what comes is not there yet
    c.warp.copies.groups.back().push_back(copy);
  });
}

void commit_copies(Context& c, const Instruction&, u32) { c.warp.copies.commit(); }

void wait_for_copies(Context& c, const Instruction& i, u32) {
  std::vector<Copy> group;
  while (c.warp.copies.take(i.value, group))
    for (Copy& copy : group) {
      move(c, copy);
      copy_arrived(c, copy.lane, copy.to, copy.size);
    }
}

void build_copy(Build& o) {
  Instruction& i = o.i;
  if (!o.has("async") || o.has("bulk") || o.has("mbarrier")) o.refuse("this copy");
  if (o.has("commit_group")) {
    i.run = &commit_copies;
    i.together = true;
  } else if (o.has("wait_group")) {
    i.value = static_cast<u32>(o.number(0));
    i.run = &wait_for_copies;
    i.together = true;
  } else {
    i.size = static_cast<u32>(o.number(2));
    i.a = o.address(0, Space::Shared);
    i.b = o.registers(1, 8);
    i.offset_b = o.operand(1).offset;
    if (o.has("L2::cache_hint")) o.refuse("a cache policy");
    if (o.operands.size() > 3) i.c = o.registers(3, 4);
    o.kernel.shared_unit = std::min(o.kernel.shared_unit, i.size);
    o.kernel.global_unit = std::min(o.kernel.global_unit, i.size);
    i.run = &copy_async;
  }
}

}  // namespace

void add_memory(Builders& b) {
  b["ld"] = b["st"] = &build_load_or_store;
  b["cp"] = &build_copy;
}

}  // namespace ptx
