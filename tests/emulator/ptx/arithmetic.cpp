// Elementwise arithmetic, comparisons and bits.
#include "table.h"

namespace ptx {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
using Wide = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, s32, u32>,
             std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, s64, u64>,
                                std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

// What setp tests, of numbers that can all be compared.
template <class T, class Read>
void comparisons(Table& t, const std::string& prefix, const std::string& type, Read) {
  const auto add = [&](const char* name, auto test) {
    (void)test;
    t[prefix + "setp." + name + "." + type] =
        row([](T a, T b) -> u8 { return decltype(test){}(Read{}(a), Read{}(b)); });
  };
  add("eq", [](auto a, auto b) { return a == b; });
  add("ne", [](auto a, auto b) { return a < b || a > b; });  // not of a NaN
  add("lt", [](auto a, auto b) { return a < b; });
  add("le", [](auto a, auto b) { return a <= b; });
  add("gt", [](auto a, auto b) { return a > b; });
  add("ge", [](auto a, auto b) { return a >= b; });
  // Names of the unsigned ones; of floats the same letters and `u` are true for a NaN.
  add("lo", [](auto a, auto b) { return a < b; });
  add("ls", [](auto a, auto b) { return a <= b; });
  add("hi", [](auto a, auto b) { return a > b; });
  add("hs", [](auto a, auto b) { return a >= b; });
  add("equ", [](auto a, auto b) { return !(a < b || a > b); });
  add("neu", [](auto a, auto b) { return !(a == b); });
  add("ltu", [](auto a, auto b) { return !(a >= b); });
  add("leu", [](auto a, auto b) { return !(a > b); });
  add("gtu", [](auto a, auto b) { return !(a <= b); });
  add("geu", [](auto a, auto b) { return !(a < b); });
  add("num", [](auto a, auto b) { return a == a && b == b; });
  add("nan", [](auto a, auto b) { return a != a || b != b; });
}

template <class T>
void moves(Table& t, const std::string& type) {
  t["mov." + type] = row([](T a) -> T { return a; });
  t["selp." + type] = row([](T a, T b, u8 p) -> T { return p ? a : b; });
}

template <class T>
void integers(Table& t, const std::string& type) {
  using U = Unsigned<T>;
  t["add." + type] = row([](T a, T b) -> T { return static_cast<T>(U(a) + U(b)); });
  t["sub." + type] = row([](T a, T b) -> T { return static_cast<T>(U(a) - U(b)); });
  t["min." + type] = row([](T a, T b) -> T { return std::min(a, b); });
  t["max." + type] = row([](T a, T b) -> T { return std::max(a, b); });
  t["and." + type] = row([](T a, T b) -> T { return a & b; });
  t["or." + type] = row([](T a, T b) -> T { return a | b; });
  t["xor." + type] = row([](T a, T b) -> T { return a ^ b; });
  t["not." + type] = row([](T a) -> T { return ~a; });
  t["neg." + type] = row([](T a) -> T { return static_cast<T>(U(0) - U(a)); });
  t["abs." + type] = row([](T a) -> T { return a < 0 ? static_cast<T>(U(0) - U(a)) : a; });
  t["mul.lo." + type] = row([](T a, T b) -> T { return static_cast<T>(Wide<T>(a) * Wide<T>(b)); });
  t["mul.hi." + type] = row([](T a, T b) -> T { return static_cast<T>(Wide<T>(a) * Wide<T>(b) >> 8 * sizeof(T)); });
  t["mad.lo." + type] = row([](T a, T b, T c) -> T { return static_cast<T>(Wide<T>(a) * Wide<T>(b) + c); });
  t["mad.hi." + type] =
      row([](T a, T b, T c) -> T { return static_cast<T>(U(Wide<T>(a) * Wide<T>(b) >> 8 * sizeof(T)) + U(c)); });
  if constexpr (sizeof(T) < 8) {
    t["mul.wide." + type] = row([](T a, T b) -> Wide<T> { return Wide<T>(a) * Wide<T>(b); });
    t["mad.wide." + type] = row([](T a, T b, Wide<T> c) -> Wide<T> { return Wide<T>(a) * Wide<T>(b) + c; });
  }
  // A division by zero is not defined; NVIDIA's gives all ones.
  t["div." + type] = row([](T a, T b) -> T {
    return !b ? T(-1) : std::is_signed_v<T> && b == T(-1) ? static_cast<T>(U(0) - U(a)) : static_cast<T>(a / b);
  });
  t["rem." + type] = row([](T a, T b) -> T { return !b ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : static_cast<T>(a % b); });
  t["shl." + type] = row([](T a, u32 n) -> T { return n >= 8 * sizeof(T) ? T(0) : static_cast<T>(U(a) << n); });
  t["shr." + type] = row([](T a, u32 n) -> T {
    if (std::is_signed_v<T>) return static_cast<T>(a >> std::min<u32>(n, 8 * sizeof(T) - 1));
    return n >= 8 * sizeof(T) ? T(0) : static_cast<T>(a >> n);
  });
  moves<T>(t, type);
  struct Same { T operator()(T a) const { return a; } };
  comparisons<T>(t, "", type, Same{});
}

template <class T>
void counted_bits(Table& t, const std::string& type) {
  t["popc." + type] = row([](T a) -> u32 { return static_cast<u32>(std::popcount(a)); });
  t["clz." + type] = row([](T a) -> u32 { return static_cast<u32>(std::countl_zero(a)); });
  t["bfind." + type] = row([](T a) -> u32 { return a ? static_cast<u32>(8 * sizeof(T) - 1) - static_cast<u32>(std::countl_zero(a)) : kAll; });
}

u32 low_bits(u32 count) { return count >= 32 ? kAll : (1u << count) - 1; }

void bits_of_words(Table& t) {
  t["brev.u32"] = row([](u32 a) -> u32 {
    u32 out = 0;
    for (u32 n = 0; n < 32; ++n) out |= (a >> n & 1) << (31 - n);
    return out;
  });
  t["bfe.u32"] = row([](u32 a, u32 at, u32 count) -> u32 { return (at & 255) > 31 ? 0 : a >> (at & 255) & low_bits(count & 255); });
  t["bfe.u64"] = row([](u64 a, u32 at, u32 count) -> u64 {
    const u64 low = (count & 255) > 63 ? ~u64{0} : (u64{1} << (count & 255)) - 1;
    return (at & 255) > 63 ? 0 : a >> (at & 255) & low;
  });
  t["bfe.s32"] = row([](s32 a, u32 at, u32 count) -> s32 {
    const u32 n = count & 255;
    if (!n) return 0;
    const s64 x = static_cast<s64>(a) >> std::min(at & 255, 63u);  // beyond the end the sign goes on
    return n >= 32 ? static_cast<s32>(x) : static_cast<s32>(static_cast<s64>(static_cast<u64>(x) << (64 - n)) >> (64 - n));
  });
  t["bfi.u32"] = row([](u32 a, u32 b, u32 at, u32 count) -> u32 {
    if ((at & 255) > 31) return b;
    const u32 mask = low_bits(count & 255) << (at & 255);
    return (a << (at & 255) & mask) | (b & ~mask);
  });
  t["lop3.u32"] = row([](u32 a, u32 b, u32 c, u32 table) -> u32 {
    u32 out = 0;
    for (u32 n = 0; n < 8; ++n)
      if (table >> n & 1) out |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
    return out;
  });
  t["prmt.u32"] = row([](u32 a, u32 b, u32 choice) -> u32 {
    const u64 both = static_cast<u64>(b) << 32 | a;
    u32 out = 0;
    for (u32 n = 0; n < 4; ++n) {
      const u32 which = choice >> 4 * n & 15, byte = static_cast<u32>(both >> 8 * (which & 7)) & 255;
      out |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * n;
    }
    return out;
  });
  // A funnel shift: the upper or lower half of two words, shifted by at most 32 or by the count modulo 32.
  t["shf.l.wrap.u32"] = row([](u32 a, u32 b, u32 n) -> u32 { return static_cast<u32>((static_cast<u64>(b) << 32 | a) << (n & 31) >> 32); });
  t["shf.l.clamp.u32"] = row([](u32 a, u32 b, u32 n) -> u32 { return n >= 32 ? a : static_cast<u32>((static_cast<u64>(b) << 32 | a) << n >> 32); });
  t["shf.r.wrap.u32"] = row([](u32 a, u32 b, u32 n) -> u32 { return static_cast<u32>((static_cast<u64>(b) << 32 | a) >> (n & 31)); });
  t["shf.r.clamp.u32"] = row([](u32 a, u32 b, u32 n) -> u32 { return static_cast<u32>((static_cast<u64>(b) << 32 | a) >> std::min(n, 32u)); });
}

void predicates(Table& t) {
  t["not.pred"] = row([](u8 a) -> u8 { return !a; });
  t["and.pred"] = row([](u8 a, u8 b) -> u8 { return a & b; });
  t["or.pred"] = row([](u8 a, u8 b) -> u8 { return a | b; });
  t["xor.pred"] = row([](u8 a, u8 b) -> u8 { return a ^ b; });
  moves<u8>(t, "pred");
}

template <bool kFtz>
float in(float x) { return kFtz ? flushed(x) : x; }
template <bool kFtz>
float out(float x) { return canonical(kFtz ? flushed(x) : x); }

// Functions of fp32. `.approx` ones are exact to fp32 here, which hardware is not.
template <bool kFtz>
void floats(Table& t) {
  const std::string prefix = kFtz ? "ftz." : "";
  const auto one = [&](const char* name, auto f) {
    (void)f;
    t[prefix + name + ".f32"] = row([](float a) -> float { return out<kFtz>(decltype(f){}(in<kFtz>(a))); });
  };
  const auto two = [&](const char* name, auto f) {
    (void)f;
    t[prefix + name + ".f32"] = row([](float a, float b) -> float { return out<kFtz>(decltype(f){}(in<kFtz>(a), in<kFtz>(b))); });
  };
  two("add", [](float a, float b) { return a + b; });
  two("sub", [](float a, float b) { return a - b; });
  two("mul", [](float a, float b) { return a * b; });
  two("div", [](float a, float b) { return a / b; });
  two("min", [](float a, float b) { return lesser(a, b); });
  two("max", [](float a, float b) { return greater(a, b); });
  two("min.NaN", [](float a, float b) { return a != a || b != b ? kNan : lesser(a, b); });
  two("max.NaN", [](float a, float b) { return a != a || b != b ? kNan : greater(a, b); });
  // The lesser or greater size, with the sign of the product.
  two("min.xorsign.abs", [](float a, float b) { return std::copysign(lesser(std::fabs(a), std::fabs(b)), std::copysign(1.0f, a) * std::copysign(1.0f, b)); });
  two("max.xorsign.abs", [](float a, float b) { return std::copysign(greater(std::fabs(a), std::fabs(b)), std::copysign(1.0f, a) * std::copysign(1.0f, b)); });
  one("rcp", [](float a) { return 1.0f / a; });
  one("sqrt", [](float a) { return std::sqrt(a); });
  one("rsqrt", [](float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); });
  one("ex2", [](float a) { return std::exp2(a); });
  one("lg2", [](float a) { return std::log2(a); });
  one("sin", [](float a) { return std::sin(a); });
  one("cos", [](float a) { return std::cos(a); });
  one("tanh", [](float a) { return std::tanh(a); });
  t[prefix + "fma.f32"] = row([](float a, float b, float c) -> float { return out<kFtz>(std::fma(in<kFtz>(a), in<kFtz>(b), in<kFtz>(c))); });
  t[prefix + "neg.f32"] = row([](u32 a) -> u32 { return a ^ 0x80000000u; });
  t[prefix + "abs.f32"] = row([](u32 a) -> u32 { return a & 0x7fffffffu; });
  struct Read { float operator()(float a) const { return in<kFtz>(a); } };
  comparisons<float>(t, prefix, "f32", Read{});
}

