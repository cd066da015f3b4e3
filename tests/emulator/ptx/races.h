// The race detector: who last wrote and read each unit of memory, and whether that happened before an access.
//
// Within a block, bar.sync orders all threads and bar.warp.sync those of a warp: an access with an older epoch happened
// before. A copy by cp.async is a write in flight until its thread has waited for it. Nothing orders blocks of a launch:
// no kernel has atomics. Launches are ordered by their end, of which a programmatic launch knows after
// griddepcontrol.wait. Writing the value that is already there is no race: Triton lets several threads store the same
// number.
#pragma once
#include <array>
#include <memory>
#include <unordered_map>

#include "program.h"

namespace ptx {

struct Stamp {  // of an access
  u32 pc = 0, block = 0, epoch = 0, warp_epoch = 0;
  u16 thread = 0, launch = 0;
};

struct Cell {
  Stamp write, read;
  u32 reading_warps = 0, reading_lanes = 0;  // since the reader's last barrier: all warps, and the last warp's lanes
  bool written = false, was_read = false, in_flight = false, several_blocks = false;
};

struct GlobalCells {
  using Page = std::array<Cell, 512>;
  std::unordered_map<u64, std::unique_ptr<Page>> pages;
  u32 unit = 16;
  u64 last_index = ~0ull;
  Page* last = nullptr;
  Cell& of(u64 address);
};

enum class Use : u8 { Read, Write, Copy };

// Note an access by a lane; `value`: what it writes, if that is known yet.
void note_shared(Context&, const Instruction&, u32 lane, u32 address, u32 size, Use, const void* value = nullptr);
void note_global(Context&, const Instruction&, u32 lane, u64 address, u32 size, Use, const void* value = nullptr);
void copy_arrived(Context&, u32 lane, u32 address, u32 size);

}  // namespace ptx
