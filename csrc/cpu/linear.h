// Few tokens times a weight, in one pass over the weight: the products of the CPU ops.
//
// A weight is read as it lies in memory, row by row. A tile multiplies a few of its rows with a few tokens: each sum has
// one vector, whose lanes are added at the end, so an element's additions have one order, whatever the number of tokens,
// the tile and the thread: a token's result does not depend on the tokens beside it.

// Registers decide the tile: 32 vectors with AVX-512 and NEON, 16 with AVX2 and SSE.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 4, kTileTokens = 6;
#else
constexpr int kTileRows = 4, kTileTokens = 2;
#endif

// Bytes of a row of a contiguous weight.
inline int64_t row_bytes(int64_t type, int64_t columns) {
  return type == kFloat32 ? 4 * columns : type == kBFloat16 ? 2 * columns : type >= kInt4 ? columns / 2 : columns;
}

// Weights of one type. `kParts` vectors of tokens meet one step of `kStep` columns; tokens are `prepared` in that order.
struct Float32Weight {
  using T = float;
  using X = F;
  static constexpr int kParts = 1, kStep = kLanes;
  static MEDUSA_INLINE void multiply(F& sum, F x, F w) { sum = w * x + sum; }
  static MEDUSA_INLINE F part(const void* w, int) { return load<F>(w); }
};

// Two bfloat16 in each lane: first the even columns, whose bits are moved up, then the odd ones, where they are.
struct BFloat16Weight {
  using T = uint16_t;
  using X = F;
  static constexpr int kParts = 2, kStep = 2 * kLanes;
  static MEDUSA_INLINE void multiply(F& sum, F x, F w) { sum = w * x + sum; }
  static MEDUSA_INLINE F part(const void* w, int part) {
    const U both = load<U>(w);
    return reinterpret_cast<F>(part == 0 ? both << 16 : both & 0xffff0000u);
  }
};

struct Int8Weight {
  using T = int8_t;
  using X = F;
  static constexpr int kParts = 1, kStep = kLanes;
  static MEDUSA_INLINE void multiply(F& sum, F x, F w) { sum = w * x + sum; }
  static MEDUSA_INLINE F part(const void* w, int) {
// GCC's own widening of bytes is a detour through memory.
#if defined(__AVX512F__)
    const I wide = I(_mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(w)));
#elif defined(__AVX2__)
    const I wide = I(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(w))));
#else
    const I wide = __builtin_convertvector(load<Quarters>(w), I);
#endif
    return __builtin_convertvector(wide, F);
  }
};

#if defined(__AVX512BF16__)
// The processor's own product of bfloat16 pairs: twice as fast as floats on AMD's, half as fast on Intel's.
struct BFloat16PairWeight {
  using T = uint16_t;
  using X = __m512bh;
  static constexpr int kParts = 1, kStep = 2 * kLanes;
  static MEDUSA_INLINE void multiply(F& sum, X x, X w) { sum = F(_mm512_dpbf16_ps(__m512(sum), w, x)); }
  static MEDUSA_INLINE X part(const void* w, int) { return load<X>(w); }
};
#endif

template <class W>
constexpr int64_t kStepBytes = W::kStep * sizeof(typename W::T);

// Vectors of one prepared token.
template <class W>
MEDUSA_INLINE int64_t prepared_vectors(int64_t columns) {
  return blocks(columns, W::kStep) * W::kParts;
}

// Puts tokens [tokens, columns] into the order in which the weight's columns are multiplied, padded with zeros.
template <class W, class A>
inline void prepare(const typename A::T* from, int64_t tokens, int64_t columns, typename W::X* to) {
  const int64_t steps = blocks(columns, W::kStep);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t step = 0; step < steps; ++step) {
      const typename A::T* first = from + token * columns + step * W::kStep;
      const int64_t left = columns - step * W::kStep;
      if constexpr (sizeof(typename W::T) == 2) {
        const F a = get<A>(first, left), b = left > kLanes ? get<A>(first + kLanes, left - kLanes) : F{};
        if constexpr (W::kParts == 2) {
          using InOrder = typename EveryLane<kLanes>::type;
          *to++ = shuffled<Alternate<0>>(a, b, InOrder{});
          *to++ = shuffled<Alternate<1>>(a, b, InOrder{});
        } else {
          uint16_t pairs[2 * kLanes];
          BFloat16::put(pairs, a);
          BFloat16::put(pairs + kLanes, b);
          *to++ = load<typename W::X>(pairs);
        }
      } else {
        *to++ = get<A>(first, left);
      }
    }
  }
}