void doubles(Table& t) {
  t["add.f64"] = row([](double a, double b) -> double { return a + b; });
  t["sub.f64"] = row([](double a, double b) -> double { return a - b; });
  t["mul.f64"] = row([](double a, double b) -> double { return a * b; });
  t["div.f64"] = row([](double a, double b) -> double { return a / b; });
  t["fma.f64"] = row([](double a, double b, double c) -> double { return std::fma(a, b, c); });
  moves<u64>(t, "f64");
  struct Same { double operator()(double a) const { return a; } };
  comparisons<double>(t, "", "f64", Same{});
}

struct Half {
  static double read(u16 x) { return from_f16(x); }
  static u16 write(double x) { return to_f16(x); }
};
struct BFloat {
  static double read(u16 x) { return from_bf16(x); }
  static u16 write(double x) { return to_bf16(x); }
};
constexpr u16 upper(u32 x) { return static_cast<u16>(x >> 16); }
constexpr u16 lower(u32 x) { return static_cast<u16>(x); }
constexpr u32 pair(u16 low, u16 high) { return low | static_cast<u32>(high) << 16; }

// Functions of 16-bit floats and of packed pairs, rounded once.
template <class Format>
void halves(Table& t, const std::string& type) {
  const auto two = [&](const char* name, auto f) {
    (void)f;
    struct One {
      u16 operator()(u16 a, u16 b) const { return Format::write(decltype(f){}(Format::read(a), Format::read(b))); }
    };
    t[std::string(name) + "." + type] = row(One{});
    t[std::string(name) + "." + type + "x2"] =
        row([](u32 a, u32 b) -> u32 { return pair(One{}(lower(a), lower(b)), One{}(upper(a), upper(b))); });
  };
  two("add", [](double a, double b) { return a + b; });
  two("sub", [](double a, double b) { return a - b; });
  two("mul", [](double a, double b) { return a * b; });
  two("min", [](double a, double b) { return static_cast<double>(lesser(static_cast<float>(a), static_cast<float>(b))); });
  two("max", [](double a, double b) { return static_cast<double>(greater(static_cast<float>(a), static_cast<float>(b))); });
  struct Fma {
    u16 operator()(u16 a, u16 b, u16 c) const { return Format::write(Format::read(a) * Format::read(b) + Format::read(c)); }
  };
  t["fma." + type] = row(Fma{});
  t["fma." + type + "x2"] = row([](u32 a, u32 b, u32 c) -> u32 {
    return pair(Fma{}(lower(a), lower(b), lower(c)), Fma{}(upper(a), upper(b), upper(c)));
  });
  t["neg." + type] = row([](u16 a) -> u16 { return a ^ 0x8000; });
  t["abs." + type] = row([](u16 a) -> u16 { return a & 0x7fff; });
  t["neg." + type + "x2"] = row([](u32 a) -> u32 { return a ^ 0x80008000u; });
  t["abs." + type + "x2"] = row([](u32 a) -> u32 { return a & 0x7fff7fffu; });
  struct Read { double operator()(u16 a) const { return Format::read(a); } };
  comparisons<u16>(t, "", type, Read{});
  moves<u16>(t, type);
}

}  // namespace

void add_arithmetic(Table& t) {
  integers<u16>(t, "u16");
  integers<s16>(t, "s16");
  integers<u32>(t, "u32");
  integers<s32>(t, "s32");
  integers<u64>(t, "u64");
  integers<s64>(t, "s64");
  counted_bits<u32>(t, "u32");
  counted_bits<u64>(t, "u64");
  bits_of_words(t);
  predicates(t);
  floats<false>(t);
  floats<true>(t);
  t["copysign.f32"] = row([](u32 a, u32 b) -> u32 { return (a & 0x80000000u) | (b & 0x7fffffffu); });
  moves<u32>(t, "f32");
  doubles(t);
  halves<Half>(t, "f16");
  halves<BFloat>(t, "bf16");
}

const Table& elementwise() {
  static const Table table = [] {
    Table t;
    add_arithmetic(t);
    add_conversions(t);
    return t;
  }();
  return table;
}

}  // namespace ptx
