// kv_compact on a CUDA device, with a C ABI: one launch for all layers. Lengths and paths stay on the device and the
// grid does not depend on them, so the launch can be captured in a CUDA graph. The caller makes the cache's device
// current. The host cannot read device data: a batch row that fails the check is left unchanged.
#include <cuda_runtime_api.h>

#include "kv_compact.h"

namespace {

constexpr unsigned kThreads = 128;
constexpr int64_t kMaxGridYZ = 65535;

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    compact_kernel(Unit* __restrict__ kv, int64_t stored, int64_t sequences, int64_t kv_heads, int64_t rows,
                   unsigned row_units, unsigned columns,
                   const int32_t* __restrict__ cache_lens, const int32_t* __restrict__ path, int64_t path_len,
                   const int32_t* __restrict__ accept_lens, const int32_t* __restrict__ slots) {
  const int64_t b = blockIdx.y, layer = blockIdx.z;
  const int32_t* row_path = path + b * path_len;
  // Load everything that the check needs before any of it is used: one wait for memory, then one for the rows.
  const medusa::Sources sources = medusa::read_sources(row_path, path_len, 0);
  const int64_t cache_len = cache_lens[b];
  const int64_t count = static_cast<int64_t>(accept_lens[b]) + 1;
  const int64_t slot = medusa::slot_of(slots, b);
  if (medusa::check_path(cache_len, row_path, path_len, sources, count - 1, rows) != medusa::kOk) return;

  const unsigned column = blockIdx.x * kThreads + threadIdx.x;
  if (count == 0 || column >= columns || slot < 0 || slot >= sequences) return;
  const unsigned head = column / row_units, unit = column % row_units;
  Unit* first = kv + (((layer * stored + slot) * kv_heads + head) * rows + cache_len) * row_units + unit;
  medusa::move_column(first, row_units, row_path, path_len, sources, count);
}

template <typename Unit>
cudaError_t launch(void* kv, int64_t layers2, int64_t stored, int64_t sequences, int64_t batch, int64_t kv_heads,
                   int64_t rows, int64_t row_bytes, const int32_t* cache_lens, const int32_t* path, int64_t path_len,
                   const int32_t* accept_lens, const int32_t* slots, cudaStream_t stream) {
  const int64_t row_units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t columns = kv_heads * row_units;
  if (columns > INT32_MAX || batch > kMaxGridYZ || layers2 > kMaxGridYZ) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((columns + kThreads - 1) / kThreads), static_cast<unsigned>(batch),
                  static_cast<unsigned>(layers2));
  compact_kernel<Unit><<<grid, kThreads, 0, stream>>>(static_cast<Unit*>(kv), stored, sequences, kv_heads, rows,
                                                      static_cast<unsigned>(row_units),
                                                      static_cast<unsigned>(columns), cache_lens, path, path_len,
                                                      accept_lens, slots);
  return cudaGetLastError();
}

}  // namespace

MEDUSA_EXPORT int medusa_abi_version(void) { return medusa::kAbiVersion; }

MEDUSA_EXPORT int medusa_cuda_device_count(int* count) { return cudaGetDeviceCount(count); }

MEDUSA_EXPORT const char* medusa_cuda_error_string(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

MEDUSA_EXPORT int medusa_kv_compact_cuda(void* kv, int64_t layers2, int64_t stored, int64_t sequences, int64_t batch,
                                         int64_t kv_heads, int64_t rows, int64_t row_bytes, const int32_t* cache_lens,
                                         const int32_t* path, int64_t path_len, const int32_t* accept_lens,
                                         const int32_t* slots, void* stream) {
  // An empty grid is a launch error, and there is nothing to move.
  if (layers2 == 0 || batch == 0 || kv_heads == 0 || rows == 0 || row_bytes == 0 || path_len == 0) return cudaSuccess;
  const auto run = [&](auto unit) {
    return launch<decltype(unit)>(kv, layers2, stored, sequences, batch, kv_heads, rows, row_bytes, cache_lens, path,
                                  path_len, accept_lens, slots, static_cast<cudaStream_t>(stream));
  };
  switch (medusa::widest_unit(kv, row_bytes)) {
    case 16: return run(medusa::Unit16{});
    case 8: return run(uint64_t{});
    case 4: return run(uint32_t{});
    case 2: return run(uint16_t{});
    default: return run(uint8_t{});
  }
}
