// A kernel as parsed: instructions with the places of their operands.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"

namespace ptx {

constexpr u32 kLanes = 32, kAll = 0xffffffffu;
constexpr u32 kSharedBase = 1024;  // the address of a block's shared memory: not zero, so that null is out of bounds

struct Context;
struct Instruction;
// Executes an instruction for the lanes of `mask`.
using Handler = void (*)(Context&, const Instruction&, u32 mask);

// What the scheduler does with an instruction; all but `Run` change which warp runs, or where it goes on.
enum class Kind : u8 { Run, Nothing, Branch, Exit, Barrier, WarpBarrier, GridWait, GridLaunch };

// A register: one value per lane, one after another, `width` bytes each. Width 0: `_`, which takes nothing.
struct Register {
  u32 offset = 0;
  u8 width = 0;
};
using Registers = std::vector<Register>;

enum class Space : u8 { Global, Shared, Param };

struct Instruction {
  Handler run = nullptr;
  Kind kind = Kind::Run;
  bool guarded = false, negated = false;  // @p, @!p
  bool together = false;                  // every live lane of the warp must execute it at once
  u32 guard = 0;
  u32 at[5] = {};          // elementwise: offsets of the registers, the result first
  Registers d, a, b, c;    // others: registers of the result and of the operands
  // Of memory, matrix and warp instructions; each says what it means there.
  s64 offset = 0, offset_b = 0;
  u32 size = 0, count = 1, target = 0, value = 0;
  Space space = Space::Global;
  bool with_sign = false, flag = false;
  u8 mode = 0, type = 0;
  // Where it is from.
  u32 line = 0, source_line = 0, source_file = 0;
  std::string text;
};

struct Parameter {
  std::string name;
  u32 offset, size;
};

enum class Special : u8 { TidX, TidY, TidZ, NtidX, NtidY, NtidZ, CtaX, CtaY, CtaZ, NctaX, NctaY, NctaZ, Lane, Warp, Zero };

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  std::vector<std::string> files;  // of the sources
  u32 parameter_bytes = 0, register_bytes = 0;
  u32 threads = 0;  // .reqntid; 0: any
  std::vector<std::pair<Register, u64>> constants;
  std::vector<std::pair<Register, Special>> specials;
  // The smallest access to each memory: what the race detector keeps one record of.
  u32 shared_unit = 16, global_unit = 16;
};

}  // namespace ptx
