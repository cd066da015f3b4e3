// int4 weights times tokens that are rounded to 8 bits (W4A8), as products of bytes.
//
// The vectors of linear.h hold columns of one row, so each row and token costs a multiplication by the scale of every group.
// Here they hold four columns of each of kLanes rows: the sums of a group are lanes of one vector, a lane for each row, and
// meet their scales together. Lanes are never added.

// A token in steps of DynamicInt4::kStep columns.
struct RoundedToken {
  struct Step {
    int32_t codes[8];  // four bytes each: the even columns, then the odd ones
    int32_t sum;       // 8 times the sum of these codes: a weight is its code less 8
  };
  float scale, offset;  // a number is (code + offset) scale
  Step steps[1];
};

// The place of the first of some tokens and the bytes of each.
struct RoundedTokens {
  const char* first;
  int64_t bytes;
  MEDUSA_INLINE const RoundedToken& operator[](int64_t i) const {
    return *reinterpret_cast<const RoundedToken*>(first + i * bytes);
  }
};

// out[i] has the i-th 4 bytes of each row, of 16 from `at` on.
MEDUSA_INLINE void across(const char* const* rows, int64_t at, F* out) {
  using InOrder = typename EveryLane<kLanes>::type;
  F own[4], pairs[4];
  MEDUSA_UNROLL
  for (int r = 0; r < 4; ++r) {
#if defined(__AVX512F__)
    __m512i four = _mm512_maskz_inserti32x4(0xffff, __m512i(U{}), load<__m128i>(rows[r] + at), 0);
    four = _mm512_maskz_inserti32x4(0xffff, four, load<__m128i>(rows[r + 4] + at), 1);
    four = _mm512_maskz_inserti32x4(0xffff, four, load<__m128i>(rows[r + 8] + at), 2);
    own[r] = F(_mm512_maskz_inserti32x4(0xffff, four, load<__m128i>(rows[r + 12] + at), 3));
#elif defined(__AVX2__)
    own[r] = F(_mm256_set_m128(load<__m128>(rows[r + 4] + at), load<__m128>(rows[r] + at)));
#else
    own[r] = load<F>(rows[r] + at);
#endif
  }
  MEDUSA_UNROLL
  for (int i = 0; i < 2; ++i) {
    pairs[i] = shuffled<InTurn<0>>(own[2 * i], own[2 * i + 1], InOrder{});
    pairs[2 + i] = shuffled<InTurn<2>>(own[2 * i], own[2 * i + 1], InOrder{});
  }
  MEDUSA_UNROLL
  for (int i = 0; i < 4; i += 2) {
    out[i] = shuffled<HalfBlocks<4, 0>>(pairs[i], pairs[i + 1], InOrder{});
    out[i + 1] = shuffled<HalfBlocks<4, 1>>(pairs[i], pairs[i + 1], InOrder{});
  }
}

// Of each row, the sum of the products of its codes, 0 to 15, with a token's: 16 bits hold that of 8 pairs.
MEDUSA_INLINE I products(const U* codes, const int32_t* token) {
  I sum{};
#if defined(__AVX512VNNI__)
  I other{};
  MEDUSA_UNROLL
  for (int i = 0; i < 8; i += 2) {
    multiply(sum, I{} + token[i], I(codes[i]));
    multiply(other, I{} + token[i + 1], I(codes[i + 1]));
  }
  return sum + other;
#elif defined(__AVX2__)
  S pairs[2] = {};
  MEDUSA_UNROLL
  for (int i = 0; i < 8; ++i) {
#if defined(__AVX512F__)
    const auto both = _mm512_maddubs_epi16(__m512i(codes[i]), __m512i(I{} + token[i]));
#else
    const auto both = _mm256_maddubs_epi16(__m256i(codes[i]), __m256i(I{} + token[i]));
#endif
    pairs[i % 2] = pairs[i % 2] + S(both);
  }
  multiply(sum, pairs[0] + pairs[1], S{} + int16_t(1));
  return sum;
#else
  MEDUSA_UNROLL
  for (int i = 0; i < 8; ++i) {
    const U four = U{} + uint32_t(token[i]);
    multiply(sum, S(four << 8) >> 8, S(codes[i]) & 255);
    multiply(sum, S(four) >> 8, S(codes[i]) >> 8);
  }
  return sum;
#endif
}

