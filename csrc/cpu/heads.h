// What needs a projection to the vocabulary: the heads' drafts, and the model's next token at every node.

// The k largest of some logits with their log-probabilities, best first; the first of equal ones, and NaN after all
// numbers.
inline void top_k(const float* logits, int64_t count, int64_t k, float* logprobs, int64_t* places) {
  int64_t held = 0;
  constexpr int64_t kBlock = 4 * kLanes;
  for (int64_t first = 0; first < count; first += kBlock) {
    F best = all(kHidden);
    for (int64_t i = first; i < least(first + kBlock, count); i += kLanes) {
      F v = get<Float32>(logits + i, count - i);
      for (int64_t lane = count - i; lane < kLanes; ++lane) v[lane] = kHidden;
      best = larger(v, best);
    }
    if (held == k && !(largest(best) > logprobs[k - 1])) continue;
    for (int64_t i = first; i < least(first + kBlock, count); ++i) {
      const float logit = logits[i] == logits[i] ? logits[i] : kHidden;
      if (held == k && !(logit > logprobs[k - 1])) continue;
      int64_t place = held < k ? held++ : k - 1;
      for (; place > 0 && logit > logprobs[place - 1]; --place) {
        logprobs[place] = logprobs[place - 1];
        places[place] = places[place - 1];
      }
      logprobs[place] = logit;
      places[place] = i;
    }
  }
  F total{};
  for (int64_t i = 0; i < count; i += kLanes) {
    F p = exponential(get<Float32>(logits + i, count - i) - logprobs[0]);
    for (int64_t lane = count - i; lane < kLanes; ++lane) p[lane] = 0.0f;
    total = total + p;
  }
  const float together = logprobs[0] + __builtin_logf(sum(total));
  for (int64_t i = 0; i < k; ++i) logprobs[i] -= together;
}

