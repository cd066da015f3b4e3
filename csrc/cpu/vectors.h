// Vectors of one instruction set, from GCC's and clang's vector extensions. Included once per instruction set, inside its
// own namespace, so that no two of them share a symbol.

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLanes = kBytes / 4;

typedef float F __attribute__((vector_size(kBytes)));
typedef uint32_t U __attribute__((vector_size(kBytes)));
typedef int32_t I __attribute__((vector_size(kBytes)));
typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));
typedef int16_t Shorts __attribute__((vector_size(kBytes / 2)));
typedef int8_t Quarters __attribute__((vector_size(kBytes / 4)));

#define MEDUSA_INLINE inline __attribute__((always_inline))
#define MEDUSA_INLINED __attribute__((always_inline))  // after the parameters of a lambda
#if defined(__clang__)
#define MEDUSA_UNROLL _Pragma("unroll")
#else
#define MEDUSA_UNROLL _Pragma("GCC unroll 16")
#endif

template <class V>
MEDUSA_INLINE V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
MEDUSA_INLINE void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// The number of each lane.
MEDUSA_INLINE I lane_number() {
  I at;
  for (int lane = 0; lane < kLanes; ++lane) at[lane] = lane;
  return at;
}

MEDUSA_INLINE F all(float value) { return F{} + value; }
MEDUSA_INLINE F larger(F a, F b) { return a > b ? a : b; }
MEDUSA_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
MEDUSA_INLINE int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// A vector that stays in a register if it is used more than once: GCC would rather read it from memory again.
template <int kUses, class V>
MEDUSA_INLINE V kept(V v) {
#if defined(__AVX512F__) && !defined(MEDUSA_PLAIN)
  if (kUses > 1) asm("" : "+v"(v));
#elif defined(__x86_64__) && !defined(__AVX512F__)
  if (kUses > 1) asm("" : "+x"(v));
#endif
  return v;
}

template <int...>
struct Lanes {};
template <int kCount, int... kLane>
struct EveryLane : EveryLane<kCount - 1, kCount - 1, kLane...> {};
template <int... kLane>
struct EveryLane<0, kLane...> {
  using type = Lanes<kLane...>;
};

// Lane i is lane Index::of(i) of a followed by b.
template <class Index, class V, int... kLane>
MEDUSA_INLINE V shuffled(V a, V b, Lanes<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index::of(kLane)...);
#else
  return __builtin_shuffle(a, b, U{static_cast<uint32_t>(Index::of(kLane))...});
#endif
}

// Of each block of kBlock lanes: the lower (or upper) half of a's, then of b's.
template <int kBlock, int kUpper>
struct HalfBlocks {
  static constexpr int of(int lane) {
    return lane / kBlock * kBlock + lane % (kBlock / 2) + kUpper * (kBlock / 2) + (lane % kBlock < kBlock / 2 ? 0 : kLanes);
  }
};

// Lanes of a and b in turn, from lane kFirst of each four.
template <int kFirst>
struct InTurn {
  static constexpr int of(int lane) { return lane / 4 * 4 + kFirst + lane % 4 / 2 + lane % 2 * kLanes; }
};

// Every other lane of a, then of b.
template <int kFirst>
struct Alternate {
  static constexpr int of(int lane) { return 2 * lane + kFirst; }
};

// Every kApart-th lane, at the front.
template <int kApart>
struct Every {
  static constexpr int of(int lane) { return lane * kApart % kLanes; }
};

// Adds the halves of each block of kBlock lanes, which leaves a's sums in its lower half and b's in its upper half.
template <int kBlock, class V>
MEDUSA_INLINE V add_halves(V a, V b) {
  using InOrder = typename EveryLane<kLanes>::type;
  return shuffled<HalfBlocks<kBlock, 0>>(a, b, InOrder{}) + shuffled<HalfBlocks<kBlock, 1>>(a, b, InOrder{});
}

// The sums of kCount vectors, a power of two up to kLanes: of vector i in lane i * (kLanes / kCount). The order of the
// additions does not depend on kCount.
template <int kCount, int kBlock = kLanes, class V>
MEDUSA_INLINE V sums(const V* v) {
  if constexpr (kBlock == 1) {
    return v[0];
  } else if constexpr (kCount == 1) {
    const V next = add_halves<kBlock>(v[0], v[0]);
    return sums<1, kBlock / 2>(&next);
  } else {
    V next[kCount / 2];
    MEDUSA_UNROLL
    for (int i = 0; i < kCount / 2; ++i) next[i] = add_halves<kBlock>(v[i], v[i + kCount / 2]);
    return sums<kCount / 2, kBlock / 2>(next);
  }
}

MEDUSA_INLINE float sum(F v) { return sums<1>(&v)[0]; }

