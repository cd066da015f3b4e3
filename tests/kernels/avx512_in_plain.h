// AVX-512's instructions as loops, so that the forms of csrc/cpu that use them run on every CPU with AVX2:
// sanitize_cpu.py compiles them with this header where the machine lacks the instructions.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
#define MEDUSA_PLAIN 1  // no registers of 64 bytes

namespace plain {

template <class T, int kCount>
struct Lanes {
  T at[kCount];
};

// What `lane` gives for each lane of the result.
template <class V, class T, class Lane>
inline __attribute__((always_inline)) V each(const Lane& lane) {
  constexpr int kCount = sizeof(V) / sizeof(T);
  Lanes<T, kCount> lanes;
  for (int i = 0; i < kCount; ++i) lanes.at[i] = static_cast<T>(lane(i));
  V v;
  std::memcpy(&v, &lanes, sizeof v);
  return v;
}

template <class T, class V>
inline __attribute__((always_inline)) Lanes<T, sizeof(V) / sizeof(T)> lanes(V v) {
  Lanes<T, sizeof(V) / sizeof(T)> found;
  std::memcpy(&found, &v, sizeof v);
  return found;
}

inline float wide(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace plain

#define PLAIN static inline __attribute__((always_inline))
using plain::each;
using plain::lanes;

PLAIN __m512i plain_cvtepi8_epi32(unsigned, __m128i a) {
  return each<__m512i, int32_t>([x = lanes<int8_t>(a)](int i) { return x.at[i]; });
}
PLAIN __m512i plain_cvtepu8_epi32(unsigned, __m128i a) {
  return each<__m512i, int32_t>([x = lanes<uint8_t>(a)](int i) { return x.at[i]; });
}
PLAIN __m512i plain_cvtepu8_epi16(unsigned, __m256i a) {
  return each<__m512i, int16_t>([x = lanes<uint8_t>(a)](int i) { return x.at[i]; });
}
PLAIN __m512i plain_srli_epi16(unsigned, __m512i a, unsigned n) {
  return each<__m512i, uint16_t>([x = lanes<uint16_t>(a), n](int i) { return x.at[i] >> n; });
}
PLAIN __m512i plain_set1_epi64(int64_t a) { return each<__m512i, int64_t>([a](int) { return a; }); }
PLAIN __m512i plain_mul_epu32(unsigned, __m512i a, __m512i b) {
  return each<__m512i, uint64_t>([x = lanes<uint32_t>(a), y = lanes<uint32_t>(b)](int i) {
    return uint64_t{x.at[2 * i]} * y.at[2 * i];
  });
}
PLAIN __m512 plain_permutexvar_ps(unsigned, __m512i at, __m512 a) {
  return each<__m512, float>([x = lanes<float>(a), p = lanes<int32_t>(at)](int i) { return x.at[p.at[i] & 15]; });
}
PLAIN __m512 plain_permutex2var_ps(__m512 a, __m512i at, __m512 b) {
  return each<__m512, float>([x = lanes<float>(a), y = lanes<float>(b), p = lanes<int32_t>(at)](int i) {
    return p.at[i] & 16 ? y.at[p.at[i] & 15] : x.at[p.at[i] & 15];
  });
}
PLAIN __m512i plain_permutexvar_epi16(unsigned, __m512i at, __m512i a) {
  return each<__m512i, uint16_t>([x = lanes<uint16_t>(a), p = lanes<uint16_t>(at)](int i) { return x.at[p.at[i] & 31]; });
}
PLAIN __m512i plain_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  return each<__m512i, int32_t>([s = lanes<int32_t>(sum), x = lanes<uint8_t>(a), y = lanes<int8_t>(b)](int i) {
    int32_t found = s.at[i];
    for (int k = 4 * i; k < 4 * i + 4; ++k) found += x.at[k] * y.at[k];
    return found;
  });
}
PLAIN __m512i plain_inserti32x4(unsigned, __m512i a, __m128i b, int place) {
  return each<__m512i, int32_t>([x = lanes<int32_t>(a), y = lanes<int32_t>(b), place](int i) {
    return i / 4 == place ? y.at[i % 4] : x.at[i];
  });
}
PLAIN __m512bh plain_cvtne2ps_pbh(__m512 upper, __m512 lower) {
  return each<__m512bh, uint16_t>([u = lanes<float>(upper), l = lanes<float>(lower)](int i) {
    return plain::narrow(i < 16 ? l.at[i] : u.at[i - 16]);
  });
}
PLAIN __m512 plain_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  return each<__m512, float>([s = lanes<float>(sum), x = lanes<uint16_t>(a), y = lanes<uint16_t>(b)](int i) {
    const auto product = [&](int at) { return plain::wide(x.at[at]) * plain::wide(y.at[at]); };
    return s.at[i] + product(2 * i + 1) + product(2 * i);
  });
}

#define _mm512_maskz_cvtepi8_epi32 plain_cvtepi8_epi32
#define _mm512_maskz_cvtepu8_epi32 plain_cvtepu8_epi32
#define _mm512_maskz_cvtepu8_epi16 plain_cvtepu8_epi16
#undef _mm512_maskz_srli_epi16  // without optimisation GCC has macros of these names
#undef _mm512_maskz_inserti32x4
#define _mm512_maskz_srli_epi16 plain_srli_epi16
#define _mm512_set1_epi64 plain_set1_epi64
#define _mm512_maskz_mul_epu32 plain_mul_epu32
#define _mm512_maskz_permutexvar_ps plain_permutexvar_ps
#define _mm512_permutex2var_ps plain_permutex2var_ps
#define _mm512_maskz_permutexvar_epi16 plain_permutexvar_epi16
#define _mm512_dpbusd_epi32 plain_dpbusd_epi32
#define _mm512_maskz_inserti32x4 plain_inserti32x4
#define _mm512_cvtne2ps_pbh plain_cvtne2ps_pbh
#define _mm512_dpbf16_ps plain_dpbf16_ps
