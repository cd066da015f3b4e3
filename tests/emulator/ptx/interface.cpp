// The C interface that Python calls. Texts are returned in `out`; findings as lines of fields, see findings.py.
#include <cstdio>
#include <cstring>

#include "machine.h"
#include "parser.h"

namespace ptx {
namespace {

void give(char* out, size_t size, const std::string& text) { std::snprintf(out, size, "%s", text.c_str()); }

std::string as_text(const Machine& machine, const Finding& finding, u32 times, bool stopped) {
  std::string text = "F\t" + finding.kind + "\t" + std::to_string(times) + "\t" + (stopped ? "1" : "0") + "\n";
  for (const Access& access : finding.accesses) {
    const Kernel& kernel = *machine.launches[access.launch]->kernel;
    const Instruction& i = kernel.code[access.pc];
    const std::string file = i.source_file < kernel.files.size() ? kernel.files[i.source_file] : "";
    text += "A\t" + kernel.name + "\t" + std::to_string(access.launch) + "\t" + std::to_string(access.block) + "\t" +
            std::to_string(access.thread) + "\t" + std::to_string(i.line) + "\t" + file + "\t" + std::to_string(i.source_line) + "\t" +
            i.text + "\n";
  }
  return text;
}

}  // namespace
}  // namespace ptx

extern "C" {

struct PtxLaunch {
  void* kernel;
  uint32_t grid[3], threads, shared, programmatic;
  const uint64_t* parameters;  // 8 bytes each
  const uint64_t* ranges;      // first and last address of each tensor
  uint64_t range_count;
};

void* ptx_load(const char* text, const char* entry, char* out, size_t size) {
  try {
    return new ptx::Kernel(ptx::parse(text, entry));
  } catch (const std::exception& error) {
    ptx::give(out, size, error.what());
    return nullptr;
  }
}

void ptx_unload(void* kernel) { delete static_cast<ptx::Kernel*>(kernel); }

// Sizes in bytes of a kernel's parameters; returns how many it has.
uint32_t ptx_parameters(void* kernel, uint32_t* sizes, uint32_t most) {
  const auto& parameters = static_cast<ptx::Kernel*>(kernel)->parameters;
  for (size_t n = 0; n < parameters.size() && n < most; ++n) sizes[n] = parameters[n].size;
  return static_cast<uint32_t>(parameters.size());
}

// Runs launches as one stream; returns 0, or 1 if there are findings.
int ptx_run(const PtxLaunch* launches, uint32_t count, const ptx::Settings* settings, uint64_t* instructions, char* out, size_t size) {
  ptx::Machine machine;
  machine.settings = *settings;
  machine.random.seed(settings->seed);
  for (uint32_t n = 0; n < count; ++n) {
    const PtxLaunch& given = launches[n];
    auto launch = std::make_unique<ptx::Launch>();
    launch->kernel = static_cast<ptx::Kernel*>(given.kernel);
    launch->index = n;
    launch->threads = given.threads;
    launch->shared = given.shared;
    launch->programmatic = given.programmatic;
    std::copy(given.grid, given.grid + 3, launch->grid);
    launch->blocks = given.grid[0] * given.grid[1] * given.grid[2];
    const auto& parameters = launch->kernel->parameters;
    launch->parameters.resize(launch->kernel->parameter_bytes + 8);
    for (size_t k = 0; k < parameters.size(); ++k)
      std::memcpy(&launch->parameters[parameters[k].offset], &given.parameters[k], std::min(parameters[k].size, 8u));
    for (uint64_t k = 0; k < given.range_count; ++k) launch->ranges.push_back({given.ranges[2 * k], given.ranges[2 * k + 1]});
    machine.cells.unit = std::min(machine.cells.unit, launch->kernel->global_unit);
    machine.launches.push_back(std::move(launch));
  }
  std::string text;
  try {
    machine.run();
  } catch (const ptx::Stopped& stopped) {
    text = ptx::as_text(machine, stopped.finding, 1, true);
  }
  for (const auto& [key, found] : machine.findings) text += ptx::as_text(machine, found.first, found.second, false);
  *instructions = machine.instructions;
  ptx::give(out, size, text);
  return !text.empty();
}
}
