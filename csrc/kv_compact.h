// What both compilers share of kv_compact: the check of a path, the choice of a unit and the row-moving loop itself.
//
// The cache is [layers2, batch, kv_heads, rows, row_bytes], contiguous bytes; the element type is not known here. After
// a step, row cache_lens[b] + path[b, i] moves to row cache_lens[b] + i for i <= accept_lens[b]. Sources ascend and
// never lie before their target, so a walk upwards never overwrites a row that is still to be read, even though source
// and target ranges overlap: target i < source j for every j > i. Columns of bytes do not touch each other, hence one
// thread may own a column and needs no synchronisation.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MEDUSA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MEDUSA_HOST_DEVICE inline
#endif
#define MEDUSA_EXPORT extern "C" __attribute__((visibility("default")))

namespace medusa {

// Raised whenever an exported function's arguments or meaning change; medusa_kernels/_native.py holds the same number.
constexpr int kAbiVersion = 1;

enum Status : int {
  kOk = 0,
  kRowOutside = 1,     // a source or target row outside [0, rows)
  kPathUnordered = 2,  // path not strictly ascending, or path[i] < i
  kAcceptOutside = 3,  // accept_lens outside [-1, path_len)
};

struct alignas(16) Unit16 {
  uint64_t low, high;
};

// The widest power of two, up to 16 bytes, that divides both the address and the distance between rows.
inline int64_t widest_unit(const void* kv, int64_t row_bytes) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(kv) | static_cast<uint64_t>(row_bytes) | 16;
  return static_cast<int64_t>(bits & (~bits + 1));
}

// Checks one batch row. Entries of the path beyond the accepted ones are padding and are not read.
MEDUSA_HOST_DEVICE Status check_path(int64_t cache_len, const int32_t* path, int64_t path_len, int64_t accept_len,
                                     int64_t rows) {
  if (accept_len < -1 || accept_len >= path_len) return kAcceptOutside;
  if (accept_len == -1) return kOk;
  // Integers that ascend strictly from 0 or more also satisfy path[i] >= i.
  int64_t previous = -1;
  for (int64_t i = 0; i <= accept_len; ++i) {
    if (path[i] <= previous) return kPathUnordered;
    previous = path[i];
  }
  // The last source is the highest row, the first target the lowest.
  return cache_len < 0 || cache_len + previous >= rows ? kRowOutside : kOk;
}

// Walks one column upwards. `column` points at row cache_len; rows that are already in place are not touched.
template <typename Unit>
MEDUSA_HOST_DEVICE void move_column(Unit* column, int64_t row_units, const int32_t* path, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t source = path[i];
    if (source != i) column[i * row_units] = column[source * row_units];
  }
}

}  // namespace medusa
