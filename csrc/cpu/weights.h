// Weights as they lie in memory, widened in registers. medusa_kernels/quantised.py says how they are stored.
//
// A form of weights has steps of kStep columns in kStepBytes bytes of a row. A step is kParts vectors X, each of which
// meets a vector of a token, `prepared` in that order. `Wide` is the form of the same vectors when they are in memory.

// A row, and its scales and zero points.
struct Row {
  const char* data;
  const float* scale;
  const uint8_t* zero;  // of DynamicInt4 the bytes of a float: the sum of its numbers
};

// What all rows of a weight have in common; the scales and zero points of the first row.
struct Codes {
  int64_t type = 0;
  const float* scale = nullptr;
  const uint8_t* zero = nullptr;
  int64_t group = 0, groups = 0;  // columns of a group, groups of a row
};

// How many bytes ahead of what is multiplied memory is prefetched: a few short rows take less time than a wait.
inline int64_t ahead_of(int64_t rows, int64_t row_bytes) { return rows * row_bytes > 16384 ? rows * row_bytes : 16384; }

MEDUSA_INLINE void multiply(F& sum, F x, F w) { sum = w * x + sum; }

// Registers decide the tile: 32 vectors with AVX-512 and NEON, 16 with AVX2 and SSE, where more tokens meet fewer rows.
// One token alone meets more rows of 4-bit codes: its sums are too few to hide how long an addition takes.
#if defined(__AVX512F__)
constexpr int kTileRows = 4, kTileTokens = 6, kManyRows = 4, kLoneRows = 8;
#elif defined(__aarch64__)
constexpr int kTileRows = 4, kTileTokens = 6, kManyRows = 4, kLoneRows = 4;
#else
constexpr int kTileRows = 4, kTileTokens = 2, kManyRows = 2, kLoneRows = 4;
#endif
constexpr int kManyTokens = 6;  // beside kManyRows

// Tables of a row that are made at once and wait in memory: beside the sums there are no registers for them.
constexpr int64_t kTables = 32;

// A form whose numbers do not depend on their column.
struct OneTable {
  struct Table {};
  static MEDUSA_INLINE void fill(const Row&, const Codes&, int64_t, int64_t, int64_t, Table*) {}
  static MEDUSA_INLINE int64_t same_table(const Codes&) { return int64_t{1} << 40; }
};

struct Float32Weight : OneTable {
  using X = F;
  using Wide = Float32Weight;
  static constexpr int kParts = 1, kStep = kLanes, kStepBytes = kBytes;
  static MEDUSA_INLINE F part(const char* w, int, Table) { return load<F>(w); }
};

// Two bfloat16 in each lane: first the even columns, whose bits are moved up, then the odd ones, where they are.
struct BFloat16Weight : OneTable {
  using X = F;
  using Wide = BFloat16Weight;
  static constexpr int kParts = 2, kStep = 2 * kLanes, kStepBytes = kBytes;
  static MEDUSA_INLINE F part(const char* w, int part, Table) {
    const U both = load<U>(w);
    return reinterpret_cast<F>(part == 0 ? both << 16 : both & 0xffff0000u);
  }
};

// Bytes as integers; GCC's own widening of them is a detour through memory.
template <bool kSigned>
MEDUSA_INLINE I widened(const char* bytes) {
#if defined(__AVX512F__)
  const __m128i b = load<__m128i>(bytes);
  return I(kSigned ? _mm512_maskz_cvtepi8_epi32(0xffff, b) : _mm512_maskz_cvtepu8_epi32(0xffff, b));
#elif defined(__AVX2__)
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return I(kSigned ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
#elif defined(__SSE2__)
  __m128i b = _mm_cvtsi32_si128(load<int32_t>(bytes));
  b = _mm_unpacklo_epi8(b, b);
  b = _mm_unpacklo_epi16(b, b);  // each byte four times
  return kSigned ? I(b) >> 24 : I(U(b) >> 24);
#else
  const I wide = __builtin_convertvector(load<Quarters>(bytes), I);
  return kSigned ? wide : wide & 0xff;
#endif
}

struct Int8Weight : OneTable {
  using X = F;
  // Tiles of fewer rows need more passes over the tokens, so there rows are converted once.
  using Wide = std::conditional_t<kManyRows == kTileRows, Int8Weight, Float32Weight>;
  static constexpr int kParts = 1, kStep = kLanes, kStepBytes = kLanes;
  static MEDUSA_INLINE F part(const char* w, int, Table) { return __builtin_convertvector(widened<true>(w), F); }
};

// The exponent and the fraction of an e4m3 are moved to those of a float, whose exponents start 120 lower.
struct Float8Weight : OneTable {
  using X = F;
  using Wide = Float32Weight;
  static constexpr int kParts = 1, kStep = kLanes, kStepBytes = kLanes;
  static MEDUSA_INLINE F part(const char* w, int, Table) {
    const I bits = widened<false>(w), size = bits & 0x7f;
    // Sizes below 8 have no exponent; as floats they would be denormal numbers, which a thread may take for zeros.
    const F small = __builtin_convertvector(size, F) * 0x1p-9f, large = reinterpret_cast<F>((size << 20) + (120 << 23));
    const F value = size < 8 ? small : large;
    const F number = size == 0x7f ? all(__builtin_nanf("")) : value;
    return reinterpret_cast<F>(reinterpret_cast<I>(number) | (bits & 0x80) << 24);
  }
};

// What 4-bit codes stand for before zero points and scales.
alignas(64) constexpr float kValues[3][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0.0f, 0.0625 / 12, 8.0 / 12, 1.0f, 4.0 / 12, 0.5f, 2.0 / 12, 0.25f, -0.0f, -0.0625 / 12, -8.0 / 12, -1.0f,
     -4.0 / 12, -0.5f, -2.0 / 12, -0.25f}};

