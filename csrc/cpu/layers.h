// Decoder layers of the Llama family over a KV cache, a tree of nodes at a time. Results are rounded where the ops that
// each stage names round them.

// One row of add_rms_norm without a sum.
template <class A>
inline void rms_norm(const Layers& a, const typename A::T* x, const typename A::T* weight, int64_t width,
                     typename A::T* out) {
  const bool once = a.norm_offset == a.norm_offset;
  const float offset = once ? float(a.norm_offset) : 0.0f;
  F squares{};
  for (int64_t i = 0; i < width; i += kLanes) {
    const F v = get<A>(x + i, width - i);
    squares = v * v + squares;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + float(a.eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const F normed = get<A>(x + i, width - i) * factor, own = get<A>(weight + i, width - i);
    put<A>(out + i, once ? normed * (own + offset) : A::rounded(normed) * own, width - i);
  }
}

// Rotates the first numbers of one head in place: x * cos + rotate_half(x) * sin, each product rounded (rope_append).
template <class A>
inline void rotate(typename A::T* x, const typename A::T* cos, const typename A::T* sin, int64_t rotated) {
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const F low = get<A>(x + i, count), high = get<A>(x + half + i, count);
    const F left = A::rounded(low * get<A>(cos + i, count)), right = A::rounded(high * get<A>(sin + i, count));
    const F up = A::rounded(high * get<A>(cos + half + i, count));
    const F down = A::rounded(low * get<A>(sin + half + i, count));
    put<A>(x + i, left - right, count);
    put<A>(x + half + i, up + down, count);
  }
}

// Numbers of a cached row in 8 bits; the row's last 4 bytes are their scale (medusa_kernels/cache_rows.py).
struct Int8 {
  using T = int8_t;
  static MEDUSA_INLINE F get(const T* from) { return Int8Weight::part(reinterpret_cast<const char*>(from), 0, {}); }
};

// What the rows of a cache are, whose keys are multiplied as weights W.
template <class W, class A>
struct Kept {
  using Type = A;
  static constexpr bool kScaled = false;
};
template <class A>
struct Kept<Int8Weight, A> {
  using Type = Int8;
  static constexpr bool kScaled = true;
};

// Stores one head as a row in 8 bits.
template <class A>
inline void quantise(const typename A::T* x, int64_t head_dim, char* row) {
  const float size = range_of<A>(x, head_dim).size(), most = size < 1e-30f ? 1e-30f : size;
  const float factor = 127.0f / most, scale = most / 127.0f;
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const F code = nearest(get<A>(x + i, head_dim - i), factor);
    const Quarters bytes = __builtin_convertvector(__builtin_convertvector(code, I), Quarters);
    __builtin_memcpy(row + i, &bytes, static_cast<size_t>(least(kLanes, head_dim - i)));
  }
  __builtin_memcpy(row + head_dim, &scale, sizeof(scale));
}

constexpr int64_t kQueries = 32;  // query rows that pass over the keys together
constexpr int64_t kKeys = 64;     // keys whose scores are held at once
constexpr int64_t kMaxHead = 256;
constexpr float kHidden = -__builtin_inff();

// out[query, :] += sum over keys of scores[query, key] * values[key, :], for kRows queries and kWide vectors of a head.
template <class A, int kRows, int kWide>
inline void weigh(const float* scores, const char* values, int64_t keys, int64_t stride, int64_t count, float* out) {
  F acc[kRows * kWide];
  MEDUSA_UNROLL
  for (int i = 0; i < kRows * kWide; ++i) acc[i] = load<F>(out + i / kWide * kMaxHead + i % kWide * kLanes);
  for (int64_t key = 0; key < keys; ++key) {
    F value[kWide];
    MEDUSA_UNROLL
    for (int v = 0; v < kWide; ++v) {
      value[v] = get<A>(reinterpret_cast<const typename A::T*>(values + key * stride) + v * kLanes, count - v * kLanes);
    }
    MEDUSA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MEDUSA_UNROLL
      for (int v = 0; v < kWide; ++v) acc[r * kWide + v] = value[v] * scores[r * kKeys + key] + acc[r * kWide + v];
    }
  }
  MEDUSA_UNROLL
  for (int i = 0; i < kRows * kWide; ++i) store(out + i / kWide * kMaxHead + i % kWide * kLanes, acc[i]);
}