// Adds the lanes of each sum, of as many tokens at once as have a lane for each: out[token * stride + row].
template <int kRows, int kTokens>
MEDUSA_INLINE void finish(const F* acc, float* out, int64_t stride) {
  constexpr int kNow = kTokens * kRows >= kLanes ? kLanes / kRows : kTokens >= 2 && 2 * kRows < kLanes ? 2 : 1;
  constexpr int kApart = kLanes / (kNow * kRows);
  F found = sums<kNow * kRows>(acc);
  if constexpr (kApart > 1) found = shuffled<Every<kApart>>(found, found, typename EveryLane<kLanes>::type{});
  MEDUSA_UNROLL
  for (int t = 0; t < kNow; ++t) {
    __builtin_memcpy(out + t * stride, reinterpret_cast<const float*>(&found) + t * kRows, kRows * sizeof(float));
  }
  if constexpr (kTokens > kNow) finish<kRows, kTokens - kNow>(acc + kNow * kRows, out + kNow * stride, stride);
}

// kRows rows of a weight times kTokens tokens: out[token * stride + row]. Each row's memory `ahead` bytes further on is
// prefetched.
template <class W, int kRows, int kTokens>
inline void tile(const char* const* w, int64_t ahead, const typename W::X* x, int64_t columns, float* out,
                 int64_t stride) {
  const int64_t vectors = prepared_vectors<W>(columns), steps = columns / W::kStep;
  F acc[kRows * kTokens] = {};
  const auto multiply = [&](const char* const* rows, const typename W::X* at) {
    MEDUSA_UNROLL
    for (int part = 0; part < W::kParts; ++part) {
      typename W::X parts[kRows];
      MEDUSA_UNROLL
      for (int r = 0; r < kRows; ++r) parts[r] = W::part(rows[r], part);
      MEDUSA_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        MEDUSA_UNROLL
        for (int r = 0; r < kRows; ++r) W::multiply(acc[t * kRows + r], at[t * vectors + part], parts[r]);
      }
    }
  };
  const char* rows[kRows];
  MEDUSA_UNROLL
  for (int r = 0; r < kRows; ++r) rows[r] = w[r];
  for (int64_t step = 0; step < steps; ++step) {
    multiply(rows, x + step * W::kParts);
    MEDUSA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      rows[r] += kStepBytes<W>;
      __builtin_prefetch(rows[r] + ahead, 0, 2);
    }
  }
  const int64_t rest = columns - steps * W::kStep;
  if (rest > 0) {
    alignas(kBytes) char last[kRows][kStepBytes<W>] = {};
    const char* padded[kRows];
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(last[r], rows[r], static_cast<size_t>(rest) * sizeof(typename W::T));
      padded[r] = last[r];
    }
    multiply(padded, x + steps * W::kParts);
  }
  finish<kRows, kTokens>(acc, out, stride);
}

// Those rows times `tokens` tokens, kTokens at most.
template <class W, int kRows, int kTokens>
inline void pass(const char* const* w, int64_t ahead, const typename W::X* x, int64_t tokens, int64_t columns,
                 float* out, int64_t stride) {
  if (tokens == kTokens) return tile<W, kRows, kTokens>(w, ahead, x, columns, out, stride);
  if constexpr (kTokens > 1) pass<W, kRows, kTokens - 1>(w, ahead, x, tokens, columns, out, stride);
}

// Those rows times any number of tokens, in passes of equal size: the rows stay in the nearest cache, and the first pass
// prefetches the rows that come next.
template <class W, int kRows>
inline void passes(const char* const* w, int64_t ahead, const typename W::X* x, int64_t tokens, int64_t columns,
                   float* out, int64_t stride) {
  const int64_t vectors = prepared_vectors<W>(columns);
  for (int64_t left = blocks(tokens, kTileTokens); left > 0; --left) {
    const int64_t now = blocks(tokens, left);
    pass<W, kRows, kTileTokens>(w, ahead, x, now, columns, out, stride);
    ahead = 0;
    x += now * vectors;
    out += now * stride;
    tokens -= now;
  }
}

// `rows` rows of a weight times prepared tokens: out[token * stride + row]. With a map, row i of them is row map[i].
template <class W>
inline void product(const void* weight, int64_t w_stride, const int64_t* map, int64_t first, int64_t rows,
                    const typename W::X* x, int64_t tokens, int64_t columns, float* out, int64_t stride) {
  const auto at = [&](int64_t row) {
    return static_cast<const char*>(weight) + (map == nullptr ? first + row : map[first + row]) * w_stride;
  };
  int64_t row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) {
    const char* w[kTileRows];
    for (int r = 0; r < kTileRows; ++r) w[r] = at(row + r);
    passes<W, kTileRows>(w, kTileRows * w_stride, x, tokens, columns, out + row, stride);
  }
  for (; row < rows; ++row) {
    const char* w[1] = {at(row)};
    passes<W, 1>(w, w_stride, x, tokens, columns, out + row, stride);
  }
}

