// Few tokens times a weight, in one pass over the weight: the products of the CPU ops.
//
// A weight is read as it lies in memory, row by row. A tile multiplies a few of its rows with a few tokens: each sum has
// one vector, whose lanes are added at the end, so an element's additions have one order, whatever the number of tokens,
// the tile and the thread: a token's result does not depend on the tokens beside it.

// Bytes of a row of a contiguous weight.
inline int64_t row_bytes(int64_t type, int64_t columns) {
  return type == kFloat32 ? 4 * columns : type == kBFloat16 ? 2 * columns : type >= kInt4 ? columns / 2 : columns;
}

// Bytes of a row's zero points, or of its sum.
inline int64_t zero_bytes(const Codes& codes) { return codes.type == kDynamicInt4 ? sizeof(float) : codes.groups; }

// Vectors of one prepared token. One of DynamicInt8 ends with what is added to its sums, and their scale, in all lanes.
template <class W>
MEDUSA_INLINE int64_t prepared_vectors(int64_t columns) {
  const int64_t steps = blocks(columns, W::kStep);
  if constexpr (std::is_same_v<W, DynamicInt4>) {
    return blocks(int64_t(sizeof(RoundedToken)) + (steps - 1) * int64_t(sizeof(RoundedToken::Step)), kBytes);
  } else {
    return steps * W::kParts + 2 * kRounds<W>;
  }
}

// Rounds a token to 8 bits.
template <class A>
inline void round_token(const typename A::T* from, int64_t columns, DynamicInt8::X* to) {
  constexpr bool kByte = std::is_same_v<DynamicInt8::X, I>;
  using Code = std::conditional_t<kByte, Quarters, Shorts>;
  const Rounding<A, false> code(from, columns);
  const int64_t vectors = prepared_vectors<DynamicInt8>(columns) - 2;
  I added{};
  for (int64_t i = 0; i < vectors * kBytes / int64_t(sizeof(Code)); ++i) {
    const Code codes = __builtin_convertvector(__builtin_convertvector(code(i * kLanes), I), Code);
    store(reinterpret_cast<char*>(to) + i * int64_t(sizeof(codes)), codes);
  }
#if defined(__AVX512VNNI__)
  for (int64_t i = 0; i < vectors; ++i) multiply(added, to[i], I(U{} + 0x80808080u));
#endif
  store(to + vectors, I{} - sums<1>(&added)[0]);
  store(to + vectors + 1, all(code.scale));
}

// Puts tokens [tokens, columns] into the order in which the columns of a weight of `type` are multiplied, padded with
// zeros.
template <class W, class A>
inline void in_order(const typename A::T* from, int64_t tokens, int64_t columns, typename W::X* to, int64_t type) {
  const int64_t even = type == kNf4 || type == kFp4 ? 1 : 0;  // where the even columns are: see quantised.py
  const int64_t steps = blocks(columns, W::kStep);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t step = 0; step < steps; ++step) {
      const typename A::T* first = from + token * columns + step * W::kStep;
      const int64_t left = columns - step * W::kStep;
      if constexpr (W::kParts == 2 && sizeof(to[0][0]) == 4) {
        using InOrder = typename EveryLane<kLanes>::type;
        const F a = get<A>(first, left), b = left > kLanes ? get<A>(first + kLanes, left - kLanes) : F{};
        to[even] = shuffled<Alternate<0>>(a, b, InOrder{});
        to[1 - even] = shuffled<Alternate<1>>(a, b, InOrder{});
      } else if constexpr (W::kStep > kLanes) {
        alignas(kBytes) typename A::T pairs[2][2 * kLanes] = {};
        __builtin_memcpy(pairs, first, static_cast<size_t>(least(left, W::kStep)) * sizeof(*first));
        if constexpr (W::kParts == 2) {
          const U a = load<U>(pairs[0]), b = load<U>(pairs[1]);
          for (int odd = 0; odd < 2; ++odd) {
            store(pairs[odd == 0 ? even : 1 - even], __builtin_convertvector(a >> (16 * odd), Halves));
            store(pairs[odd == 0 ? even : 1 - even] + kLanes, __builtin_convertvector(b >> (16 * odd), Halves));
          }
        }
        for (int part = 0; part < W::kParts; ++part) to[part] = load<typename W::X>(pairs[part]);
      } else {
        *to = get<A>(first, left);
      }
      to += W::kParts;
    }
  }
}

