// The code of kv_compact for both compilers: the check of a path, the choice of a unit and the loop that moves rows.
//
// The cache is [layers2, stored, kv_heads, rows, row_bytes], contiguous bytes of unknown element type, of which the
// first `sequences` of the stored ones from `kv` on may be moved. Batch row b is sequence slots[b], or b if slots is
// null; then there are `batch` sequences. After a step, row
// cache_lens[b] + path[b, i] moves to row cache_lens[b] + i for i <= accept_lens[b]. The path ascends strictly from 0
// or more, so path[i] >= i: no source comes before its target. A walk upwards therefore never overwrites a row that it
// has yet to read, although sources and targets overlap: target i < j <= path[j] = source j, for every j > i. Columns
// of bytes are independent, so one thread may own a column and needs no synchronisation.
//
// A walk row by row would wait for memory once per row, because the compiler must assume that a store changes what the
// next load reads. So a column walks in chunks, which load all their rows and then store them: one wait per chunk. The
// result is that of the plain walk: a chunk stores nothing before it has loaded everything, and by the inequality above
// its targets i come before the sources j of all later chunks.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MEDUSA_HOST_DEVICE __host__ __device__ __forceinline__
// Arrays indexed in an unrolled loop stay in registers.
#define MEDUSA_UNROLL _Pragma("unroll")
#else
#define MEDUSA_HOST_DEVICE inline
#define MEDUSA_UNROLL
#endif
#define MEDUSA_EXPORT extern "C" __attribute__((visibility("default")))

namespace medusa {

// Raise it when the arguments or the meaning of an exported function change, also in medusa_kernels/_native.py.
constexpr int kAbiVersion = 7;

enum Status : int {
  kOk = 0,
  kRowOutside = 1,     // a source or target row is outside [0, rows)
  kPathUnordered = 2,  // path is not strictly ascending, or path[i] < i
  kAcceptOutside = 3,  // accept_lens is outside [-1, path_len)
  kSlotOutside = 4,    // a slot is outside [0, sequences)
};

struct alignas(16) Unit16 {
  uint64_t low, high;
};

// The widest power of two, up to 16 bytes, that divides both the address and the distance between rows.
inline int64_t widest_unit(const void* kv, int64_t row_bytes) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(kv) | static_cast<uint64_t>(row_bytes) | 16;
  return static_cast<int64_t>(bits & (~bits + 1));
}

// Returns the sequence that belongs to a batch row.
MEDUSA_HOST_DEVICE int64_t slot_of(const int32_t* slots, int64_t b) { return slots == nullptr ? b : slots[b]; }

// Rows per chunk: enough for a usual path (the root and one node per head), and few enough for registers.
constexpr int kChunk = 8;

// A chunk of a path. The loads do not depend on each other.
struct Sources {
  int32_t node[kChunk];
};

// Reads the chunk that starts at `first`. Entries past the path are -1 and never used.
MEDUSA_HOST_DEVICE Sources read_sources(const int32_t* path, int64_t path_len, int64_t first) {
  Sources sources;
  MEDUSA_UNROLL
  for (int j = 0; j < kChunk; ++j) sources.node[j] = first + j < path_len ? path[first + j] : -1;
  return sources;
}

// Checks one batch row. Entries of the path after the accepted ones are padding: they may be loaded and are not used.
// `sources` is the first chunk of the path, which the caller has read.
MEDUSA_HOST_DEVICE Status check_path(int64_t cache_len, const int32_t* path, int64_t path_len, Sources sources,
                                     int64_t accept_len, int64_t rows) {
  // Without early returns, so that a GPU waits for all of its loads at once.
  const bool accept_inside = accept_len >= -1 && accept_len < path_len;
  const int64_t count = accept_inside ? accept_len + 1 : 0;
  // Integers that ascend strictly from 0 or more also satisfy path[i] >= i.
  int32_t previous = -1;
  bool ascends = true;
  for (int64_t first = 0;;) {
    MEDUSA_UNROLL
    for (int j = 0; j < kChunk; ++j) {
      const bool used = first + j < count;
      ascends &= !used | (sources.node[j] > previous);
      previous = used ? sources.node[j] : previous;
    }
    first += kChunk;
    if (first >= count) break;
    sources = read_sources(path, path_len, first);
  }
  // The last source is the highest row, the first target the lowest.
  const bool inside = cache_len >= 0 && cache_len + previous < rows;
  return !accept_inside ? kAcceptOutside : !ascends ? kPathUnordered : count == 0 || inside ? kOk : kRowOutside;
}

// Walks one column upwards, one chunk at a time. `column` points at row cache_len; rows already in place are neither
// read nor written. `sources` is the first chunk of the path.
template <typename Unit>
MEDUSA_HOST_DEVICE void move_column(Unit* column, int64_t row_units, const int32_t* path, int64_t path_len,
                                    Sources sources, int64_t count) {
  for (int64_t first = 0;;) {
    Unit row[kChunk];
    bool moves[kChunk];
    MEDUSA_UNROLL
    for (int j = 0; j < kChunk; ++j) {
      moves[j] = (first + j < count) & (sources.node[j] != first + j);
      row[j] = moves[j] ? column[sources.node[j] * row_units] : Unit{};
    }
    MEDUSA_UNROLL
    for (int j = 0; j < kChunk; ++j) {
      if (moves[j]) column[(first + j) * row_units] = row[j];
    }
    first += kChunk;
    if (first >= count) return;
    sources = read_sources(path, path_len, first);
  }
}

}  // namespace medusa