template <class A, int kRows>
inline void weigh_rows(const float* scores, const char* values, int64_t keys, int64_t stride, int64_t head_dim,
                       float* out) {
  constexpr int64_t kSize = sizeof(typename A::T);
  constexpr int kWide = kRows * 4 <= kManyRows * kManyTokens ? 4 : 2;  // more sums than that have no registers
  int64_t first = 0;
  for (; first + kWide * kLanes <= head_dim; first += kWide * kLanes) {
    weigh<A, kRows, kWide>(scores, values + first * kSize, keys, stride, kWide * kLanes, out + first);
  }
  for (; first < head_dim; first += kLanes) {
    weigh<A, kRows, 1>(scores, values + first * kSize, keys, stride, head_dim - first, out + first);
  }
}

// Bytes of a cached row.
template <class A>
inline int64_t cached_bytes(const Layers& a) {
  return a.kv_type == kInt8 ? a.head_dim + int64_t(sizeof(float)) : a.head_dim * int64_t(sizeof(typename A::T));
}

// One batch row of one layer, as attention sees it.
template <class A>
struct Sequence {
  const Layers& a;
  const typename A::T *q_norm, *k_norm;  // of each head, or null
  const typename A::T *cos, *sin;
  int64_t window, batch, prefix;
  const int64_t* ancestors;  // [nodes, words]
  char *keys, *values;  // of the first KV head
  typename A::T* rows;  // [nodes, heads + 2 kv_heads, head_dim]: queries, keys and values of the nodes
  typename A::T* out;   // [nodes, heads, head_dim]

  int64_t words() const { return blocks(a.nodes, 64); }
  bool sees(int64_t node, int64_t other) const { return ancestors[node * words() + other / 64] >> (other % 64) & 1; }
  int64_t depth(int64_t node) const {
    int64_t count = -1;
    for (int64_t w = 0; w < words(); ++w) count += __builtin_popcountll(static_cast<uint64_t>(ancestors[node * words() + w]));
    return count;
  }

  // Norms and rotates the queries and keys of one KV head, and appends its keys and values (rope_append).
  void append(int64_t kv_head) const {
    using T = typename A::T;
    const int64_t group = a.heads / a.kv_heads, dim = a.head_dim, all_heads = a.heads + 2 * a.kv_heads;
    const int32_t* depths = a.depths + batch * a.depths_stride;
    for (int64_t node = 0; node < a.nodes; ++node) {
      const int64_t at = batch * a.table_stride + (prefix + depths[node]) * a.rotated;
      T* own = rows + node * all_heads * dim;
      T* key = own + (a.heads + kv_head) * dim;
      const T* value = own + (a.heads + a.kv_heads + kv_head) * dim;
      const int64_t cached = (kv_head * a.rows + prefix + node) * cached_bytes<A>(a);
      if (k_norm != nullptr) rms_norm<A>(a, key, k_norm, dim, key);
      rotate<A>(key, cos + at, sin + at, a.rotated);
      if (a.kv_type == kInt8) {
        quantise<A>(key, dim, keys + cached);
        quantise<A>(value, dim, values + cached);
      } else {
        __builtin_memcpy(keys + cached, key, size_t(dim) * sizeof(T));
        __builtin_memcpy(values + cached, value, size_t(dim) * sizeof(T));
      }
      for (int64_t g = 0; g < group; ++g) {
        T* query = own + (kv_head * group + g) * dim;
        if (q_norm != nullptr) rms_norm<A>(a, query, q_norm, dim, query);
        rotate<A>(query, cos + at, sin + at, a.rotated);
      }
    }
  }

