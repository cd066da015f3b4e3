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

constexpr int64_t kQueries = 32;    // query rows that pass over the keys together
constexpr int64_t kKeys = 64;       // positions whose scores are added up together
constexpr int64_t kMostNodes = 256;
constexpr int64_t kTail = kKeys + kMostNodes;  // the most keys after the last whole kKeys of the prefix
constexpr int64_t kMaxHead = 256;
constexpr float kHidden = -__builtin_inff();

// out[query, :] += sum over keys of scores[query, key] * values[key, :], for kRows queries and kWide vectors of a head.
template <class A, int kRows, int kWide>
inline void weigh(const float* scores, int64_t apart, const char* values, int64_t keys, int64_t stride, int64_t count,
                  float* out) {
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
      for (int v = 0; v < kWide; ++v) acc[r * kWide + v] = value[v] * scores[r * apart + key] + acc[r * kWide + v];
    }
  }
  MEDUSA_UNROLL
  for (int i = 0; i < kRows * kWide; ++i) store(out + i / kWide * kMaxHead + i % kWide * kLanes, acc[i]);
}

template <class A, int kRows>
inline void weigh_rows(const float* scores, int64_t apart, const char* values, int64_t keys, int64_t stride,
                       int64_t head_dim, float* out) {
  constexpr int64_t kSize = sizeof(typename A::T);
  constexpr int kWide = kRows * 4 <= kManyRows * kManyTokens ? 4 : 2;  // more sums than that have no registers
  int64_t first = 0;
  for (; first + kWide * kLanes <= head_dim; first += kWide * kLanes) {
    weigh<A, kRows, kWide>(scores, apart, values + first * kSize, keys, stride, kWide * kLanes, out + first);
  }
  for (; first < head_dim; first += kLanes) {
    weigh<A, kRows, 1>(scores, apart, values + first * kSize, keys, stride, head_dim - first, out + first);
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

  // Word w of a node's ancestors, without bits beyond the last node.
  uint64_t seen(int64_t node, int64_t w) const {
    const auto word = static_cast<uint64_t>(ancestors[node * words() + w]);
    return w * 64 + 64 <= a.nodes ? word : word & ((uint64_t(1) << a.nodes % 64) - 1);
  }
  int64_t depth(int64_t node) const {
    int64_t count = -1;
    for (int64_t w = 0; w < words(); ++w) count += __builtin_popcountll(seen(node, w));
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
  // (tree_attention). Keys pass in blocks of kKeys positions, with the running maximum and sum of each row (Dao et al.
  // 2022). A block is added up in the order of positions, wherever in the cache a node's ancestors lie: a node's result
  // has the bits that it has in a text which is decoded token by token.
  template <class W>
  void attend(int64_t kv_head, int64_t first, int64_t count) const {
    using V = Kept<W, A>;
    using T = typename V::Type;
    const int64_t group = a.heads / a.kv_heads, dim = a.head_dim, all_heads = a.heads + 2 * a.kv_heads;
    const int64_t vectors = prepared_vectors<W>(dim), row_size = cached_bytes<A>(a);
    const int64_t start = window == 0 || prefix + 1 < window ? 0 : (prefix + 1 - window) / kKeys * kKeys;
    const int64_t whole = prefix / kKeys * kKeys, before = prefix - whole;
    const float scale = float(a.scale), cap = float(a.softcap), last_scale = cap > 0.0f ? 1.0f : scale;
    float key_scales[kTail] = {}, value_scales[kTail] = {};
    typename W::X queries[kQueries * 2 * kMaxHead / kLanes];
    alignas(kBytes) float scores[kQueries * kTail], weights[kQueries * kTail], sums[kQueries * kMaxHead];
    float top[kQueries], total[kQueries];
    int64_t deepest = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t node = (first + i) / group, head = kv_head * group + (first + i) % group;
      prepare<W, A>(rows + (node * all_heads + head) * dim, 1, dim, queries + i * vectors);
      top[i] = -__FLT_MAX__;
      total[i] = 0.0f;
      if (depth(node) > deepest) deepest = depth(node);
    }
    __builtin_memset(sums, 0, sizeof(float) * size_t(count * kMaxHead));
    // The scores of all queries with `now` keys from row `key` on, before their last factor.
    const auto score = [&](int64_t key, int64_t now, int64_t apart) {
      const char* block = keys + (kv_head * a.rows + key) * row_size;
      product<W>(block, row_size, nullptr, 0, now, queries, count, dim, scores, apart);
      for (int64_t k = 0; V::kScaled && k < now; ++k) {
        __builtin_memcpy(key_scales + k, block + k * row_size + dim, sizeof(float));
        __builtin_memcpy(value_scales + k, values + (kv_head * a.rows + key + k) * row_size + dim, sizeof(float));
      }
      for (int64_t i = 0; i < count; ++i) {
        float* row = scores + i * apart;
        for (int64_t k = 0; V::kScaled && k < now; k += kLanes) {
          store(row + k, load<F>(row + k) * load<F>(key_scales + k));
        }
        for (int64_t k = 0; cap > 0.0f && k < now; k += kLanes) store(row + k, capped(load<F>(row + k) * scale, cap));
      }
    };
    // Turns the scores of a block, in the order of positions, into weights over the maximum so far.
    const auto soften = [&](int64_t i, float* block) {
      F best = all(top[i]), added{};
      for (int64_t k = 0; k < kKeys; k += kLanes) {
        const F scaled = load<F>(block + k) * last_scale;
        store(block + k, scaled);
        best = larger(scaled, best);
      }
      const float now = largest(best);
      for (int64_t k = 0; k < kKeys; k += kLanes) {
        const F p = exponential(load<F>(block + k) - now);
        store(block + k, p);
        added = added + p;
      }
      const float kept = exponential(all(top[i] - now))[0];
      total[i] = total[i] * kept + sum(added);
      top[i] = now;
      for (int64_t d = 0; kept != 1.0f && d < dim; d += kLanes) {
        float* at = sums + i * kMaxHead + d;
        store(at, load<F>(at) * kept);
      }
    };
    // Adds the values of keys [from, to) after row `key`, with their weights in rows of `own`.
    const auto add = [&](int64_t key, int64_t from, int64_t to, float* own, int64_t apart) {
      for (int64_t i = 0; V::kScaled && i < count; ++i) {
        for (int64_t k = from; k < to; ++k) own[i * apart + k] *= value_scales[k];
      }
      const char* value = values + (kv_head * a.rows + key + from) * row_size;
      int64_t i = 0;
      for (; i + 4 <= count; i += 4) {
        weigh_rows<T, 4>(own + i * apart + from, apart, value, to - from, row_size, dim, sums + i * kMaxHead);
      }
      for (; i < count; ++i) {
        weigh_rows<T, 1>(own + i * apart + from, apart, value, to - from, row_size, dim, sums + i * kMaxHead);
      }
    };
    for (int64_t key = start; key < whole; key += kKeys) {
      score(key, kKeys, kKeys);
      for (int64_t i = 0; i < count; ++i) {
        float* row = scores + i * kKeys;
        for (int64_t k = least(kKeys, oldest((first + i) / group) - key); k > 0; --k) row[k - 1] = kHidden;
        soften(i, row);
      }
      add(key, 0, kKeys, scores, kKeys);
    }
    const int64_t apart = before + a.nodes > kKeys ? kTail : kKeys;
    score(whole, before + a.nodes, apart);
    for (int64_t piece = 0; piece * kKeys <= before + deepest; ++piece) {
      // Earlier positions are in the first block alone. No ancestor in a later one lies before `from`.
      const int64_t earlier = piece == 0 ? before : 0, from = piece * kKeys;
      int64_t to = from + earlier;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t node = (first + i) / group, seen = oldest(node);
        const float* row = scores + i * apart;
        float* own = weights + i * apart;
        alignas(kBytes) float block[kKeys];
        int64_t places[kKeys], held = earlier;
        for (int64_t k = 0; k < kKeys; k += kLanes) store(block + k, all(kHidden));
        __builtin_memcpy(block, row, sizeof(float) * size_t(earlier));
        for (int64_t k = least(earlier, seen - whole); k > 0; --k) block[k - 1] = kHidden;
        each_ancestor(node, [&](int64_t other, int64_t at) {
          if ((before + at) / kKeys != piece) return;
          if (prefix + at >= seen) block[held] = row[before + other];
          places[held++] = before + other;
        });
        soften(i, block);
        __builtin_memset(own + from, 0, sizeof(float) * size_t(before + a.nodes - from));
        __builtin_memcpy(own, block, sizeof(float) * size_t(earlier));
        for (int64_t k = earlier; k < held; ++k) own[places[k]] = block[k];
        if (held > earlier && places[held - 1] >= to) to = places[held - 1] + 1;
      }
      add(whole, from, to, weights, apart);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t node = (first + i) / group, head = kv_head * group + (first + i) % group;
      for (int64_t d = 0; d < dim; d += kLanes) {
        put<A>(out + (node * a.heads + head) * dim + d, load<F>(sums + i * kMaxHead + d) / total[i], dim - d);
      }
    }
  }

  // The first position that a node's window lets it see, 0 or less without a window.
  int64_t oldest(int64_t node) const { return window == 0 ? 0 : prefix + depth(node) + 1 - window; }

  // Calls run(ancestor, its depth) for a node's ancestors and itself, from the root on.
  template <class Run>
  void each_ancestor(int64_t node, const Run& run) const {
    int64_t at = 0;
    for (int64_t w = 0; w < words(); ++w) {
      for (uint64_t left = seen(node, w); left != 0; left &= left - 1) {
        run(w * 64 + __builtin_ctzll(left), at++);
      }
    }
  }
};

// decoder_layers, see medusa_kernels/decoder_layers.py.
template <class A>
Result layers(const Layers& a) {
  using T = typename A::T;
  if (a.head_dim > kMaxHead || a.nodes > kMostNodes || a.rotated > a.head_dim || a.rotated % 2 != 0) return kUnsupported;
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
