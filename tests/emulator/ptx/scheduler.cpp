// Which block, warp and instruction runs next.
//
// Blocks of a launch start in a chosen order, a few at a time. A warp runs until it waits or for a random number of
// instructions. A warp that diverged runs the lanes that are furthest behind, and lanes that meet go on together. A
// programmatic launch starts when every block of the one before has allowed it.
#include <cstring>

#include "machine.h"

namespace ptx {

void Machine::find(Finding finding) {
  const auto part = [&](size_t n) -> std::pair<const Kernel*, u32> {
    if (n >= finding.accesses.size()) return {nullptr, 0};
    return {launches[finding.accesses[n].launch]->kernel, finding.accesses[n].pc};
  };
  const auto [kernel, pc] = part(0);
  const auto [other, other_pc] = part(1);
  ++findings.try_emplace({finding.kind, kernel, pc, other, other_pc}, finding, 0).first->second.second;
}

namespace {

void start_warp(Machine& machine, Block& block, u32 index) {
  Launch& launch = *block.launch;
  const Kernel& kernel = *launch.kernel;
  Warp& w = block.warps[index];
  w.block = &block;
  w.index = index;
  const u32 lanes = std::min(kLanes, launch.threads - index * kLanes);
  w.live = lanes == kLanes ? kAll : (1u << lanes) - 1;
  w.groups = {{0, w.live}};
  w.registers = std::make_unique<char[]>(kernel.register_bytes + 64);
  std::memset(w.registers.get(), 0xab, kernel.register_bytes);  // what a register holds before it is set
  const Context c{machine, launch, block, w, w.registers.get()};
  for (const auto& [place, value] : kernel.constants)
    for (u32 lane = 0; lane < kLanes; ++lane) c.put(place, lane, value);
  for (const auto& [place, special] : kernel.specials)
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const u32 which = static_cast<u32>(special);
      u32 x = 0;
      if (special == Special::TidX) x = index * kLanes + lane;
      else if (special == Special::Lane) x = lane;
      else if (special == Special::Warp) x = index;
      else if (special == Special::NtidX) x = launch.threads;
      else if (special == Special::NtidY || special == Special::NtidZ) x = 1;
      else if (special >= Special::CtaX && special <= Special::CtaZ) x = block.at[which - static_cast<u32>(Special::CtaX)];
      else if (special >= Special::NctaX && special <= Special::NctaZ) x = launch.grid[which - static_cast<u32>(Special::NctaX)];
      c.put(place, lane, x);
    }
}

std::unique_ptr<Block> start_block(Machine& machine, Launch& launch) {
  auto block = std::make_unique<Block>();
  block->launch = &launch;
  block->id = launch.order[launch.started++];
  block->at[0] = block->id % launch.grid[0];
  block->at[1] = block->id / launch.grid[0] % launch.grid[1];
  block->at[2] = block->id / launch.grid[0] / launch.grid[1];
  block->shared.assign(launch.shared, machine.settings.poison ? 0xff : 0);
  if (machine.settings.races) block->cells.resize(launch.shared / launch.kernel->shared_unit + 1);
  block->warps.resize((launch.threads + kLanes - 1) / kLanes);
  block->alive = static_cast<u32>(block->warps.size());
  for (u32 n = 0; n < block->warps.size(); ++n) start_warp(machine, *block, n);
  return block;
}

// Drops empty groups, joins those at the same instruction, and puts the one furthest behind first.
void settle(std::vector<Group>& groups) {
  std::sort(groups.begin(), groups.end(), [](const Group& x, const Group& y) { return x.pc < y.pc; });
  std::vector<Group> left;
  for (const Group& group : groups) {
    if (!group.mask) continue;
    if (!left.empty() && left.back().pc == group.pc) left.back().mask |= group.mask;
    else left.push_back(group);
  }
  groups = std::move(left);
}

void trigger(Block& block) {
  if (block.triggered) return;
  block.triggered = true;
  ++block.launch->triggers;
}

// Opens the barrier if every living warp waits at it.
void try_barrier(Block& block) {
  int at = -1;
  for (const Warp& w : block.warps) {
    if (!w.live) continue;
    if (w.barrier < 0 || (at >= 0 && w.barrier != at)) return;
    at = w.barrier;
  }
  if (at < 0) return;
  for (Warp& w : block.warps) {
    if (!w.live) continue;
    w.barrier = -1;
    ++w.epoch;
  }
  ++block.epoch;
}

u32 mask_of(const u8* predicate) {
  u32 mask = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) mask |= static_cast<u32>(predicate[lane] & 1) << lane;
  return mask;
}

// Lanes of the first group leave; returns whether the warp has ended.
bool leave(Context& c, const Instruction& i, u32 mask) {
  Warp& w = c.warp;
  w.live &= ~mask;
  w.groups.front().mask &= ~mask;
  ++w.groups.front().pc;
  settle(w.groups);
  if (w.live) return false;
  if (!w.products.idle()) c.find("wgmma was not waited for", i, 0);
  if (!--c.block.alive) trigger(c.block);
  try_barrier(c.block);
  return true;
}