  // Query rows [first, first + count) of one KV head attend; row i is node i / group, query head i % group
  // (tree_attention). Keys pass in blocks, with the running maximum and sum of each row (Dao et al. 2022).
  template <class W>
  void attend(int64_t kv_head, int64_t first, int64_t count) const {
    const int64_t group = a.heads / a.kv_heads, dim = a.head_dim, all_heads = a.heads + 2 * a.kv_heads;
    const int64_t start = window == 0 || prefix + 1 < window ? 0 : prefix + 1 - window;
    const int64_t vectors = prepared_vectors<W>(dim), end = prefix + a.nodes, row_size = cached_bytes<A>(a);
    const float scale = float(a.scale), cap = float(a.softcap), last_scale = cap > 0.0f ? 1.0f : scale;
    using V = Kept<W, A>;
    float key_scales[kKeys] = {}, value_scales[kKeys] = {};
    typename W::X queries[kQueries * 2 * kMaxHead / kLanes];
    alignas(kBytes) float scores[kQueries * kKeys], sums[kQueries * kMaxHead];
    float top[kQueries], total[kQueries];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t node = (first + i) / group, head = kv_head * group + (first + i) % group;
      prepare<W, A>(rows + (node * all_heads + head) * dim, 1, dim, queries + i * vectors);
      top[i] = -1e30f;
      total[i] = 0.0f;
    }
    __builtin_memset(sums, 0, sizeof(float) * size_t(count * kMaxHead));
    for (int64_t key = start; key < end; key += kKeys) {
      const int64_t keys_now = least(kKeys, end - key);
      const char* block = keys + (kv_head * a.rows + key) * row_size;
      const char* value = values + (kv_head * a.rows + key) * row_size;
      product<W>(block, row_size, nullptr, 0, keys_now, queries, count, dim, scores, kKeys);
      for (int64_t k = 0; V::kScaled && k < keys_now; ++k) {
        __builtin_memcpy(key_scales + k, block + k * row_size + dim, sizeof(float));
        __builtin_memcpy(value_scales + k, value + k * row_size + dim, sizeof(float));
      }
      for (int64_t i = 0; i < count; ++i) {
        float* row = scores + i * kKeys;
        for (int64_t k = 0; V::kScaled && k < kKeys; k += kLanes) {
          store(row + k, load<F>(row + k) * load<F>(key_scales + k));
        }
        for (int64_t k = 0; cap > 0.0f && k < kKeys; k += kLanes) store(row + k, capped(load<F>(row + k) * scale, cap));
        hide((first + i) / group, key, keys_now, row);
        F best = all(top[i]);
        for (int64_t k = 0; k < kKeys; k += kLanes) {
          const F scaled = load<F>(row + k) * last_scale;
          store(row + k, scaled);
          best = larger(scaled, best);
        }
        const float now = largest(best);
        F added{};
        for (int64_t k = 0; k < kKeys; k += kLanes) {
          const F p = exponential(load<F>(row + k) - now);
          store(row + k, V::kScaled ? p * load<F>(value_scales + k) : p);
          added = added + p;
        }
        const float kept = exponential(all(top[i] - now))[0];
        total[i] = total[i] * kept + sum(added);
        top[i] = now;
        if (kept != 1.0f) {
          for (int64_t d = 0; d < dim; d += kLanes) {
            float* at = sums + i * kMaxHead + d;
            store(at, load<F>(at) * kept);
          }
        }
      }
      using T = typename V::Type;
      int64_t i = 0;
      for (; i + 4 <= count; i += 4) {
        weigh_rows<T, 4>(scores + i * kKeys, value, keys_now, row_size, dim, sums + i * kMaxHead);
      }
      for (; i < count; ++i) weigh_rows<T, 1>(scores + i * kKeys, value, keys_now, row_size, dim, sums + i * kMaxHead);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t node = (first + i) / group, head = kv_head * group + (first + i) % group;
      for (int64_t d = 0; d < dim; d += kLanes) {
        put<A>(out + (node * a.heads + head) * dim + d, load<F>(sums + i * kMaxHead + d) / total[i], dim - d);
      }
    }
  }

  // Sets the scores of keys that a node does not see, and of those after the last key, to minus infinity.
  void hide(int64_t node, int64_t key, int64_t count, float* scores) const {
    for (int64_t k = count; k < kKeys; ++k) scores[k] = kHidden;
    if (key + count <= prefix && window == 0) return;
    for (int64_t k = prefix > key ? prefix - key : 0; k < count; ++k) {
      if (!sees(node, key + k - prefix)) scores[k] = kHidden;
    }
    if (window == 0) return;
    const int64_t position = prefix + depth(node);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t other = key + k - prefix;
      if (position - (other < 0 ? key + k : prefix + depth(other)) >= window) scores[k] = kHidden;
    }
  }
};