// What the 16 codes stand for in one group of a row.
struct SixteenFloats {
  F v[16 / kLanes];
};

// Calls run(values) with a function of what the codes stand for in a group of the row, one of `count` from `first` on. The
// scales and zero points that the next tile needs first are prefetched: without them it cannot begin.
template <class Run>
MEDUSA_INLINE void with_values(const Row& row, const Codes& codes, int64_t first, int64_t count, int64_t tile_rows,
                               const Run& run) {
  constexpr int kVectors = 16 / kLanes;
  const float middle = codes.type == kInt4 && row.zero == nullptr ? 8.0f : 0.0f;
  SixteenFloats values;
  MEDUSA_UNROLL
  for (int i = 0; i < kVectors; ++i) values.v[i] = load<F>(kValues[codes.type - kInt4] + i * kLanes) - middle;
  const int64_t next = tile_rows * codes.groups + first;
  for (int64_t i = 0; i < count; i += 64 / sizeof(float)) __builtin_prefetch(row.scale + next + i, 0, 3);
  if (row.zero == nullptr) {
    run([&](int64_t group) MEDUSA_INLINED {
      SixteenFloats found;
      for (int i = 0; i < kVectors; ++i) found.v[i] = values.v[i] * row.scale[group];
      return found;
    });
  } else {
    __builtin_prefetch(row.zero + next, 0, 3);
    float zeros[2 * kTables] = {};
    for (int64_t i = 0; i < least(count, codes.groups - first); ++i) zeros[i] = float(row.zero[first + i]);
    run([&](int64_t group) MEDUSA_INLINED {
      SixteenFloats found;
      for (int i = 0; i < kVectors; ++i) found.v[i] = (values.v[i] - zeros[group - first]) * row.scale[group];
      return found;
    });
  }
}

// Codes of 4 bits: the lower halves of bytes, then the upper ones. With kHalves the columns of each half of a step may be
// in a group of their own, else a step's are in the same.
template <bool kHalves>
struct FourBits {
  using X = F;
  using Wide = Float32Weight;
  static constexpr int kParts = 2, kStep = 2 * kLanes, kStepBytes = kLanes;
  struct Table {
    SixteenFloats half[kHalves ? 2 : 1];
  };
  static MEDUSA_INLINE void fill(const Row& row, const Codes& codes, int64_t first, int64_t count, int64_t tile_rows, Table* to) {
    const auto group_at = [&](int64_t step, int64_t half) {  // half of the last step may be padding
      return kHalves ? least((2 * step + half) * kStep / 2 / codes.group, codes.groups - 1) : step;
    };
    with_values(row, codes, group_at(first, 0), kHalves ? 2 * count : count, tile_rows, [&](const auto& values) MEDUSA_INLINED {
      for (int64_t i = 0; i < count; ++i) {
        to[i].half[0] = values(group_at(first + i, 0));
        if constexpr (kHalves) to[i].half[1] = values(group_at(first + i, 1));
      }
    });
  }
  static MEDUSA_INLINE int64_t same_table(const Codes& codes) { return kHalves ? 1 : codes.group / kStep; }
  static MEDUSA_INLINE F part(const char* w, int part, const Table& table) {
    I at = widened<false>(w);
    at = part == 0 ? at : at >> 4;
#if defined(__AVX512F__)
    if constexpr (!kHalves) return F(_mm512_maskz_permutexvar_ps(0xffff, __m512i(at), __m512(table.half[0].v[0])));
    const I half{0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16};
    return F(_mm512_permutex2var_ps(__m512(table.half[0].v[0]), __m512i((at & 15) | half), __m512(table.half[kHalves].v[0])));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(__m256(table.half[0].v[0]), __m256i(at));
    const __m256 high = _mm256_permutevar8x32_ps(__m256(table.half[0].v[1]), __m256i(at));
    return F(_mm256_blendv_ps(low, high, __m256(at << 28)));
#else
    F found;
    for (int lane = 0; lane < kLanes; ++lane) {
      found[lane] = reinterpret_cast<const float*>(&table)[at[lane] & 15];
    }
    return found;
#endif
  }
};