// Prepares tokens [tokens, columns] for a weight of `type`.
template <class W, class A>
inline void prepare(const typename A::T* from, int64_t tokens, int64_t columns, typename W::X* to,
                    int64_t type = A::kType) {
  if constexpr (kRounds<W>) {
    for (int64_t token = 0; token < tokens; ++token) {
      auto* place = reinterpret_cast<typename W::Token*>(to + token * prepared_vectors<W>(columns));
      round_token<A>(from + token * columns, columns, place);
    }
  } else {
    in_order<W, A>(from, tokens, columns, to, type);
  }
}

// Adds the lanes of each sum, of as many tokens at once as have a lane for each: out[token * stride + row]. To sums of
// integers the last vector but one of their token is added, and the last one multiplies them.
template <int kRows, int kTokens, class V, class X>
MEDUSA_INLINE void finish(const V* acc, const X* x, int64_t vectors, float* out, int64_t stride) {
  constexpr int kNow = kTokens * kRows >= kLanes ? kLanes / kRows : kTokens >= 2 && 2 * kRows < kLanes ? 2 : 1;
  constexpr int kApart = kLanes / (kNow * kRows);
  V found = sums<kNow * kRows>(acc);
  if constexpr (kApart > 1) found = shuffled<Every<kApart>>(found, found, typename EveryLane<kLanes>::type{});
  F values;
  if constexpr (std::is_same_v<V, I>) {
    I added = load<I>(x + vectors - 2);
    F scale = load<F>(x + vectors - 1);
    MEDUSA_UNROLL
    for (int t = 1; t < kNow; ++t) {
      const I later = lane_number() >= t * kRows;
      added = later ? load<I>(x + (t + 1) * vectors - 2) : added;
      scale = later ? load<F>(x + (t + 1) * vectors - 1) : scale;
    }
    values = __builtin_convertvector(found + added, F) * scale;
  } else {
    values = found;
  }
  MEDUSA_UNROLL
  for (int t = 0; t < kNow; ++t) {
    __builtin_memcpy(out + t * stride, reinterpret_cast<const float*>(&values) + t * kRows, kRows * sizeof(float));
  }
  if constexpr (kTokens > kNow) {
    finish<kRows, kTokens - kNow>(acc + kNow * kRows, x + kNow * vectors, vectors, out + kNow * stride, stride);
  }
}

// Calls run(rows, tables, step) for each step of columns of kRows rows, whose memory `ahead` bytes further on is
// prefetched; row r's table is tables[r * kTables]. The last step is padded with zeros.
template <class W, int kRows, class Run>
MEDUSA_INLINE void each_step(const Row* w, const Codes& codes, int64_t ahead, int64_t columns, const Run& run) {
  const int64_t steps = columns / W::kStep, rest = columns - steps * W::kStep, same = W::same_table(codes);
  const char* rows[kRows];
  typename W::Table tables[kRows * kTables];
  MEDUSA_UNROLL
  for (int r = 0; r < kRows; ++r) rows[r] = w[r].data;
  const auto one_step = [&](int64_t table, int64_t step) MEDUSA_INLINED {
    run(rows, tables + table, step);
    MEDUSA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      rows[r] += W::kStepBytes;
      __builtin_prefetch(rows[r] + ahead, 0, 2);
    }
  };
  for (int64_t step = 0, first = 0; step < steps; first += kTables) {
    const int64_t now = least(kTables, blocks(steps, same) - first);
    for (int r = 0; r < kRows; ++r) W::fill(w[r], codes, first, now, kRows, tables + r * kTables);
    if (same == 1) {
      for (int64_t i = 0; i < now; ++i) one_step(i, step++);
    } else {
      for (int64_t i = 0; i < now; ++i) {
        for (const int64_t end = least(steps, step + same); step < end; ++step) one_step(i, step);
      }
    }
  }
  if (rest > 0) {
    alignas(kBytes) char last[kRows][W::kStepBytes] = {};
    const char* padded[kRows];
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(last[r], rows[r], static_cast<size_t>(rest * W::kStepBytes / W::kStep));
      padded[r] = last[r];
      W::fill(w[r], codes, steps, 1, kRows, tables + r * kTables);
    }
    run(padded, tables, steps);
  }
}