// Runs at most `most` instructions of a warp, until it waits.
void run_warp(Machine& machine, Warp& w, u32 most) {
  Block& block = *w.block;
  Launch& launch = *block.launch;
  Context c{machine, launch, block, w, w.registers.get()};
  const Instruction* code = launch.kernel->code.data();
  for (u32 n = 0; n < most; ++n) {
    Group& group = w.groups.front();
    const Instruction& i = code[group.pc];
    u32 mask = group.mask;
    if (i.guarded) mask &= i.negated ? ~mask_of(c.at<u8>(i.guard)) : mask_of(c.at<u8>(i.guard));
    ++machine.instructions;
    switch (i.kind) {
      case Kind::Run:
        if (i.together && group.mask != w.live) c.stop("DIVERGED: an instruction of the whole warp for some lanes", i);
        if (mask) i.run(c, i, mask);
        [[fallthrough]];
      case Kind::Nothing:
        ++group.pc;
        break;
      case Kind::Branch:
        if (mask == group.mask) {
          group.pc = i.target;
        } else if (!mask) {
          ++group.pc;
        } else {
          const Group rest{group.pc + 1, group.mask & ~mask};
          group = {i.target, mask};
          w.groups.push_back(rest);
        }
        break;
      case Kind::Exit:
        if (leave(c, i, mask)) return;
        continue;
      case Kind::Barrier:
        if (mask != w.live) c.stop("DIVERGED: bar.sync for some lanes of a warp", i);
        ++group.pc;
        w.barrier = static_cast<int>(i.value);
        try_barrier(block);
        if (w.barrier >= 0) return;
        break;
      case Kind::WarpBarrier:
        if (group.mask != w.live) c.stop("DIVERGED: bar.warp.sync for some lanes", i);
        ++w.epoch;
        ++group.pc;
        break;
      case Kind::GridLaunch:
        if (++block.triggered_warps == block.warps.size()) trigger(block);
        ++group.pc;
        break;
      case Kind::GridWait:
        if (launch.programmatic && launch.index && !machine.launches[launch.index - 1]->complete()) {
          w.grid_wait = true;
          return;
        }
        block.waited = true;
        ++group.pc;
        break;
    }
    if (w.groups.size() > 1) settle(w.groups);
  }
}

bool may_start(const Machine& machine, size_t n) {
  const Launch& launch = *machine.launches[n];
  if (launch.started == launch.blocks) return false;
  if (n == 0) return true;
  const Launch& previous = *machine.launches[n - 1];
  if (launch.programmatic) return previous.complete() || previous.triggers == previous.blocks;
  return std::all_of(machine.launches.begin(), machine.launches.begin() + static_cast<std::ptrdiff_t>(n), [](const auto& l) { return l->complete(); });
}

[[noreturn]] void deadlock(const std::vector<std::unique_ptr<Block>>& resident) {
  Finding finding{"DEADLOCK: every warp waits", {}};
  for (const auto& block : resident)
    for (const Warp& w : block->warps)
      if (w.live) finding.accesses.push_back({block->launch->index, block->id, w.index * kLanes, w.groups.front().pc});
  throw Stopped{finding};
}

}  // namespace

void Machine::run() {
  for (auto& launch : launches) {
    launch->order.resize(launch->blocks);
    for (u32 n = 0; n < launch->blocks; ++n) launch->order[n] = settings.order == 1 ? launch->blocks - 1 - n : n;
    if (settings.order == 2) std::shuffle(launch->order.begin(), launch->order.end(), random);
  }
  std::vector<std::unique_ptr<Block>> resident;
  std::vector<Warp*> ready;
  for (size_t first = 0; first < launches.size();) {
    if (launches[first]->complete()) {
      ++first;
      continue;
    }
    // Blocks of launches that overlap may be there besides those of the first.
    for (size_t n = first; n < launches.size(); ++n)
      while (resident.size() < settings.residents * (n > first ? 2 : 1) && may_start(*this, n))
        resident.push_back(start_block(*this, *launches[n]));
    ready.clear();
    for (auto& block : resident)
      for (Warp& w : block->warps) {
        if (w.grid_wait && launches[block->launch->index - 1]->complete()) w.grid_wait = false;
        if (w.runnable()) ready.push_back(&w);
      }
    if (ready.empty()) deadlock(resident);
    Warp& w = *ready[settings.burst ? random() % ready.size() : 0];
    Block* block = w.block;
    run_warp(*this, w, settings.burst ? 1 + static_cast<u32>(random() % settings.burst) : kAll);
    if (block->alive) continue;
    block->launch->every_block_waited &= block->waited;
    ++block->launch->finished;
    resident.erase(std::find_if(resident.begin(), resident.end(), [&](const auto& x) { return x.get() == block; }));
  }
}

}  // namespace ptx