// Codes of 4 bits that are integers, by arithmetic: fewer cycles than tables where a table has several vectors.
struct Integers4 {
  using X = F;
  using Wide = Float32Weight;
  static constexpr int kParts = 2, kStep = 2 * kLanes, kStepBytes = kLanes;
  struct Table {
    float scale, offset;
  };
  static MEDUSA_INLINE void fill(const Row& row, const Codes&, int64_t first, int64_t count, int64_t, Table* to) {
    for (int64_t i = 0; i < count; ++i) {
      const float scale = row.scale[first + i];
      to[i] = {scale, -scale * (row.zero == nullptr ? 8.0f : float(row.zero[first + i]))};
    }
  }
  static MEDUSA_INLINE int64_t same_table(const Codes& codes) { return codes.group / kStep; }
  static MEDUSA_INLINE F part(const char* w, int part, const Table& table) {
    const I at = widened<false>(w);
    return __builtin_convertvector(part == 0 ? at & 15 : at >> 4, F) * table.scale + table.offset;
  }
};

// Forms whose products are of integers: tokens are rounded to 8 bits when they are prepared ("dynamic" in quantised.py).
// Sums of up to 131,071 columns, quantised.MOST_DYNAMIC, fit in 32 bits.
struct OfIntegers {};
typedef int16_t S __attribute__((vector_size(kBytes)));
typedef int8_t Bytes __attribute__((vector_size(kBytes / 2)));

#if defined(__AVX512VNNI__)
// sum += the products of four adjacent bytes, of which those of w are unsigned.
MEDUSA_INLINE void multiply(I& sum, I x, I w) { sum = I(_mm512_dpbusd_epi32(__m512i(sum), __m512i(w), __m512i(x))); }

// As unsigned bytes the weights are 128 larger: 128 times the sum of a token's codes is subtracted in the end.
struct DynamicInt8 : OneTable, OfIntegers {
  using X = I;
  using Token = I;
  using Wide = DynamicInt8;
  static constexpr int kParts = 1, kStep = kBytes, kStepBytes = kBytes;
  static MEDUSA_INLINE I part(const char* w, int, Table) { return load<I>(w) ^ I(U{} + 0x80808080u); }
};
#else
// sum += the products of adjacent pairs.
MEDUSA_INLINE void multiply(I& sum, S x, S w) {
#if defined(__AVX512F__)
  sum = sum + I(_mm512_madd_epi16(__m512i(x), __m512i(w)));
#elif defined(__AVX2__)
  sum = sum + I(_mm256_madd_epi16(__m256i(x), __m256i(w)));
#elif defined(__SSE2__)
  sum = sum + I(_mm_madd_epi16(__m128i(x), __m128i(w)));
#else
  for (int lane = 0; lane < kLanes; ++lane) sum[lane] += x[2 * lane] * w[2 * lane] + x[2 * lane + 1] * w[2 * lane + 1];
#endif
}

// Both factors are widened to 16 bits: sums of two products of bytes would not fit in 16.
struct Int16Weight : OneTable, OfIntegers {
  using X = S;
  using Wide = Int16Weight;
  static constexpr int kParts = 1, kStep = 2 * kLanes, kStepBytes = kBytes;
  static MEDUSA_INLINE S part(const char* w, int, Table) { return load<S>(w); }
};

struct DynamicInt8 : OneTable, OfIntegers {
  using X = S;
  using Token = S;
  using Wide = Int16Weight;
  static constexpr int kParts = 1, kStep = 2 * kLanes, kStepBytes = 2 * kLanes;
  static MEDUSA_INLINE S part(const char* w, int, Table) { return __builtin_convertvector(load<Bytes>(w), S); }
};
#endif

struct RoundedToken;

// Codes of 4 bits less 8, which int4.h multiplies.
struct DynamicInt4 : OfIntegers {
  using X = I;
  using Token = RoundedToken;
  static constexpr int kStep = 32;
};

// Whether products are of integers. X does not tell: to GCC 12 an __m512bh is the same vector as S.
template <class W>
constexpr bool kRounds = std::is_base_of_v<OfIntegers, W>;

// The forms of weights beside activations A.
template <class A>
struct Forms {
  using Own = Float32Weight;
  using Int8 = Int8Weight;
  using Float8 = Float8Weight;
  template <bool kHalves>
  using Four = FourBits<kHalves>;
};

