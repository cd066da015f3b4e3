// The state of a run: launches, their blocks, warps, and what was found.
#pragma once
#include <array>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <tuple>

#include "program.h"
#include "races.h"

namespace ptx {

struct Settings {         // see the Python class of this name
  u32 order, residents, burst, races, copies, poison;
  u64 seed;
};

struct Range {
  u64 begin, end;
};

// One instruction at work: where a finding points.
struct Access {
  u32 launch, block, thread, pc;
};

struct Finding {
  std::string kind;
  std::vector<Access> accesses;
};

// An access out of bounds, a deadlock and the like: execution cannot go on.
struct Stopped {
  Finding finding;
};

// A copy to shared memory by cp.async, in flight until its thread waits for its group.
struct Copy {
  u32 lane, to, size, given;
  u64 from;
  bool done;
};

// A product by wgmma, in flight until its warp waits for its group. `registers`: A, if it is not in shared memory.
struct Product {
  const Instruction* instruction;
  u64 a, b;
  bool accumulate;
  std::array<std::array<u32, kLanes>, 4> registers;
};

// What is in flight, by the groups that were committed; the last group is still open.
template <class Item>
struct InFlight {
  std::deque<std::vector<Item>> groups{1};
  void commit() { groups.emplace_back(); }
  bool idle() const {
    return std::all_of(groups.begin(), groups.end(), [](const auto& group) { return group.empty(); });
  }
  // Takes out the oldest group if more than `most` committed ones are left.
  bool take(u32 most, std::vector<Item>& group) {
    if (groups.size() - 1 <= most) return false;
    group = std::move(groups.front());
    groups.pop_front();
    return true;
  }
};

// Lanes of a warp at the same instruction. A warp that diverged has several.
struct Group {
  u32 pc, mask;
};

struct Block;
struct Warp {
  Block* block = nullptr;
  u32 index = 0, live = 0;
  u32 epoch = 1;  // counts barriers that this warp has passed
  std::unique_ptr<char[]> registers;
  std::vector<Group> groups;
  int barrier = -1;        // at which it waits
  bool grid_wait = false;  // waits for the launch before
  InFlight<Copy> copies;
  InFlight<Product> products;
  bool runnable() const { return live && barrier < 0 && !grid_wait; }
};

struct Launch;
struct Block {
  Launch* launch = nullptr;
  u32 id = 0, at[3] = {};
  u32 epoch = 1;  // counts barriers of the whole block
  u32 alive = 0, triggered_warps = 0;
  bool waited = false, triggered = false;
  std::vector<u8> shared;
  std::vector<Warp> warps;
  std::vector<Cell> cells;  // of the race detector
};

struct Launch {
  const Kernel* kernel = nullptr;
  u32 index = 0, grid[3] = {}, threads = 0, shared = 0, blocks = 0;
  bool programmatic = false;
  std::vector<u8> parameters;
  std::vector<Range> ranges;  // of the tensors given
  std::vector<u32> order;
  u32 started = 0, finished = 0, triggers = 0;
  bool every_block_waited = true;
  bool complete() const { return finished == blocks; }
};

struct Machine {
  Settings settings;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Launch>> launches;
  std::map<std::tuple<std::string, const Kernel*, u32, const Kernel*, u32>, std::pair<Finding, u32>> findings;
  GlobalCells cells;
  u64 instructions = 0;

  void find(Finding finding);
  void run();
};

// What a handler works on.
struct Context {
  Machine& machine;
  Launch& launch;
  Block& block;
  Warp& warp;
  char* registers;

  template <class T>
  T* at(u32 offset) const { return reinterpret_cast<T*>(registers + offset); }
  u32 thread(u32 lane) const { return warp.index * kLanes + lane; }
  u32 pc(const Instruction& i) const { return static_cast<u32>(&i - launch.kernel->code.data()); }
  Access access(const Instruction& i, u32 lane) const { return {launch.index, block.id, thread(lane), pc(i)}; }
  void find(const std::string& kind, const Instruction& i, u32 lane) const { machine.find({kind, {access(i, lane)}}); }
  [[noreturn]] void stop(const std::string& kind, const Instruction& i, u32 lane = 0) const {
    throw Stopped{{kind, {access(i, lane)}}};
  }
  u64 get(Register r, u32 lane) const;
  void put(Register r, u32 lane, u64 x) const;
};

inline u64 Context::get(Register r, u32 lane) const {
  switch (r.width) {
    case 1: return at<u8>(r.offset)[lane];
    case 2: return at<u16>(r.offset)[lane];
    case 4: return at<u32>(r.offset)[lane];
    default: return at<u64>(r.offset)[lane];
  }
}
inline void Context::put(Register r, u32 lane, u64 x) const {
  switch (r.width) {
    case 0: return;
    case 1: at<u8>(r.offset)[lane] = static_cast<u8>(x); return;
    case 2: at<u16>(r.offset)[lane] = static_cast<u16>(x); return;
    case 4: at<u32>(r.offset)[lane] = static_cast<u32>(x); return;
    default: at<u64>(r.offset)[lane] = x;
  }
}

// Runs `body(lane)` for the lanes of `mask`; the loop over all of them becomes vector instructions.
template <class Body>
inline void for_lanes(u32 mask, Body body) {
  if (mask == kAll) {
    for (u32 lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (u32 lane = 0; lane < kLanes; ++lane)
      if (mask >> lane & 1) body(lane);
  }
}

}  // namespace ptx