// heads_topk, see medusa_kernels/heads_topk.py.
template <class A>
Result heads(const Heads& a) {
  using T = typename A::T;
  for (int64_t i = 0; a.token_map != nullptr && i < a.vocabulary; ++i) {
    const bool row = a.token_map[i] >= 0 && a.token_map[i] < a.rows;
    const bool id = a.token_map[i] >= 0 && a.token_map[i] < a.noise_ids;
    if ((a.gather && !row) || (a.noise != nullptr && !id)) return kOutside;
  }
  const int64_t tokens = a.batch * a.heads, chunks = blocks(a.width, kChunk);
  const int64_t state_bytes = blocks(tokens * a.width * int64_t(sizeof(T)), 64) * 64;
  char* memory = static_cast<char*>(scratch(kBetween, state_bytes + tokens * a.vocabulary * int64_t(sizeof(float))));
  T* states = reinterpret_cast<T*>(memory);  // [heads, batch, width]
  float* logits = reinterpret_cast<float*>(memory + state_bytes);
  const int64_t start_block = a.root == nullptr ? 0 : -1;  // block -1 adds the root's term
  for (int64_t block = start_block; block < a.blocks; ++block) {
    // The first adds to the hidden states, the others to the states of the one before, in place.
    const auto before = [&](int64_t head, int64_t b) {
      if (block > start_block) return const_cast<const T*>(states) + (head * a.batch + b) * a.width;
      return static_cast<const T*>(a.hidden) + (a.hidden_stride == 0 ? b : b * a.heads + head) * a.width;
    };
    const int64_t columns = block < 0 ? a.root_width : a.width;
    const auto input = [&](int64_t head, int64_t b) {
      return block < 0 ? static_cast<const T*>(a.root) + b * columns : before(head, b);
    };
    with_weight<A>(A::kType, [&](auto kind) {
      using W = decltype(kind);
      const int64_t vectors = prepared_vectors<W>(columns);
      auto* x = static_cast<typename W::X*>(scratch(kPrepared, tokens * vectors * kBytes));
      for (int64_t i = 0; i < tokens; ++i) prepare<W, A>(input(i / a.batch, i % a.batch), 1, columns, x + i * vectors);
      in_parallel(a.threads, a.heads * chunks, [&](int64_t i) {
        const int64_t head = i / chunks, first = i % chunks * kChunk, rows = least(kChunk, a.width - first);
        Matrix w{static_cast<const char*>(a.w_root) + head * a.w_root_stride, nullptr, nullptr, nullptr, a.width,
                 a.w_root_row_stride, a.type, 0};
        if (block >= 0) {
          w.data = static_cast<const char*>(a.w1) + head * a.w1_stride + block * a.w1_block_stride;
          w.bias = a.b1 == nullptr ? nullptr : static_cast<const T*>(a.b1) + (head * a.blocks + block) * a.width;
          w.stride = a.w1_row_stride;
        }
        alignas(kBytes) float sums[kTokens * kChunk];
        for (int64_t start = 0; start < a.batch; start += kTokens) {
          const int64_t now = least(kTokens, a.batch - start);
          affine<A, W>(w, first, rows, x + (head * a.batch + start) * vectors, now, columns, sums);
          for (int64_t token = 0; token < now; ++token) {
            T* to = states + (head * a.batch + start + token) * a.width + first;
            for (int64_t row = 0; row < rows; row += kLanes) {
              const F h = get<A>(before(head, start + token) + first + row, rows - row);
              const F inner = load<F>(sums + token * kChunk + row);
              put<A>(to + row, h + (block < 0 ? inner : silu(inner)), rows - row);
            }
          }
        }
      });
    });
  }
  const int64_t projections = a.w2_stride == 0 ? 1 : a.heads, each = tokens / projections;
  // softcap tanh(x / divisor / softcap) / temperature is a cap of divisor softcap, divided at the end.
  const float divisor = static_cast<float>(a.divisor * a.temperature);
  const float softcap = static_cast<float>(a.divisor * a.softcap);
  const bool known = with_weight<A>(a.w2_type, [&](auto kind) {
    using W = decltype(kind);
    const int64_t vectors = prepared_vectors<W>(a.width), pieces = blocks(a.vocabulary, kChunk);
    auto* x = static_cast<typename W::X*>(scratch(kPrepared, tokens * vectors * kBytes));
    prepare<W, A>(states, tokens, a.width, x, a.w2_type);
    in_parallel(a.threads, projections * pieces, [&](int64_t i) {
      const int64_t own = i / pieces, first = i % pieces * kChunk, rows = least(kChunk, a.vocabulary - first);
      const int64_t* map = a.gather ? a.token_map : nullptr;
      float* out = logits + own * each * a.vocabulary + first;
      const float* scale = a.w2_scale == nullptr ? nullptr : a.w2_scale + own * a.scale_stride;
      Codes codes = codes_of({nullptr, scale, a.w2_zero, nullptr, 0, 0, a.w2_type, a.w2_group}, a.width);
      if (codes.zero != nullptr) codes.zero += own * a.rows * zero_bytes(codes);
      product<W>(static_cast<const char*>(a.w2) + own * a.w2_stride, a.w2_row_stride, map, first, rows,
                 x + own * each * vectors, each, a.width, out, a.vocabulary, codes);
      for (int64_t token = 0; token < each; ++token) {
        float* x = out + token * a.vocabulary;
        for (int64_t row = 0; a.w2_type < kInt4 && scale != nullptr && row < rows; ++row) {
          x[row] *= scale[map ? map[first + row] : first + row];
        }
        for (int64_t row = 0; softcap > 0 && row < rows; row += kLanes) {
          put<Float32>(x + row, capped(get<Float32>(x + row, rows - row), softcap), rows - row);
        }
        for (int64_t row = 0; divisor != 1 && row < rows; ++row) x[row] /= divisor;
        if (a.noise == nullptr) continue;
        const int64_t state = own * each + token, b = state % a.batch, head = state / a.batch;
        const float* noise = a.noise + (b * a.noise_rows + head) * a.noise_ids;
        for (int64_t row = 0; row < rows; ++row) x[row] += noise[a.token_map ? a.token_map[first + row] : first + row];
      }
    });
  }, a.w2_group);
  if (!known) return kUnsupported;
  in_parallel(a.threads, tokens, [&](int64_t i) {
    const int64_t place = (i % a.batch * a.heads + i / a.batch) * a.k;
    top_k(logits + i * a.vocabulary, a.vocabulary, a.k, a.logprobs + place, a.tokens + place);
    if (a.token_map == nullptr) return;
    for (int64_t j = 0; j < a.k; ++j) a.tokens[place + j] = a.token_map[a.tokens[place + j]];
  });
  return kDone;
}