#if !defined(__AVX512BF16__)
template <>
struct Forms<BFloat16> : Forms<Float32> {
  using Own = BFloat16Weight;
};
#else
// The processor's own product of bfloat16 pairs: twice as fast as floats on AMD's, half as fast on Intel's.
MEDUSA_INLINE void multiply(F& sum, __m512bh x, __m512bh w) { sum = F(_mm512_dpbf16_ps(__m512(sum), w, x)); }

struct BFloat16PairWeight : OneTable {
  using X = __m512bh;
  using Wide = BFloat16PairWeight;
  static constexpr int kParts = 1, kStep = 2 * kLanes, kStepBytes = kBytes;
  static MEDUSA_INLINE X part(const char* w, int, Table) { return load<X>(w); }
};

// Numbers of 8 bits, all of which bfloat16 has.
template <class W>
struct BytePairs : OneTable {
  using X = __m512bh;
  using Wide = BFloat16PairWeight;
  static constexpr int kParts = 1, kStep = 2 * kLanes, kStepBytes = 2 * kLanes;
  static MEDUSA_INLINE X part(const char* w, int, Table) {
    return _mm512_cvtne2ps_pbh(__m512(W::part(w + kLanes, 0, {})), __m512(W::part(w, 0, {})));
  }
};

// As FourBits; a code's value times its scale is rounded to bfloat16, as libraries dequantise it.
template <bool kHalves>
struct FourBitPairs {
  using X = __m512bh;
  using Wide = BFloat16PairWeight;
  static constexpr int kParts = 2, kStep = 4 * kLanes, kStepBytes = 2 * kLanes;
  using Table = __m512i;
  static MEDUSA_INLINE void fill(const Row& row, const Codes& codes, int64_t first, int64_t count, int64_t tile_rows, Table* to) {
    constexpr int kGroups = kHalves ? 2 : 1;
    with_values(row, codes, kGroups * first, kGroups * count, tile_rows, [&](const auto& values) MEDUSA_INLINED {
      const auto table = [&](int64_t lower, int64_t upper) MEDUSA_INLINED {
        return __m512i(_mm512_cvtne2ps_pbh(__m512(values(upper).v[0]), __m512(values(lower).v[0])));
      };
      const int64_t end = first + count, whole = least(end, codes.groups / kGroups);
      for (int64_t i = first; i < whole; ++i) to[i - first] = table(kGroups * i, kGroups * i + kGroups - 1);
      if (whole < end) to[whole - first] = table(codes.groups - 1, codes.groups - 1);  // half of the last step is padding
    });
  }
  static MEDUSA_INLINE int64_t same_table(const Codes& codes) { return kHalves ? 1 : codes.group / kStep; }
  static MEDUSA_INLINE X part(const char* w, int part, const Table& table) {
    __m512i at = _mm512_maskz_cvtepu8_epi16(0xffffffff, load<__m256i>(w));
    if (part == 1) at = _mm512_maskz_srli_epi16(0xffffffff, at, 4);
    if (kHalves) {  // bit 4 chooses between the halves of the table
      const U half{0, 0, 0, 0, 0, 0, 0, 0, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010};
      at = __m512i((part == 1 ? U(at) : U(at) & 0xf000fu) | half);
    }
    return X(_mm512_maskz_permutexvar_epi16(0xffffffff, at, table));
  }
};

template <>
struct Forms<BFloat16> {
  using Own = BFloat16PairWeight;
  using Int8 = BytePairs<Int8Weight>;
  using Float8 = BytePairs<Float8Weight>;
  template <bool kHalves>
  using Four = FourBitPairs<kHalves>;
};
#endif

// Calls run(W{}) for the weights of a type beside activations A; false if there are none. `group` is that of Matrix.
template <class A, class Run>
MEDUSA_INLINE bool with_weight(int64_t type, const Run& run, int64_t group = 0) {
  using Four = typename Forms<A>::template Four<false>;
  if (type == kDynamicInt4) {
    if (group <= 0 || group % DynamicInt4::kStep != 0) return false;
    run(DynamicInt4{});
  } else if (type >= kInt4 && type <= kFp4) {
    if (group <= 0 || group % 16 != 0) return false;
    if constexpr (kLanes < 16) {
      if (type == kInt4) {
        run(Integers4{});
        return true;
      }
    }
    if (group % Four::kStep == 0) {
      run(Four{});
    } else if constexpr (Four::kStep > 16) {
      if (group == Four::kStep / 2) {
        run(typename Forms<A>::template Four<true>{});
      } else {
        run(FourBits<true>{});
      }
    }
  } else if (type == kDynamicInt8) {
    run(DynamicInt8{});
  } else if (type == kInt8) {
    run(typename Forms<A>::Int8{});
  } else if (type == kFloat8) {
    run(typename Forms<A>::Float8{});
  } else if (type == A::kType) {
    run(typename Forms<A>::Own{});
  } else {
    return false;
  }
  return true;
}