// Rounds a token, of a multiple of kStep columns.
template <class A>
inline void round_token(const typename A::T* from, int64_t columns, RoundedToken* to) {
  using InOrder = typename EveryLane<kLanes>::type;
  const Rounding<A, true> code(from, columns);
  to->scale = code.scale;
  to->offset = code.low + 128.0f;
  const auto put = [&](int32_t* place, F v) MEDUSA_INLINED {
    store(place, __builtin_convertvector(__builtin_convertvector(v - to->offset, I), Quarters));
  };
  U eights[8];
  for (U& eight : eights) eight = U{} + 0x08080808u;
  for (int64_t i = 0; i < columns; i += 2 * kLanes) {
    const F a = code(i), b = code(i + kLanes);
    RoundedToken::Step& step = to->steps[i / DynamicInt4::kStep];
    const int64_t place = i % DynamicInt4::kStep / 8;
    put(step.codes + place, shuffled<Alternate<0>>(a, b, InOrder{}));
    put(step.codes + 4 + place, shuffled<Alternate<1>>(a, b, InOrder{}));
    if ((i + 2 * kLanes) % DynamicInt4::kStep == 0) step.sum = products(eights, step.codes)[0];
  }
}

constexpr int64_t kTokensAtOnce = 16;  // beside kLanes rows

// kLanes rows of codes times tokens, kMost at most, of which the first `wanted` rows go to out[token * stride + row]. Memory
// `ahead` bytes further on than the codes is prefetched.
template <int kMost>
inline void rows_at_once(const Row* w, const Codes& codes, int64_t ahead, const RoundedTokens& x, int64_t tokens,
                         int64_t wanted, float* out, int64_t stride) {
  constexpr int kLines = kLanes / 4;  // of memory, that hold 16 bytes of each row: a step's codes, or four scales
  const int64_t steps = codes.group / DynamicInt4::kStep;  // of a group
  F acc[kMost] = {}, sums{};
  const char *rows[kLanes], *scales[kLanes];
  char few[kLanes][16] = {};
  for (int r = 0; r < kLanes; ++r) {
    rows[r] = w[r].data;
    scales[r] = reinterpret_cast<const char*>(w[r].scale);
    if (codes.groups < 4) {
      scales[r] = static_cast<char*>(__builtin_memcpy(few[r], scales[r], size_t(codes.groups) * sizeof(float)));
    }
    sums[r] = load<float>(w[r].zero);
  }
  const auto one_step = [&](int64_t step, F scale) MEDUSA_INLINED {
    F bytes[4];
    U c[8];
    const int64_t at = step * DynamicInt4::kStep / 2;
    across(rows, at, bytes);
    // In the order of memory, if these rows lie one after the other.
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(rows[0] + ahead + (step * kLines + i) * 64, 0, 2);
    MEDUSA_UNROLL
    for (int i = 0; i < 4; ++i) {
      c[i] = reinterpret_cast<U>(bytes[i]) & 0x0f0f0f0fu;
      c[4 + i] = reinterpret_cast<U>(bytes[i]) >> 4 & 0x0f0f0f0fu;
    }
    const auto add = [&](int64_t token) MEDUSA_INLINED {
      const RoundedToken::Step& own = x[token].steps[step];
      multiply(acc[token], __builtin_convertvector(products(c, own.codes) - own.sum, F), scale);
    };
    if constexpr (kMost == 1) {
      add(0);
    } else {
      for (int64_t token = 0; token < tokens; ++token) add(token);
    }
  };
  for (int64_t group = 0; group < codes.groups;) {
    const int64_t first = codes.groups < 4 ? 0 : least(group, codes.groups - 4), size = sizeof(float);
    F scale[4];
    across(scales, first * size, scale);
    for (int i = 0; i < kLines; ++i) {
      __builtin_prefetch(w[0].scale + 2 * kLanes * codes.groups + group * kLanes + i * 16, 0, 2);
    }
    for (const int64_t end = least(first + 4, codes.groups); group < end; ++group) {
      for (int64_t i = 0; i < steps; ++i) one_step(group * steps + i, scale[group - first]);
    }
  }
  for (int64_t token = 0; token < tokens; ++token) {
    put<Float32>(out + token * stride, (sums * x[token].offset + acc[token]) * x[token].scale, wanted);
  }
}

// `rows` rows, row(i) each, times `tokens` rounded tokens: out[token * stride + row].
template <class At>
inline void four_bit_product(const At& row, int64_t rows, int64_t row_bytes, const Codes& codes, const RoundedTokens& x,
                             int64_t tokens, float* out, int64_t stride) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    Row w[kLanes];
    for (int r = 0; r < kLanes; ++r) w[r] = row(least(first + r, rows - 1));
    int64_t ahead = ahead_of(2 * kLanes, row_bytes);
    if (tokens == 1) rows_at_once<1>(w, codes, ahead, x, 1, rows - first, out + first, stride);
    for (int64_t token = 0; tokens > 1 && token < tokens; token += kTokensAtOnce) {
      const RoundedTokens now{x.first + token * x.bytes, x.bytes};
      rows_at_once<kTokensAtOnce>(w, codes, ahead, now, least(kTokensAtOnce, tokens - token), rows - first,
                                  out + token * stride + first, stride);
      ahead = 0;
    }
  }
}
