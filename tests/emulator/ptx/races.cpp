#include "races.h"

#include <cstring>

#include "machine.h"

namespace ptx {

Cell& GlobalCells::of(u64 address) {
  const u64 index = address / unit;
  if (last_index != index / 512) {
    auto& page = pages[index / 512];
    if (!page) page = std::make_unique<Page>();
    last = page.get();
    last_index = index / 512;
  }
  return (*last)[index % 512];
}

namespace {

Stamp stamp(const Context& c, const Instruction& i, u32 lane) {
  return {c.pc(i), c.block.id, c.block.epoch, c.warp.epoch, static_cast<u16>(c.thread(lane)), static_cast<u16>(c.launch.index)};
}

void race(Context& c, const std::string& kind, const Instruction& i, u32 lane, const Stamp& other) {
  c.machine.find({kind, {c.access(i, lane), {other.launch, other.block, other.thread, other.pc}}});
}

bool same_warp(const Stamp& one, const Stamp& other) { return one.thread / kLanes == other.thread / kLanes; }

// Within a block: whether `other` happened before `now`.
bool before(const Stamp& other, const Stamp& now) {
  if (other.thread == now.thread || other.epoch < now.epoch) return true;
  return same_warp(other, now) && other.warp_epoch < now.warp_epoch;
}

void note_reader(Cell& cell, const Stamp& now) {
  const Stamp& last = cell.read;
  const bool here = cell.was_read && last.launch == now.launch && last.block == now.block && last.epoch == now.epoch;
  const bool same_lanes = here && same_warp(last, now) && last.warp_epoch == now.warp_epoch;
  cell.several_blocks = cell.was_read && last.launch == now.launch && (cell.several_blocks || last.block != now.block);
  cell.reading_warps = (here ? cell.reading_warps : 0) | 1u << now.thread / kLanes;
  cell.reading_lanes = (same_lanes ? cell.reading_lanes : 0) | 1u << now.thread % kLanes;
  cell.was_read = true;
  cell.read = now;
}

// Within a block: whether everyone who reads the cell in this epoch did so before `now`.
bool readers_before(const Cell& cell, const Stamp& now) {
  if (cell.read.epoch < now.epoch) return true;
  if (cell.reading_warps & ~(1u << now.thread / kLanes)) return false;
  return cell.read.warp_epoch < now.warp_epoch || !(cell.reading_lanes & ~(1u << now.thread % kLanes));
}

void note_writer(Cell& cell, const Stamp& now, Use use) {
  cell.written = true;
  cell.write = now;
  cell.in_flight = use == Use::Copy;
}

bool writes(Use use) { return use != Use::Read; }

// Whether an access of this launch or an earlier one happened before `now`.
bool ordered(Context& c, const Stamp& other, const Stamp& now) {
  if (other.launch == now.launch) return other.block == now.block && before(other, now);
  // A launch without the attribute starts after all before it. A programmatic one knows of the end of the one before
  // after its wait, and of earlier ones if every block of that one had waited, too.
  for (u32 n = other.launch + 1; n <= now.launch; ++n) {
    const Launch& launch = *c.machine.launches[n];
    if (!launch.programmatic) return true;
    if (n == now.launch ? !c.block.waited : !(launch.every_block_waited && launch.complete())) return false;
  }
  return true;
}

std::string between(const Stamp& other, const Stamp& now) {
  if (other.launch != now.launch) return "between launches";
  return other.block != now.block ? "between blocks" : same_warp(other, now) ? "within a warp" : "within a block";
}

}  // namespace

void note_shared(Context& c, const Instruction& i, u32 lane, u32 address, u32 size, Use use, const void* value) {
  if (!c.machine.settings.races) return;
  const u32 unit = c.launch.kernel->shared_unit;
  const Stamp now = stamp(c, i, lane);
  for (u32 at = address; at < address + size; at += unit) {
    Cell& cell = c.block.cells[(at - kSharedBase) / unit];
    if (cell.in_flight)
      race(c, std::string("RACE in shared memory, ") + (writes(use) ? "write over" : "read of") + " a copy in flight", i, lane, cell.write);
    const bool unordered = cell.written && !cell.in_flight && !before(cell.write, now);
    if (!writes(use)) {
      if (!cell.written) c.find("UNWRITTEN shared memory is read", i, lane);
      if (unordered) race(c, "RACE in shared memory " + between(cell.write, now) + ", read after write", i, lane, cell.write);
      note_reader(cell, now);
      continue;
    }
    const u8* bytes = static_cast<const u8*>(value);
    const auto changes = [&] { return !bytes || std::memcmp(bytes + (at - address), &c.block.shared[at - kSharedBase], unit); };
    if (unordered && changes()) race(c, "RACE in shared memory " + between(cell.write, now) + ", two writes", i, lane, cell.write);
    if (cell.was_read && !readers_before(cell, now) && changes())
      race(c, "RACE in shared memory " + between(cell.read, now) + ", write after read", i, lane, cell.read);
    note_writer(cell, now, use);
    cell.reading_warps = cell.reading_lanes = 0;
    cell.was_read = false;
  }
}

void note_global(Context& c, const Instruction& i, u32 lane, u64 address, u32 size, Use use, const void* value) {
  if (!c.machine.settings.races) return;
  const u32 unit = c.machine.cells.unit;
  const Stamp now = stamp(c, i, lane);
  for (u64 at = address; at < address + size; at += unit) {
    Cell& cell = c.machine.cells.of(at);
    const u8* bytes = static_cast<const u8*>(value);
    const auto changes = [&] {
      return !bytes || std::memcmp(bytes + (at - address), reinterpret_cast<const void*>(at), unit);
    };
    if (cell.written && !ordered(c, cell.write, now) && (!writes(use) || changes()))
      race(c, "RACE in global memory " + between(cell.write, now) + (writes(use) ? ", two writes" : ", read after write"), i, lane, cell.write);
    if (!writes(use)) {
      note_reader(cell, now);
      continue;
    }
    if (cell.was_read) {
      const bool here = cell.read.launch == now.launch && cell.read.block == now.block && !cell.several_blocks;
      const bool safe = here ? readers_before(cell, now)
                             : !(cell.several_blocks && cell.read.launch == now.launch) && ordered(c, cell.read, now);
      if (!safe && changes())
        race(c, "RACE in global memory " + between(cell.read, now) + ", write after read", i, lane, cell.read);
    }
    note_writer(cell, now, use);
    cell.was_read = cell.several_blocks = false;
  }
}

void copy_arrived(Context& c, u32 lane, u32 address, u32 size) {
  if (!c.machine.settings.races) return;
  const u32 unit = c.launch.kernel->shared_unit;
  for (u32 at = address; at < address + size; at += unit) {
    Cell& cell = c.block.cells[(at - kSharedBase) / unit];
    if (!cell.in_flight || cell.write.thread != c.thread(lane)) continue;
    cell.in_flight = false;
    cell.write.epoch = c.block.epoch;
    cell.write.warp_epoch = c.warp.epoch;
  }
}

}  // namespace ptx
