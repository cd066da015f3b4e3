// Elementwise conversions: `cvt.TO.FROM`, with the rounding in front of TO where it is not to the nearest.
//
// The table has them for registers as wide as the numbers, 8-bit numbers in 16-bit registers. Triton's own conversion of
// int8 to bfloat16 has 8-bit registers. Between integers a register
// may be wider than its number: those are `convert_integers` in parser.cpp.
#include "table.h"

namespace ptx {
namespace {

// What a float becomes as an integer of type T: NaN is zero, and numbers out of range the nearest one in it.
template <class T, class Stored>
Stored to_integer(double x) {
  using Limits = std::numeric_limits<T>;
  const double end = std::ldexp(1.0, Limits::digits);
  if (x != x) return 0;
  if (x < static_cast<double>(Limits::min())) return static_cast<Stored>(Limits::min());
  return static_cast<Stored>(x >= end ? Limits::max() : static_cast<T>(x));
}

// Between a type of integers and all floats. Stored: the type of its registers.
template <class T, class Stored = T>
void integers_and_floats(Table& t, const std::string& type) {
  const auto from = [&](const std::string& source, auto raw, auto read) {
    (void)raw, (void)read;
    using Raw = decltype(raw);
    using Read = decltype(read);
    const std::string key = type + "." + source;
    t["cvt.rni." + key] = row([](Raw a) -> Stored { return to_integer<T, Stored>(std::nearbyint(Read{}(a))); });
    t["cvt.rzi." + key] = row([](Raw a) -> Stored { return to_integer<T, Stored>(std::trunc(Read{}(a))); });
    t["cvt.rmi." + key] = row([](Raw a) -> Stored { return to_integer<T, Stored>(std::floor(Read{}(a))); });
    t["cvt.rpi." + key] = row([](Raw a) -> Stored { return to_integer<T, Stored>(std::ceil(Read{}(a))); });
  };
  from("f32", float{}, [](float a) -> double { return a; });
  from("f64", double{}, [](double a) -> double { return a; });
  from("f16", u16{}, [](u16 a) -> double { return from_f16(a); });
  from("bf16", u16{}, [](u16 a) -> double { return from_bf16(a); });
  t["ftz.cvt.rni." + type + ".f32"] = row([](float a) -> Stored { return to_integer<T, Stored>(std::nearbyint(flushed(a))); });
  t["ftz.cvt.rzi." + type + ".f32"] = row([](float a) -> Stored { return to_integer<T, Stored>(std::trunc(flushed(a))); });
  t["cvt.f32." + type] = row([](Stored a) -> float { return static_cast<float>(static_cast<T>(a)); });
  t["cvt.f64." + type] = row([](Stored a) -> double { return static_cast<double>(static_cast<T>(a)); });
  t["cvt.f16." + type] = row([](Stored a) -> u16 { return to_f16(static_cast<double>(static_cast<T>(a))); });
  t["cvt.bf16." + type] = row([](Stored a) -> u16 { return to_bf16(static_cast<double>(static_cast<T>(a))); });
}

// Toward zero.
float chopped(double x) {
  const float f = static_cast<float>(x);
  return std::fabs(static_cast<double>(f)) > std::fabs(x) ? std::nextafter(f, 0.0f) : f;
}

u32 pair(u16 low, u16 high) { return low | static_cast<u32>(high) << 16; }

}  // namespace

void add_conversions(Table& t) {
  integers_and_floats<u8, u16>(t, "u8");
  integers_and_floats<s8, u16>(t, "s8");
  integers_and_floats<u16>(t, "u16");
  integers_and_floats<s16>(t, "s16");
  integers_and_floats<u32>(t, "u32");
  integers_and_floats<s32>(t, "s32");
  integers_and_floats<u64>(t, "u64");
  integers_and_floats<s64>(t, "s64");

  t["cvt.f32.s8 of 8 bits"] = row([](u8 a) -> float { return static_cast<float>(static_cast<s8>(a)); });
  t["cvt.f32.bf16"] = row([](u16 a) -> float { return canonical(from_bf16(a)); });
  t["cvt.f32.f16"] = row([](u16 a) -> float { return canonical(from_f16(a)); });
  t["cvt.f32.f64"] = row([](double a) -> float { return canonical(static_cast<float>(a)); });
  t["cvt.rz.f32.f64"] = row([](double a) -> float { return canonical(chopped(a)); });
  t["cvt.f64.f32"] = row([](float a) -> double { return a; });
  t["cvt.bf16.f32"] = row([](float a) -> u16 { return to_bf16(a); });
  t["cvt.rz.bf16.f32"] = row([](float a) -> u16 { return a == a ? static_cast<u16>(bits<u32>(a) >> 16) : 0x7fff; });
  t["cvt.f16.f32"] = row([](float a) -> u16 { return to_f16(a); });
  t["cvt.f16.f64"] = row([](double a) -> u16 { return to_f16(a); });
  t["cvt.bf16.f64"] = row([](double a) -> u16 { return to_bf16(a); });
  t["cvt.bf16.f16"] = row([](u16 a) -> u16 { return to_bf16(from_f16(a)); });
  t["ftz.cvt.f32.f16"] = t["cvt.f32.f16"];
  t["ftz.cvt.f16.f32"] = row([](float a) -> u16 { return to_f16(flushed(a)); });
  // To the nearest, halves to even (rn) or away from zero (rna).
  t["cvt.tf32.f32"] = row([](float a) -> u32 { return a == a ? (bits<u32>(a) + 0xfff + (bits<u32>(a) >> 13 & 1)) & 0xffffe000u : 0x7fffffffu; });
  t["cvt.rna.tf32.f32"] = row([](float a) -> u32 { return a == a ? (bits<u32>(a) + 0x1000) & 0xffffe000u : 0x7fffffffu; });
  // Whole numbers as floats, and numbers limited to 0 .. 1.
  t["cvt.rni.f32.f32"] = row([](float a) -> float { return canonical(std::nearbyint(a)); });
  t["cvt.rzi.f32.f32"] = row([](float a) -> float { return canonical(std::trunc(a)); });
  t["cvt.rmi.f32.f32"] = row([](float a) -> float { return canonical(std::floor(a)); });
  t["cvt.rpi.f32.f32"] = row([](float a) -> float { return canonical(std::ceil(a)); });
  t["cvt.sat.f32.f32"] = row([](float a) -> float { return a != a ? 0.0f : std::clamp(a, 0.0f, 1.0f); });
  t["ftz.cvt.rmi.f32.f32"] = row([](float a) -> float { return canonical(std::floor(flushed(a))); });
  t["ftz.cvt.rpi.f32.f32"] = row([](float a) -> float { return canonical(std::ceil(flushed(a))); });
  for (const char* name : {"rni.f32.f32", "rzi.f32.f32"}) t[std::string("ftz.cvt.") + name] = t[std::string("cvt.") + name];
  // Pairs: the first operand is the upper half.
  t["cvt.f16x2.f32"] = row([](float a, float b) -> u32 { return pair(to_f16(b), to_f16(a)); });
  t["cvt.bf16x2.f32"] = row([](float a, float b) -> u32 { return pair(to_bf16(b), to_bf16(a)); });
  t["cvt.f16x2.e4m3x2"] = row([](u16 a) -> u32 { return pair(to_f16(from_e4m3(static_cast<u8>(a))), to_f16(from_e4m3(static_cast<u8>(a >> 8)))); });
}

}  // namespace ptx
