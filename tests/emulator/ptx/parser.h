// From the text of PTX to a kernel.
#pragma once
#include <string>

#include "program.h"

namespace ptx {

// Parses the kernel `entry`; throws ParseError with the line and the text of what it cannot.
Kernel parse(const std::string& text, const std::string& entry);

}  // namespace ptx
