// tree_accept, see medusa_kernels/tree_accept.py: small integers, the same code for every instruction set.
#include <cstring>

#include "../kv_compact.h"
#include "ops.h"

namespace medusa {
namespace {

bool inside(const Accept& a) {
  if (*a.step < 0 || *a.step >= a.log_columns) return false;
  for (int64_t b = 0; b < a.batch; ++b) {
    if (a.count[b] < 0 || a.max_new[b] > a.output_columns) return false;
    const int64_t* paths = a.paths + b * a.paths_stride;
    for (int64_t i = 0; i < a.nodes * a.places; ++i) {
      if (paths[i] < 0 || paths[i] >= a.nodes) return false;
    }
    for (int64_t node = 0; node < a.nodes; ++node) {
      const int32_t depth = a.depths[b * a.depths_stride + node];
      if (depth < 0 || depth >= a.places) return false;
    }
  }
  return true;
}

void accept_row(const Accept& a, int64_t b) {
  const int64_t* tokens = a.tokens + b * a.nodes;
  const int64_t* next = a.next_tokens + b * a.nodes;
  const int32_t* depths = a.depths + b * a.depths_stride;
  const int64_t* paths = a.paths + b * a.paths_stride;
  // The deepest node whose path is right throughout; of equally deep ones the first.
  int64_t last = 0;
  for (int64_t node = 0; node < a.nodes; ++node) {
    const int64_t* path = paths + node * a.places;
    bool right = true;
    for (int64_t i = 1; i < a.places && right; ++i) right = path[i] == path[i - 1] || tokens[path[i]] == next[path[i - 1]];
    if (right && depths[node] > depths[last]) last = node;
  }
  const int64_t* path = paths + last * a.places;
  const int32_t accepted = depths[last];
  const bool was_finished = a.finished[b] != 0;
  // The tokens after its nodes, up to the first that ends the row, as far as there is room.
  int32_t found = accepted + 1;
  bool ended = false;
  for (int32_t i = 0; i <= accepted && !ended; ++i) {
    for (int64_t e = 0; e < a.ends; ++e) ended |= next[path[i]] == a.eos[e];
    if (ended) found = i + 1;
  }
  const int32_t room = a.max_new[b] - a.count[b];
  ended = (ended && found <= room) || found >= room;
  found = was_finished ? 0 : found < room ? found : room;

  for (int32_t i = 0; i < found; ++i) a.output[b * a.output_columns + a.count[b] + i] = next[path[i]];
  a.log[b * a.log_columns + *a.step] = found;
  for (int64_t i = 0; i < a.places; ++i) a.path[b * a.places + i] = static_cast<int32_t>(path[i]);
  a.accept_lens[b] = was_finished ? -1 : accepted;
  a.old_lengths[b] = a.lengths[b];
  a.lengths[b] += a.accept_lens[b] + 1;
  a.count[b] += found;
  a.finished[b] = was_finished || ended;
  std::memcpy(static_cast<char*>(a.state_hidden) + b * a.hidden_bytes,
              static_cast<const char*>(a.hidden) + (b * a.nodes + last) * a.hidden_bytes,
              static_cast<size_t>(a.hidden_bytes));
  a.root[b] = next[last];
  if (a.report == nullptr) return;
  int32_t* report = a.report + b * a.report_columns;
  report[0] = a.count[b];
  report[1] = a.finished[b];
  report[2] = a.check[b];
  for (int64_t i = 0; i < a.places; ++i) report[3 + i] = static_cast<int32_t>(next[path[i]]);
}

}  // namespace
}  // namespace medusa

MEDUSA_EXPORT int medusa_tree_accept_cpu(const medusa::Accept* a) {
  if (!medusa::inside(*a)) return medusa::kOutside;
  for (int64_t b = 0; b < a->batch; ++b) medusa::accept_row(*a, b);
  return medusa::kDone;
}
