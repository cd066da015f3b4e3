// Loads, stores, atomics, fences and asynchronous copies.
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
    const u8* from = reach(c, i, lane, i.size * i.count, i.strong ? Use::StrongRead : Use::Read);
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
    std::memcpy(reach(c, i, lane, total, i.strong ? Use::StrongWrite : Use::Write, value), value, total);
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
  i.strong = o.has("relaxed") || o.has("acquire") || o.has("release") || o.has("volatile");
  if (o.has("acquire") || o.has("release")) o.refuse("ordered loads and stores");
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

// ---- atomics: a is the address, b and c the operands, d the result ----
const std::vector<std::string> kOperations = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};

template <class T>
T combined(u8 operation, T old, T x, T y) {
  switch (operation) {
    case 0: return old + x;
    case 1: return std::min(old, x);
    case 2: return std::max(old, x);
    case 6: return x;
    case 7: return old == x ? y : old;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (operation) {
      case 3: return old & x;
      case 4: return old | x;
      case 5: return old ^ x;
      case 8: return old >= x ? T(0) : old + 1;
      case 9: return old == 0 || old > x ? x : old - 1;
    }
  }
  return old;
}

template <class T>
T as(u64 x) {
  T out;
  std::memcpy(&out, &x, sizeof(T));
  return out;
}

template <class T>
void atomic(Context& c, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](u32 lane) {
    u8* at = reach(c, i, lane, sizeof(T), Use::Atomic);
    if (i.space == Space::Global) note_atomic(c, i, lane, reinterpret_cast<u64>(at));
    T old;
    std::memcpy(&old, at, sizeof(T));
    const T now = combined(i.mode, old, as<T>(c.get(i.b[0], lane)), i.c.empty() ? T() : as<T>(c.get(i.c[0], lane)));
    std::memcpy(at, &now, sizeof(T));
    if (i.d.empty()) return;
    u64 wide = 0;
    std::memcpy(&wide, &old, sizeof(T));
    c.put(i.d[0], lane, wide);
  });
}

void build_atomic(Build& o) {
  static const std::unordered_map<std::string, Handler> kByType = {
      {"u32", &atomic<u32>}, {"b32", &atomic<u32>}, {"s32", &atomic<s32>},  {"u64", &atomic<u64>},
      {"b64", &atomic<u64>}, {"s64", &atomic<s64>}, {"f32", &atomic<float>}};
  const size_t address = o.words[0] == "atom" ? 1 : 0;
  Instruction& i = o.i;
  i.mode = o.choose(kOperations);
  i.acquire = o.has("acquire") || o.has("acq_rel");
  i.release = o.has("release") || o.has("acq_rel");
  i.scope = o.has("cta") ? Scope::Block : Scope::Device;
  const bool shared = o.has("shared") || o.has("shared::cta");
  i.a = o.address(address, shared ? Space::Shared : Space::Global);
  if (address) i.d = o.registers(0, o.width);
  i.b = o.registers(address + 1, o.width);
  if (kOperations[i.mode] == "cas") i.c = o.registers(address + 2, o.width);
  u32& unit = shared ? o.kernel.shared_unit : o.kernel.global_unit;
  unit = std::min<u32>(unit, o.width);
  const auto found = kByType.find(o.words.back());
  if (found == kByType.end()) o.refuse("atomics of this type");
  i.run = found->second;
}

void fence(Context& c, const Instruction&, u32 mask) { note_fence(c, mask); }

void build_fence(Build& o) {
  // Fences between proxies, of shared memory that wgmma reads: not modelled.
  if (o.has("proxy") || o.has("cta")) o.i.kind = Kind::Nothing;
  else o.i.run = &fence;
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
  if (i.flag) c.warp.copies.commit();  // wait_all
  std::vector<Copy> group;
  while (c.warp.copies.take(i.value, group))
    for (Copy& copy : group) {
      move(c, copy);
      copy_arrived(c, copy.lane, copy.to, copy.size);
    }
}

// Reads nothing, but its address must be one.
void prefetch(Context& c, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](u32 lane) {
    const u64 address = c.get(i.a[0], lane) + static_cast<u64>(i.offset), size = i.b.empty() ? 1 : c.get(i.b[0], lane);
    if (!i.b.empty() && (address % 16 || size % 16)) c.stop("MISALIGNED bulk prefetch", i, lane);
    const auto within = [&](const Range& range) { return address >= range.begin && address + size <= range.end; };
    if (std::none_of(c.launch.ranges.begin(), c.launch.ranges.end(), within)) c.find("OUT OF BOUNDS prefetch", i, lane);
  });
}

void build_copy(Build& o) {
  Instruction& i = o.i;
  if (o.has("prefetch")) {
    i.a = o.address(0, Space::Global);
    i.b = o.registers(1, 4);
    i.run = &prefetch;
    return;
  }
  if (!o.has("async") || o.has("bulk") || o.has("mbarrier")) o.refuse("this copy");
  if (o.has("commit_group")) {
    i.run = &commit_copies;
    i.together = true;
  } else if (o.has("wait_group") || o.has("wait_all")) {
    i.flag = o.has("wait_all");
    i.value = i.flag ? 0 : static_cast<u32>(o.number(0));
    i.run = &wait_for_copies;
    i.together = true;
  } else {
    i.size = static_cast<u32>(o.number(2));
    i.a = o.address(0, Space::Shared);
    i.b = o.registers(1, 8);
    i.offset_b = o.operand(1).offset;
    // A cache policy comes last; the number of bytes before it.
    if (o.operands.size() > 3u + o.has("L2::cache_hint")) i.c = o.registers(3, 4);
    o.kernel.shared_unit = std::min(o.kernel.shared_unit, i.size);
    o.kernel.global_unit = std::min(o.kernel.global_unit, i.size);
    i.run = &copy_async;
  }
}

void build_prefetch(Build& o) {
  o.i.a = o.address(0, Space::Global);
  o.i.run = &prefetch;
}

void no_policy(Context& c, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](u32 lane) { c.put(i.d[0], lane, 0); });
}

void build_policy(Build& o) {
  o.i.d = o.registers(0, 8);
  o.i.run = &no_policy;
}

}  // namespace

void add_memory(Builders& b) {
  b["ld"] = b["st"] = &build_load_or_store;
  b["atom"] = b["red"] = &build_atomic;
  b["membar"] = b["fence"] = &build_fence;
  b["cp"] = &build_copy;
  b["prefetch"] = b["prefetchu"] = &build_prefetch;
  b["createpolicy"] = &build_policy;
}

}  // namespace ptx
