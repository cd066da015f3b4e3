// The table of elementwise instructions: an opcode without words that change no value, and how to compute one lane.
//
// A row is written as a function of numbers; how many operands there are and how wide their registers must be follows
// from its type. To add an instruction, add a row. Keys have `b32` as `u32` and so on; `.rn`, `.approx` and `.full` are
// left out, and `.ftz` is in front: `ftz.ex2.f32`. An opcode that has no row is refused when a kernel is parsed.
#pragma once
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "machine.h"

namespace ptx {

struct Row {
  Handler run = nullptr;
  std::vector<u8> widths;  // of the registers, the result first
};
using Table = std::unordered_map<std::string, Row>;

const Table& elementwise();
void add_arithmetic(Table&);
void add_conversions(Table&);

namespace detail {

template <class F, class Result, class... In, size_t... N>
void each_lane(Context& c, const Instruction& i, u32 mask, std::index_sequence<N...>) {
  Result* out = c.at<Result>(i.at[0]);
  const std::tuple<const In*...> in{c.at<In>(i.at[N + 1])...};
  if (mask == kAll) {
#pragma GCC ivdep  // a lane reads and writes its own numbers only
    for (u32 lane = 0; lane < kLanes; ++lane) out[lane] = F{}(std::get<N>(in)[lane]...);
  } else {
    for (u32 lane = 0; lane < kLanes; ++lane)
      if (mask >> lane & 1) out[lane] = F{}(std::get<N>(in)[lane]...);
  }
}

template <class F, class Member>
struct RowOf;
template <class F, class Result, class... In>
struct RowOf<F, Result (F::*)(In...) const> {
  static void run(Context& c, const Instruction& i, u32 mask) {
    each_lane<F, Result, In...>(c, i, mask, std::index_sequence_for<In...>{});
  }
  static Row make() { return {&run, {sizeof(Result), sizeof(In)...}}; }
};

}  // namespace detail

// A row that computes each lane by a function without state, such as `[](u32 a, u32 b) -> u32 { return a + b; }`.
template <class F>
Row row(F) { return detail::RowOf<F, decltype(&F::operator())>::make(); }

}  // namespace ptx
