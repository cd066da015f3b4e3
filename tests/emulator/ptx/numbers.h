// Number formats of PTX, and their rounding, in terms of integers and IEEE floats of the host.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

template <class To, class From>
inline To bits(From x) { return std::bit_cast<To>(x); }

constexpr float kNan = std::bit_cast<float>(0x7fffffffu);  // the only NaN that arithmetic of a GPU gives

inline float canonical(float x) { return x == x ? x : kNan; }
// .ftz: a subnormal number becomes a zero of its sign.
inline float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

// The nearest float whose last bit says that `x` lies beyond it ("round to odd"). Rounding the result again to at most 22
// bits gives what rounding `x` once would give.
inline float to_odd(double x) {
  const float f = static_cast<float>(x);
  if (!std::isfinite(f) || static_cast<double>(f) == x) return f;
  const u32 toward_zero = bits<u32>(f) - (std::fabs(static_cast<double>(f)) > std::fabs(x) ? 1 : 0);
  return bits<float>(toward_zero | 1);
}

// ---- bfloat16: the upper half of a float ----
inline float from_bf16(u16 x) { return bits<float>(static_cast<u32>(x) << 16); }
inline u16 to_bf16(float x) {
  const u32 b = bits<u32>(x);
  if (x != x) return 0x7fff;
  return static_cast<u16>((b + 0x7fff + (b >> 16 & 1)) >> 16);  // half of the last place, and one more if it is odd
}
inline u16 to_bf16(double x) { return to_bf16(to_odd(x)); }

// ---- float16: 5 bits of exponent with bias 15, 10 of fraction ----
inline float from_f16(u16 x) {
  // Shifted into a float the exponent is too small by 112; a product with 2^112 is exact, also for subnormal numbers.
  u32 b = bits<u32>(bits<float>(static_cast<u32>(x & 0x7fff) << 13) * 0x1p112f);
  if ((x & 0x7c00) == 0x7c00) b |= 0x7f800000;
  return bits<float>(b | static_cast<u32>(x & 0x8000) << 16);
}
inline u16 to_f16(float x) {
  const u32 b = bits<u32>(x) & 0x7fffffff, sign = bits<u32>(x) >> 16 & 0x8000;
  if (b > 0x7f800000) return 0x7fff;
  if (b >= 0x477ff000) return static_cast<u16>(sign | 0x7c00);  // from 65,520 on, which is nearer to 2^16
  if (b < 0x38800000)  // subnormal: at 0.5 the last place of a float is that of these numbers, 2^-24
    return static_cast<u16>(sign | (bits<u32>(bits<float>(b) + 0.5f) - bits<u32>(0.5f)));
  return static_cast<u16>(sign | (b - (112u << 23) + 0xfff + (b >> 13 & 1)) >> 13);
}
inline u16 to_f16(double x) { return to_f16(to_odd(x)); }

// ---- float8 e4m3: no infinity, one NaN per sign ----
inline float from_e4m3(u8 x) {
  const int exponent = x >> 3 & 15, fraction = x & 7;
  const float size = (x & 0x7f) == 0x7f ? kNan
                     : exponent         ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                                        : std::ldexp(static_cast<float>(fraction), -9);
  return x & 0x80 ? -size : size;
}

// ---- tf32: what the tensor cores read of a float ----
inline float read_tf32(u32 x) { return bits<float>(x & 0xffffe000u); }

// min and max of PTX: a NaN gives the other operand, and -0 is less than +0.
inline float lesser(float a, float b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
}
inline float greater(float a, float b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
}

// The lowest `size` bytes of a number, extended to 64 bits.
inline u64 extend(u64 x, u32 size, bool with_sign) {
  if (size >= 8) return x;
  const u32 unused = 64 - 8 * size;
  return with_sign ? static_cast<u64>(static_cast<s64>(x << unused) >> unused) : x << unused >> unused;
}

}  // namespace ptx