MEDUSA_INLINE float largest(F v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// Rounds to integers, of sizes up to 2^22.
MEDUSA_INLINE F nearest(F v) { return (v + 12582912.0f) - 12582912.0f; }

// Rounds v times factor as PyTorch does: contracted with the addition, the product would not be rounded before, and a tie
// would end elsewhere.
MEDUSA_INLINE F nearest(F v, float factor) {
  F product = v * factor;
  asm("" : "+m"(product));
  return nearest(product);
}

// exp(x) to 2 units in the last place; 0 below -87.3, NaN for NaN.
MEDUSA_INLINE F exponential(F x) {
  const F low = all(-87.3f), high = all(88.3f);
  const F inside = x > high ? high : x;
  const F power = nearest(inside * 1.44269504f);  // of two
  F rest = inside - power * 0.693359375f;
  rest = rest + power * 2.12194440e-4f;
  F value = all(1.9875691500e-4f);  // a polynomial of Cephes (Moshier)
  value = value * rest + 1.3981999507e-3f;
  value = value * rest + 8.3334519073e-3f;
  value = value * rest + 4.1665795894e-2f;
  value = value * rest + 1.6666665459e-1f;
  value = value * rest + 5.0000001201e-1f;
  value = value * rest * rest + rest + 1.0f;
  const F bounded = power < -126.0f ? all(-126.0f) : power;
  const I exponent = __builtin_convertvector(bounded, I) + 127;
  const F scaled = value * reinterpret_cast<F>(exponent << 23);
  return x < low ? all(0.0f) : scaled;
}

MEDUSA_INLINE F silu(F x) { return x / (1.0f + exponential(-x)); }

// x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is GELU with tanh(y) = 2 sigmoid(2 y) - 1.
MEDUSA_INLINE F gelu_tanh(F x) {
  const F inner = (x + x * x * x * 0.044715f) * 1.5957691216f;
  return x / (1.0f + exponential(-inner));
}

// cap tanh(x / cap), to a few units in the last place; NaN for NaN.
MEDUSA_INLINE F capped(F x, float cap) {
  const F y = x / cap, size = y < 0.0f ? -y : y, square = y * y;
  F series = all(2.373515162616968e-3f);  // near zero: the polynomial of `tanh` in tree_attention_kernels.py
  series = series * square - 8.412553928792477e-3f;
  series = series * square + 2.1789107471704483e-2f;
  series = series * square - 5.3961653262376785e-2f;
  series = series * square + 0.13333313167095184f;
  series = series * square - 0.3333333432674408f;
  const F near = series * square * y + y, far = 1.0f - 2.0f / (exponential(size * 2.0f) + 1.0f);
  return (size < 0.6f ? near : y < 0.0f ? -far : far) * cap;
}

// A bfloat16 is the upper half of a float; rounds to nearest even.
MEDUSA_INLINE U bfloat16_bits(F v) {
  const U bits = reinterpret_cast<U>(v);
  const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : U{} + 0x7fc0;
}

// What the activations are kept as in memory; in registers they are always floats.
struct Float32 {
  using T = float;
  static constexpr int64_t kType = medusa::kFloat32;
  static MEDUSA_INLINE F get(const T* from) { return load<F>(from); }
  static MEDUSA_INLINE void put(T* to, F v) { store(to, v); }
  static MEDUSA_INLINE F rounded(F v) { return v; }
};

struct BFloat16 {
  using T = uint16_t;
  static constexpr int64_t kType = medusa::kBFloat16;
  static MEDUSA_INLINE F get(const T* from) {
    return reinterpret_cast<F>(__builtin_convertvector(load<Halves>(from), U) << 16);
  }
  static MEDUSA_INLINE void put(T* to, F v) { store(to, __builtin_convertvector(bfloat16_bits(v), Halves)); }
  static MEDUSA_INLINE F rounded(F v) { return reinterpret_cast<F>(bfloat16_bits(v) << 16); }
};

// The first `count` numbers, then zeros.
template <class A>
MEDUSA_INLINE F get(const typename A::T* from, int64_t count = kLanes) {
  if (count >= kLanes) return A::get(from);
  typename A::T part[kLanes] = {};
  __builtin_memcpy(part, from, static_cast<size_t>(count) * sizeof(part[0]));
  return A::get(part);
}

template <class A>
MEDUSA_INLINE void put(typename A::T* to, F v, int64_t count = kLanes) {
  if (count >= kLanes) return A::put(to, v);
  typename A::T part[kLanes];
  A::put(part, v);
  __builtin_memcpy(to, part, static_cast<size_t>(count) * sizeof(part[0]));
}

// The smallest and the largest of some numbers and 0; NaN if one is NaN or infinite, which 8 bits do not have.
struct Range {
  float low, high;
  float size() const { return high > -low ? high : -low; }
};

template <class A>
MEDUSA_INLINE Range range_of(const typename A::T* from, int64_t count) {
  F low{}, high{}, lost{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const F v = get<A>(from + i, count - i);
    low = larger(-v, low);
    high = larger(v, high);
    lost = lost + v * 0.0f;
  }
  const float nothing = sum(lost);
  return {nothing - largest(low), nothing + largest(high)};
}

// The codes of kLanes numbers in 8 bits, as torchao rounds a token: medusa_kernels/quantised.py, `rounded`. kAnyLow: the
// smallest is not always -128.
template <class A, bool kAnyLow>
struct Rounding {
  const typename A::T* from;
  int64_t columns;
  float scale, factor, low;
  Rounding(const typename A::T* numbers, int64_t count) : from(numbers), columns(count) {
    const Range range = range_of<A>(from, columns);
    const float exact = kAnyLow ? (range.high - range.low) / 255.0f : range.size() / 127.5f;
    const float bound = kAnyLow ? 0x1p-126f : 0x1p-23f;
    scale = exact < bound ? bound : exact;
    factor = 1.0f / scale;
    low = kAnyLow ? __builtin_rintf(range.low / scale) : -128.0f;
  }
  MEDUSA_INLINE F operator()(int64_t i) const {
    const F v = nearest(i < columns ? get<A>(from + i, columns - i) : F{}, factor);
    return v < low ? all(low) : v > low + 255.0f ? all(low + 255.0f) : v;
  }
};