// Whether a comes before b in an argmax: NaN is the largest number, as in PyTorch.
template <class V>
MEDUSA_INLINE auto exceeds(V a, V b) {
  return (a > b) | ((a != a) & (b == b));
}

// The argmax of tree_verify, without statistics: medusa_kernels/tree_verify.py.
template <class A>
Result argmax(const Argmax& a) {
  const int64_t piece = 8 * kChunk, pieces = blocks(a.weight.rows, piece);
  const auto noise_row = [&](int64_t token) {
    return int64_t(a.noise_rows[token / a.nodes * a.noise_rows_stride + token % a.nodes]);
  };
  for (int64_t token = 0; a.noise != nullptr && token < a.tokens; ++token) {
    if (noise_row(token) < 0 || noise_row(token) >= a.noises) return kOutside;
  }
  const float divisor = static_cast<float>(a.divisor), softcap = static_cast<float>(a.softcap);
  const bool known = with_weight<A>(a.weight.type, [&](auto kind) {
    using W = decltype(kind);
    const int64_t vectors = prepared_vectors<W>(a.columns);
    auto* x = static_cast<typename W::X*>(scratch(kPrepared, a.tokens * vectors * kBytes));
    auto* values = static_cast<float*>(scratch(kBetween, 2 * pieces * a.tokens * int64_t(sizeof(float))));
    auto* places = reinterpret_cast<int32_t*>(values + pieces * a.tokens);
    prepare<W, A>(static_cast<const typename A::T*>(a.x), a.tokens, a.columns, x, a.weight.type);
    in_parallel(a.threads, pieces, [&](int64_t i) {
      const int64_t end = least(a.weight.rows, (i + 1) * piece);
      alignas(kBytes) float sums[kTokens * kChunk];
      F best[kTokens];
      I best_at[kTokens];
      for (int64_t start = 0; start < a.tokens; start += kTokens) {
        const int64_t tokens = least(kTokens, a.tokens - start);
        for (int64_t token = 0; token < tokens; ++token) {
          best[token] = all(kHidden);
          best_at[token] = I{} + int32_t(i * piece);
        }
        for (int64_t first = i * piece; first < end; first += kChunk) {
          const int64_t rows = least(kChunk, end - first);
          affine<A, W>(a.weight, first, rows, x + start * vectors, tokens, a.columns, sums);
          for (int64_t token = 0; token < tokens; ++token) {
            const float* noise = nullptr;
            if (a.noise != nullptr) {
              const int64_t own = (start + token) / a.nodes * a.noises + noise_row(start + token);
              noise = a.noise + own * a.weight.rows + first;
            }
            for (int64_t row = 0; row < rows; row += kLanes) {
              F logits = A::rounded(load<F>(sums + token * kChunk + row));
              if (divisor != 1) logits = A::rounded(logits / divisor);
              if (softcap > 0) logits = A::rounded(A::rounded(capped(A::rounded(logits / softcap), 1)) * softcap);
              if (noise != nullptr) logits = logits / float(a.temperature) + get<Float32>(noise + row, rows - row);
              for (int64_t lane = rows - row; lane < kLanes; ++lane) logits[lane] = kHidden;
              const I at = lane_number() + int32_t(first + row);
              const auto above = exceeds(logits, best[token]);
              best_at[token] = above ? at : best_at[token];
              best[token] = above ? logits : best[token];
            }
          }
        }
        for (int64_t token = 0; token < tokens; ++token) {
          int lane = 0;
          for (int l = 1; l < kLanes; ++l) {
            const float value = best[token][l], held = best[token][lane];
            const bool same = !exceeds(value, held) && !exceeds(held, value);
            if (exceeds(value, held) || (same && best_at[token][l] < best_at[token][lane])) lane = l;
          }
          values[i * a.tokens + start + token] = best[token][lane];
          places[i * a.tokens + start + token] = best_at[token][lane];
        }
      }
    });
    for (int64_t token = 0; token < a.tokens; ++token) {
      int64_t found = 0;
      for (int64_t i = 1; i < pieces; ++i) {
        if (exceeds(values[i * a.tokens + token], values[found * a.tokens + token])) found = i;
      }
      a.next[token] = places[found * a.tokens + token];
    }
  }, a.weight.group);
  return known ? kDone : kUnsupported;
}
