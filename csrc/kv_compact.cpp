// kv_compact on the CPU, with a C ABI. Checks every batch row before it moves the first byte.
#include "kv_compact.h"

namespace {

template <typename Unit>
void compact(void* kv, int64_t layers2, int64_t stored, int64_t batch, int64_t kv_heads, int64_t rows,
             int64_t row_bytes, const int32_t* cache_lens, const int32_t* path, int64_t path_len, const int32_t* accept_lens,
             const int32_t* slots) {
  const int64_t row_units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t head_units = rows * row_units;
  for (int64_t layer = 0; layer < layers2; ++layer) {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t head = 0; head < kv_heads; ++head) {
        const int64_t sequence = layer * stored + medusa::slot_of(slots, b);
        Unit* first = static_cast<Unit*>(kv) + (sequence * kv_heads + head) * head_units +
                      static_cast<int64_t>(cache_lens[b]) * row_units;
        const int32_t* nodes = path + b * path_len;
        const medusa::Sources sources = medusa::read_sources(nodes, path_len, 0);
        for (int64_t unit = 0; unit < row_units; ++unit) {
          medusa::move_column(first + unit, row_units, nodes, path_len, sources,
                              static_cast<int64_t>(accept_lens[b]) + 1);
        }
      }
    }
  }
}

}  // namespace

MEDUSA_EXPORT int medusa_abi_version(void) { return medusa::kAbiVersion; }

MEDUSA_EXPORT int medusa_kv_compact_cpu(void* kv, int64_t layers2, int64_t stored, int64_t sequences, int64_t batch,
                                        int64_t kv_heads, int64_t rows, int64_t row_bytes, const int32_t* cache_lens,
                                        const int32_t* path, int64_t path_len, const int32_t* accept_lens,
                                        const int32_t* slots) {
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t* nodes = path + b * path_len;
    const medusa::Sources sources = medusa::read_sources(nodes, path_len, 0);
    const medusa::Status status =
        medusa::check_path(cache_lens[b], nodes, path_len, sources, accept_lens[b], rows);
    if (status != medusa::kOk) return status;
    const int64_t slot = medusa::slot_of(slots, b);
    if (slot < 0 || slot >= sequences) return medusa::kSlotOutside;
  }
  const auto run = [&](auto unit) {
    compact<decltype(unit)>(kv, layers2, stored, batch, kv_heads, rows, row_bytes, cache_lens, path, path_len,
                            accept_lens, slots);
  };
  switch (medusa::widest_unit(kv, row_bytes)) {
    case 16: run(medusa::Unit16{}); break;
    case 8: run(uint64_t{}); break;
    case 4: run(uint32_t{}); break;
    case 2: run(uint16_t{}); break;
    default: run(uint8_t{}); break;
  }
  return medusa::kOk;
}
