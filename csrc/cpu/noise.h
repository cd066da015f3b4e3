// Gumbel noise by seed, place and token: medusa_kernels/gumbel_noise.py.

typedef uint64_t L __attribute__((vector_size(kBytes)));

// The products of the lower halves.
MEDUSA_INLINE L products(L a, uint32_t b) {
#if defined(__AVX512F__)
  return L(_mm512_maskz_mul_epu32(0xff, __m512i(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
  return L(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi64x(b)));
#else
  return (a & 0xffffffff) * uint64_t(b);
#endif
}

// Pairs of lanes, in turn of a and of b, from their lower (or upper) halves.
template <int kUpper>
struct Pairs {
  static constexpr int of(int lane) { return lane / 4 * 2 + lane % 2 + kUpper * (kLanes / 2) + (lane & 2) / 2 * kLanes; }
};

// Philox4x32-10 for the counters (block, place, 0, 0), (block + 1, place, 0, 0), ...: 2 * kLanes words in their order.
MEDUSA_INLINE void philox(uint32_t block, uint32_t place, uint64_t key, U out[2]) {
  // In lower halves; nothing reads the upper ones before they are cleared.
  L c0, c1 = L{} + place, c2{}, c3{};
  for (int lane = 0; lane < kLanes / 2; ++lane) c0[lane] = block + uint32_t(lane);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  MEDUSA_UNROLL
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
    const L even = products(c0, 0xD2511F53), odd = products(c2, 0xCD9E8D57);
    c0 = (odd >> 32) ^ c1 ^ uint64_t(k0);
    c2 = (even >> 32) ^ c3 ^ uint64_t(k1);
    c1 = odd;
    c3 = even;
  }
  const F first = reinterpret_cast<F>((c0 & 0xffffffff) | (c1 << 32));
  const F second = reinterpret_cast<F>((c2 & 0xffffffff) | (c3 << 32));
  using InOrder = typename EveryLane<kLanes>::type;
  out[0] = reinterpret_cast<U>(shuffled<Pairs<0>>(first, second, InOrder{}));
  out[1] = reinterpret_cast<U>(shuffled<Pairs<1>>(first, second, InOrder{}));
}

// log(x) of normal numbers above 0, to 2 units in the last place: x = 2^power (1 + rest), with the rest given where it
// is known more precisely (there the power is 0). The polynomial is that of Cephes (Moshier).
MEDUSA_INLINE F logarithm(F x, I known = I{}, F given = F{}) {
  const I above = reinterpret_cast<I>(x) - 0x3f3504f3, power = above >> 23;  // of sqrt(1/2)
  const F rest = known ? given : reinterpret_cast<F>((above & 0x7fffff) + 0x3f3504f3) - 1.0f;
  const F exponent = __builtin_convertvector(power, F), square = rest * rest;
  F value = all(7.0376836292e-2f);
  value = value * rest - 1.1514610310e-1f;
  value = value * rest + 1.1676998740e-1f;
  value = value * rest - 1.2420140846e-1f;
  value = value * rest + 1.4249322787e-1f;
  value = value * rest - 1.6668057665e-1f;
  value = value * rest + 2.0000714765e-1f;
  value = value * rest - 2.4999993993e-1f;
  value = value * rest + 3.3333331174e-1f;
  value = value * rest * square - exponent * 2.12194440e-4f - 0.5f * square;
  return rest + value + exponent * 0.693359375f;
}

inline Result gumbel_noise(const Noise& a) {
  constexpr int64_t kPiece = 256 * kLanes;
  const int64_t pieces = blocks(a.vocabulary, kPiece);
  in_parallel(a.threads, a.batch * a.rows * pieces, [&](int64_t i) {
    const int64_t row = i / pieces, first = i % pieces * kPiece, end = least(a.vocabulary, first + kPiece);
    const uint32_t place = uint32_t(a.first[row / a.rows] + row % a.rows);
    const uint64_t key = uint64_t(a.seeds[row / a.rows]);
    for (int64_t token = first; token < end; token += 2 * kLanes) {
      U bits[2];
      philox(uint32_t(token / 4), place, key, bits);
      for (int half = 0; half < 2; ++half) {
        const int64_t at = token + half * kLanes;
        if (at >= end) break;
        F v = __builtin_convertvector(bits[half], F) * 0x1p-32f + 0x1p-33f;
        v = v < 1.0f ? v : all(1.0f - 0x1p-24f);
        const F wait = -logarithm(1.0f - v, v < 0.0625f, -v);
        put<Float32>(a.out + row * a.vocabulary + at, -logarithm(wait), end - at);
      }
    }
  });
  return kDone;
}