constexpr int64_t kChunk = 64;   // rows of a weight in one piece of work
constexpr int64_t kTokens = 64;  // tokens whose sums are held at once

// Calls run(W{}) for the weights of a type beside activations A; false if there are none.
template <class A, class Run>
MEDUSA_INLINE bool with_weight(int64_t type, Run run) {
  if (type == kInt8) {
    run(Int8Weight{});
  } else if (type != A::kType) {
    return false;
  } else if constexpr (A::kType == kFloat32) {
    run(Float32Weight{});
  } else {
#if defined(__AVX512BF16__)
    run(BFloat16PairWeight{});
#else
    run(BFloat16Weight{});
#endif
  }
  return true;
}

// The sums of some rows of a weight, with scale and bias: sums[token * kChunk + row].
template <class A, class W>
inline void affine(const Matrix& w, int64_t first, int64_t rows, const typename W::X* x, int64_t tokens,
                   int64_t columns, float* sums) {
  product<W>(w.data, w.stride, nullptr, first, rows, x, tokens, columns, sums, kChunk);
  if (w.scale == nullptr && w.bias == nullptr) return;
  for (int64_t row = 0; row < rows; row += kLanes) {
    const F scale = w.scale == nullptr ? all(1.0f) : get<Float32>(w.scale + first + row, rows - row);
    const F bias =
        w.bias == nullptr ? F{} : get<A>(static_cast<const typename A::T*>(w.bias) + first + row, rows - row);
    for (int64_t token = 0; token < tokens; ++token) {
      float* at = sums + token * kChunk + row;
      store(at, load<F>(at) * scale + bias);
    }
  }
}

// decode_linear, see medusa_kernels/decode_linear.py.
template <class A>
Result linear(const Linear& a) {
  using T = typename A::T;
  int64_t width = 0, chunks = 0;
  for (int64_t i = 0; i < a.count; ++i) {
    if (a.weights[i].type != a.weights[0].type) return kUnsupported;
    if (i == 0 || !a.gate) width += a.weights[i].rows;
    if (i == 0 || !a.gate) chunks += blocks(a.weights[i].rows, kChunk);
  }
  const auto run = [&](auto kind) {
    using W = decltype(kind);
    const int64_t vectors = prepared_vectors<W>(a.columns);
    auto* x = static_cast<typename W::X*>(scratch(kPrepared, a.tokens * vectors * kBytes));
    prepare<W, A>(static_cast<const T*>(a.x), a.tokens, a.columns, x);
    in_parallel(a.threads, chunks, [&](int64_t chunk) {
      int64_t i = 0, column = 0;
      while (chunk >= blocks(a.weights[i].rows, kChunk)) {
        chunk -= blocks(a.weights[i].rows, kChunk);
        column += a.weights[i++].rows;
      }
      const int64_t first = chunk * kChunk, rows = least(kChunk, a.weights[i].rows - first);
      alignas(kBytes) float sums[kTokens * kChunk], others[kTokens * kChunk];
      for (int64_t start = 0; start < a.tokens; start += kTokens) {
        const int64_t tokens = least(kTokens, a.tokens - start);
        affine<A, W>(a.weights[i], first, rows, x + start * vectors, tokens, a.columns, sums);
        if (a.gate) affine<A, W>(a.weights[1], first, rows, x + start * vectors, tokens, a.columns, others);
        for (int64_t token = 0; token < tokens; ++token) {
          const int64_t place = (start + token) * width + column + first;
          const T* added = static_cast<const T*>(a.residual) + (a.gate ? 2 * place - first : place);
          for (int64_t row = 0; row < rows; row += kLanes) {
            F value = load<F>(sums + token * kChunk + row);
            if (a.residual != nullptr) value = value + get<A>(added + row, rows - row);
            if (a.gate) {
              F other = load<F>(others + token * kChunk + row);
              if (a.residual != nullptr) other = other + get<A>(added + width + row, rows - row);
              value = silu(value) * other;
            }
            put<A>(static_cast<T*>(a.out) + place + row, value, rows - row);
          }
        }
      }
    });
  };
  return with_weight<A>(a.weights[0].type, run) ? kDone : kUnsupported;
}