// kRows rows of a weight times kTokens tokens: out[token * stride + row].
template <class W, int kRows, int kTokens>
inline void tile(const Row* w, const Codes& codes, int64_t ahead, const typename W::X* x, int64_t columns, float* out,
                 int64_t stride) {
  const int64_t vectors = prepared_vectors<W>(columns);
  std::conditional_t<kRounds<W>, I, F> acc[kRows * kTokens] = {};
  each_step<W, kRows>(w, codes, ahead, columns, [&](const char* const* rows, const auto* tables, int64_t step) MEDUSA_INLINED {
    MEDUSA_UNROLL
    for (int part = 0; part < W::kParts; ++part) {
      typename W::X parts[kRows];
      MEDUSA_UNROLL
      for (int r = 0; r < kRows; ++r) parts[r] = kept<kTokens>(W::part(rows[r], part, tables[r * kTables]));
      MEDUSA_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const auto token = kept<kTokens>(x[t * vectors + step * W::kParts + part]);
        MEDUSA_UNROLL
        for (int r = 0; r < kRows; ++r) multiply(acc[t * kRows + r], token, parts[r]);
      }
    }
  });
  finish<kRows, kTokens>(acc, x, vectors, out, stride);
}

// The most tokens that meet kRows rows at once, and the fewest: fewer meet more rows.
template <int kRows>
constexpr int kMost = kRows == kManyRows ? kManyTokens : kTileTokens;
template <int kRows>
constexpr int kFewest = kRows == kManyRows && kRows < kTileRows ? kTileTokens + 1 : 1;

// Those rows times `tokens` tokens, kTokens at most.
template <class W, int kRows, int kTokens>
inline void pass(const Row* w, const Codes& codes, int64_t ahead, const typename W::X* x, int64_t tokens,
                 int64_t columns, float* out, int64_t stride) {
  if (tokens == kTokens) return tile<W, kRows, kTokens>(w, codes, ahead, x, columns, out, stride);
  if constexpr (kTokens > kFewest<kRows>) {
    pass<W, kRows, kTokens - 1>(w, codes, ahead, x, tokens, columns, out, stride);
  }
}

// Those rows times any number of tokens, in passes of equal size: the rows stay in the nearest cache, and the first pass
// prefetches the rows that come next. For several passes rows are widened once; the same numbers are added in the same
// order.
template <class W, int kRows>
inline void passes(const Row* w, const Codes& codes, int64_t ahead, const typename W::X* x, int64_t tokens,
                   int64_t columns, float* out, int64_t stride) {
  using Wide = typename W::Wide;
  const int64_t vectors = prepared_vectors<W>(columns);
  if constexpr (!std::is_same_v<W, Wide> && (kRows < kTileRows || kManyRows == kTileRows)) {
    // A thread of the pool cannot throw: without room, rows are widened in every pass.
    char* widened =
        tokens <= kMost<kRows> ? nullptr : static_cast<char*>(scratch(kWidened, kRows * vectors * kBytes, false));
    if (widened != nullptr) {
      each_step<W, kRows>(w, codes, ahead, columns, [&](const char* const* rows, const auto* tables, int64_t step) MEDUSA_INLINED {
        MEDUSA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          char* to = widened + (r * vectors + step * W::kParts) * kBytes;
          MEDUSA_UNROLL
          for (int part = 0; part < W::kParts; ++part) store(to + part * kBytes, W::part(rows[r], part, tables[r * kTables]));
        }
      });
      Row wide[kRows];
      for (int r = 0; r < kRows; ++r) wide[r] = {widened + r * vectors * kBytes, w[r].scale, nullptr};
      const int64_t padded = (vectors - 2 * kRounds<W>) / Wide::kParts * Wide::kStep;
      return passes<Wide, kRows>(wide, codes, 0, x, tokens, padded, out, stride);
    }
  }
  for (int64_t left = blocks(tokens, kMost<kRows>); left > 0; --left) {
    const int64_t now = blocks(tokens, left);
    pass<W, kRows, kMost<kRows>>(w, codes, ahead, x, now, columns, out, stride);
    ahead = 0;
    x += now * vectors;
    out += now * stride;
    tokens -= now;
  }
}