// decoder_layers, see medusa_kernels/decoder_layers.py.
template <class A>
Result layers(const Layers& a) {
  using T = typename A::T;
  if (a.head_dim > kMaxHead || a.rotated > a.head_dim || a.rotated % 2 != 0) return kUnsupported;
  for (int64_t i = 0; i < a.batch * a.nodes; ++i) {
    const int64_t b = i / a.nodes, length = a.cache_lens[b], position = length + a.depths[b * a.depths_stride + i % a.nodes];
    if (length < 0 || length + a.nodes > a.rows || position < 0 || position >= a.table_rows) return kOutside;
    if (a.slot(b) < 0 || a.slot(b) >= a.sequences) return kOutside;
  }
  const int64_t tokens = a.batch * a.nodes, attended = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  const int64_t head_rows = a.rows * cached_bytes<A>(a), half = a.stored * a.kv_heads * head_rows;
  T* hidden = static_cast<T*>(a.out);
  T* normed = static_cast<T*>(
      scratch(kBetween, tokens * (a.width + 2 * attended + 2 * kv_width + a.inner) * int64_t(sizeof(T))));
  T* qkv = normed + tokens * a.width;
  T* heads_out = qkv + tokens * (attended + 2 * kv_width);
  T* gated = heads_out + tokens * attended;
  __builtin_memcpy(hidden, a.hidden, size_t(tokens * a.width) * sizeof(T));
  // Calls run(token) for tokens of `width` numbers each.
  const auto each = [&](int64_t width, const auto& run) {
    in_parallel(tokens * width < 32768 ? 1 : a.threads, tokens, run);
  };
  const auto normed_hidden = [&](const void* weight) -> const T* {
    if (weight == nullptr) return hidden;
    each(a.width, [&](int64_t token) {
      rms_norm<A>(a, hidden + token * a.width, static_cast<const T*>(weight), a.width, normed + token * a.width);
    });
    return normed;
  };
  const auto project = [&](const T* x, int64_t columns, const T* residual, T* out, bool gate, double factor,
                           auto... weights) {
    return linear<A>(Linear{a.threads, a.type, x, tokens, columns, residual, out, gate, a.activation, factor,
                            int64_t(sizeof...(weights)), {weights...}}) == kDone;
  };
  // Adds a projection of x to the hidden states, or with a weight its norm.
  const auto add = [&](const T* x, int64_t columns, const void* weight, const Matrix& matrix) {
    if (weight == nullptr) return project(x, columns, hidden, hidden, false, a.factor, matrix);
    const bool done = project(x, columns, nullptr, normed, false, a.factor, matrix);
    each(a.width, [&](int64_t token) {
      T *to = hidden + token * a.width, *own = normed + token * a.width;
      rms_norm<A>(a, own, static_cast<const T*>(weight), a.width, own);
      for (int64_t i = 0; i < a.width; i += kLanes) {
        const int64_t count = a.width - i;
        put<A>(to + i, get<A>(to + i, count) + get<A>(own + i, count), count);
      }
    });
    return done;
  };
  for (int64_t index = 0; index < a.count; ++index) {
    const void* const* weights = a.weights + index * kSlots;
    const auto of = [&](Slot slot, int64_t rows, int64_t columns) {
      const int64_t* kind = a.kinds + 2 * (index * 7 + (slot - kQ) / 4);
      return Matrix{weights[slot], static_cast<const float*>(weights[slot + 2]),
                    static_cast<const uint8_t*>(weights[slot + 3]), weights[slot + 1], rows,
                    row_bytes(kind[0], columns), kind[0], kind[1]};
    };
    if (!project(normed_hidden(weights[kInputNorm]), a.width, nullptr, qkv, false, 1.0, of(kQ, attended, a.width),
                 of(kK, kv_width, a.width), of(kV, kv_width, a.width))) {
      return kUnsupported;
    }
    const T *q_norm = static_cast<const T*>(weights[kQNorm]), *k_norm = static_cast<const T*>(weights[kKNorm]);
    if (a.whole_norms && q_norm != nullptr) {
      each(attended + kv_width, [&](int64_t token) {
        T* own = qkv + token * (attended + 2 * kv_width);
        rms_norm<A>(a, own, q_norm, attended, own);
        rms_norm<A>(a, own + attended, k_norm, kv_width, own + attended);
      });
      q_norm = k_norm = nullptr;
    }
    const int64_t table = a.tables == nullptr ? 0 : a.tables[index] * a.tables_stride;
    const T *cos = static_cast<const T*>(a.cos) + table, *sin = static_cast<const T*>(a.sin) + table;
    const auto sequence = [&](int64_t b) {
      char* keys = static_cast<char*>(a.kv) + 2 * index * half + a.slot(b) * a.kv_heads * head_rows;
      return Sequence<A>{a, q_norm, k_norm, cos, sin, a.windows[index], b, a.cache_lens[b],
                         a.ancestors + b * a.ancestors_stride, keys, keys + half,
                         qkv + b * a.nodes * (attended + 2 * kv_width), heads_out + b * a.nodes * attended};
    };
    in_parallel(a.threads, a.batch * a.kv_heads, [&](int64_t i) { sequence(i / a.kv_heads).append(i % a.kv_heads); });
    const int64_t queries = a.heads / a.kv_heads * a.nodes, pieces = blocks(queries, kQueries);
    const auto attend = [&](auto kind) {
      in_parallel(a.threads, a.batch * a.kv_heads * pieces, [&](int64_t i) {
        const int64_t kv_head = i / pieces % a.kv_heads, first = i % pieces * kQueries;
        sequence(i / pieces / a.kv_heads)
            .template attend<decltype(kind)>(kv_head, first, least(kQueries, queries - first));
      });
    };
    if (a.kv_type == kInt8) {
      attend(Int8Weight{});
    } else {
      with_weight<A>(A::kType, attend);
    }
    if (!add(heads_out, attended, weights[kAttentionNorm], of(kO, a.width, attended))) return kUnsupported;
    if (!project(normed_hidden(weights[kPostNorm]), a.width, nullptr, gated, true, 1.0, of(kGate, a.inner, a.width),
                 of(kUp, a.inner, a.width))) {
      return kUnsupported;
    }
    if (!add(gated, a.inner, weights[kMlpNorm], of(kDown, a.width, a.inner))) return kUnsupported;
    for (int64_t i = 0; i < a.states; ++i) {
      const int64_t size = tokens * a.width;
      if (a.after[i] == index + 1) __builtin_memcpy(hidden + (1 + i) * size, hidden, size_t(size) * sizeof(T));
    }
  }
  normed_hidden(a.final_norm);
  __builtin_memcpy(hidden, normed, size_t(tokens * a.width) * sizeof(T));
  return kDone;
}
