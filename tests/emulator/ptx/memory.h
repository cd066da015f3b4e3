// Checked access to memory.
#pragma once
#include "machine.h"

namespace ptx {

// The host's address of bytes that a lane may access; stops the run if it may not.
u8* shared_at(Context&, const Instruction&, u32 lane, u64 address, u32 size);
u8* global_at(Context&, const Instruction&, u32 lane, u64 address, u32 size);

}  // namespace ptx