// `rows` rows, at(i) each, times prepared tokens: out[token * stride + row].
template <class W, class At>
inline void tiles(const At& at, int64_t rows, int64_t w_stride, const Codes& codes, const typename W::X* x, int64_t tokens,
                  int64_t columns, float* out, int64_t stride) {
  int64_t row = 0;
  const auto of_rows = [&](auto count) MEDUSA_INLINED {
    constexpr int kRows = decltype(count)::value;
    const int64_t ahead = ahead_of(kRows, w_stride);
    for (; row + kRows <= rows; row += kRows) {
      Row w[kRows];
      for (int r = 0; r < kRows; ++r) w[r] = at(row + r);
      if constexpr (kRows > kTileRows) {
        tile<W, kRows, 1>(w, codes, ahead, x, columns, out + row, stride);
      } else {
        passes<W, kRows>(w, codes, ahead, x, tokens, columns, out + row, stride);
      }
    }
  };
  if constexpr (kLoneRows > kTileRows && !std::is_empty_v<typename W::Table>) {
    if (tokens == 1) of_rows(std::integral_constant<int, kLoneRows>{});
  }
  if (kManyRows == kTileRows || tokens <= kTileTokens) {
    of_rows(std::integral_constant<int, kTileRows>{});
  } else {
    of_rows(std::integral_constant<int, kManyRows>{});
  }
  for (; row < rows; ++row) {
    const Row w = at(row);
    passes<W, 1>(&w, codes, w_stride, x, tokens, columns, out + row, stride);
  }
}

// `rows` rows of a weight times prepared tokens: out[token * stride + row]. With a map, row i of them is row map[i].
template <class W>
inline void product(const void* weight, int64_t w_stride, const int64_t* map, int64_t first, int64_t rows,
                    const typename W::X* x, int64_t tokens, int64_t columns, float* out, int64_t stride,
                    const Codes& codes = {}) {
  const auto at = [&](int64_t row) {
    const int64_t own = map == nullptr ? first + row : map[first + row];
    return Row{static_cast<const char*>(weight) + own * w_stride, codes.scale + own * codes.groups,
               codes.zero == nullptr ? nullptr : codes.zero + own * zero_bytes(codes)};
  };
  if constexpr (std::is_same_v<W, DynamicInt4>) {
    const RoundedTokens rounded{reinterpret_cast<const char*>(x), prepared_vectors<W>(columns) * kBytes};
    four_bit_product(at, rows, w_stride, codes, rounded, tokens, out, stride);
  } else {
    tiles<W>(at, rows, w_stride, codes, x, tokens, columns, out, stride);
  }
}

constexpr int64_t kChunk = 64;   // rows of a weight in one piece of work
constexpr int64_t kTokens = 64;  // tokens whose sums are held at once

// The codes of a weight of 4 bits; of others nothing is read.
MEDUSA_INLINE Codes codes_of(const Matrix& w, int64_t columns) {
  return w.type < kInt4 ? Codes{} : Codes{w.type, w.scale, w.zero, w.group, columns / w.group};
}

// The sums of some rows of a weight, with scale and bias: sums[token * kChunk + row].
template <class A, class W>
inline void affine(const Matrix& w, int64_t first, int64_t rows, const typename W::X* x, int64_t tokens,
                   int64_t columns, float* sums) {
  product<W>(w.data, w.stride, nullptr, first, rows, x, tokens, columns, sums, kChunk, codes_of(w, columns));
  const float* scales = w.type >= kInt4 ? nullptr : w.scale;
  if (scales == nullptr && w.bias == nullptr) return;
  for (int64_t row = 0; row < rows; row += kLanes) {
    const F scale = scales == nullptr ? all(1.0f) : get<Float32>(scales + first + row, rows - row);
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
    if (a.weights[i].type != a.weights[0].type || a.weights[i].group != a.weights[0].group) return kUnsupported;
    if (i == 0 || !a.gate) width += a.weights[i].rows;
    if (i == 0 || !a.gate) chunks += blocks(a.weights[i].rows, kChunk);
  }
  const auto run = [&](auto kind) {
    using W = decltype(kind);
    const int64_t vectors = prepared_vectors<W>(a.columns);
    auto* x = static_cast<typename W::X*>(scratch(kPrepared, a.tokens * vectors * kBytes));
    prepare<W, A>(static_cast<const T*>(a.x), a.tokens, a.columns, x, a.weights[0].type);
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
            F value = load<F>(sums + token * kChunk + row) * float(a.factor);
            if (a.residual != nullptr) value = value + get<A>(added + row, rows - row);
            if (a.gate) {
              F other = load<F>(others + token * kChunk + row);
              if (a.residual != nullptr) other = other + get<A>(added + width + row, rows - row);
              value = (a.activation == kGeluTanh ? gelu_tanh(value) : silu(value)) * other;
            }
            put<A>(static_cast<T*>(a.out) + place + row, value, rows - row);
          }
        }
      }
    });
  };
  return with_weight<A>(a.weights[0].type, run, a.weights[0].group) ? kDone : kUnsupported;
}
