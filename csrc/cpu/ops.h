// The CPU ops' arguments, as the C ABI takes them, and what each instruction set implements.
//
// Every member has 8 bytes, so that the caller may fill a struct as an array of int64. Tensors are contiguous unless a
// stride is given. Strides of weights are in bytes, all others in elements; 0 where an axis is missing.
#pragma once

#include <cstdint>

namespace medusa {

// What numbers are stored as. Two codes of 4 bits lie in a byte: see medusa_kernels/quantised.py. Those of kDynamicInt8
// and kDynamicInt4 are multiplied with activations that are rounded to 8 bits.
enum Type : int64_t { kFloat32, kBFloat16, kInt8, kFloat8, kDynamicInt8, kInt4, kNf4, kFp4, kDynamicInt4 };

// Of a gate.
enum Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

// A weight [rows, columns] of a projection: a row's elements are adjacent, rows are `stride` bytes apart.
struct Matrix {
  const void* data;
  const float* scale;   // of 8-bit numbers [rows], of 4-bit codes [rows, columns / group], else null
  // Of kInt4 [rows, columns / group], or null: 8. Of kDynamicInt4 the bytes of floats, [rows, 1]: the sums of its rows.
  const uint8_t* zero;
  const void* bias;     // [rows] in the type of the activations, or null
  int64_t rows;
  int64_t stride;
  int64_t type;
  int64_t group;  // columns of a group of 4-bit codes
};

// decode_linear: x [tokens, columns] times 1 to 3 weights.
struct Linear {
  int64_t threads;
  int64_t type;  // of x, residual and out: kFloat32 or kBFloat16
  const void* x;
  int64_t tokens, columns;
  const void* residual;  // [tokens, sum of rows of all weights] or null
  void* out;             // [tokens, sum of rows], gated [tokens, rows]
  int64_t gate, activation;
  double factor;  // of the products with their biases, before the residual; 1 with a gate
  int64_t count;
  Matrix weights[3];
};

// Where a layer's weights are in its row of pointers; all are contiguous. Of a projection, the weight, its bias, its
// scale and its zero points follow each other. Missing ones are null. The same order as in `packed` of
// medusa_kernels/decoder_layers.py.
enum Slot : int64_t { kInputNorm, kPostNorm, kQNorm, kKNorm, kAttentionNorm, kMlpNorm, kQ, kK = kQ + 4, kV = kK + 4,
                      kO = kV + 4, kGate = kO + 4, kUp = kGate + 4, kDown = kUp + 4, kSlots = kDown + 4 };

// decoder_layers: hidden [batch, nodes, width] through all layers and the final norm; appends to the cache.
struct Layers {
  int64_t threads;
  int64_t type;
  const void* hidden;
  void* out;  // [1 + states, batch, nodes, width]
  int64_t batch, nodes, width, heads, kv_heads, head_dim, inner;
  void* kv;  // [layers, 2, stored, kv_heads, rows, row], of which the first `sequences` are read and written
  int64_t stored, sequences, rows;
  const int32_t* slots;  // [batch], which sequence belongs to each batch row; null: sequence b to row b
  const void *cos, *sin;  // [positions, rotated], or with strides one per batch row, and several of these
  int64_t table_rows, table_stride, rotated;
  const int64_t* tables;  // [layers], which of several each layer has, or null
  int64_t tables_stride;
  const int32_t* cache_lens;  // [batch]
  const int32_t* depths;      // [nodes], or with a stride [batch, nodes]
  int64_t depths_stride;
  const int64_t* ancestors;  // [nodes, words], or with a stride [batch, nodes, words]
  int64_t ancestors_stride;
  const void* final_norm;
  int64_t whole_norms;  // whether norms of queries and keys are [heads, head_dim] and [kv_heads, head_dim]
  double eps;
  double norm_offset;  // of all norms, whose products are then rounded once; NaN: none, and they are rounded twice
  double scale, softcap;  // of the scores of attention; a cap of 0 is none
  double factor;          // of what attention and MLP add
  int64_t activation;
  int64_t count;
  const void* const* weights;  // [layers, kSlots]
  const int64_t* kinds;        // [layers, 7, 2], the type and the group of each projection
  const int64_t* windows;      // [layers], sliding windows in positions, 0 for none
  // Of the cache: `type`, or kInt8, where a row ends with its scale, a float (medusa_kernels/cache_rows.py).
  int64_t kv_type;
  const int64_t* after;  // [states], after how many layers hidden states follow the result in `out`
  int64_t states;

  int64_t slot(int64_t b) const { return slots == nullptr ? b : slots[b]; }
};

// heads_topk: the root's term and the residual blocks of each head, its projection, and the k likeliest tokens.
struct Heads {
  int64_t threads;
  int64_t type;
  const void* hidden;  // [batch, width], or with hidden_stride [batch, heads, width]
  int64_t hidden_stride;
  int64_t batch, heads, width, vocabulary, rows, k;  // rows of w2: vocabulary, or more of which token_map names some
  int64_t blocks;
  const void *w1, *b1;  // [heads, blocks, width, width], [heads, blocks, width] or null
  int64_t w1_stride, w1_block_stride, w1_row_stride;
  const void *root, *w_root;  // [batch, root_width], [heads, width, root_width]; or both null
  int64_t root_width, w_root_stride, w_root_row_stride;
  const void* w2;  // with w2_stride [heads, rows, width], else [rows, width]
  int64_t w2_stride, w2_row_stride, w2_type;
  const float* w2_scale;   // as in Matrix, scale_stride apart for each head
  const uint8_t* w2_zero;
  int64_t scale_stride, w2_group;
  const int64_t* token_map;  // [vocabulary] or null
  int64_t gather;
  double divisor, softcap;  // a softcap of 0: none
  double temperature;
  const float* noise;  // [batch, noise_rows, noise_ids] or null
  int64_t noise_rows, noise_ids;
  float* logprobs;  // [batch, heads, k]
  int64_t* tokens;  // [batch, heads, k]
};

// The argmax of x weight^T / divisor for each token; the lowest id on ties. With a cap that of softcap tanh(/ softcap);
// each of these operations rounds to the type of x. With noise that of (these logits) / temperature + noise.
struct Argmax {
  int64_t threads;
  int64_t type;
  const void* x;
  int64_t tokens, columns;
  Matrix weight;
  int64_t* next;
  double divisor, softcap;  // a softcap of 0: none
  double temperature;
  const float* noise;         // [batch, noises, weight.rows] or null
  const int32_t* noise_rows;  // [nodes], or with a stride [batch, nodes]
  int64_t nodes, noises, noise_rows_stride;
};

// gumbel_noise, see medusa_kernels/gumbel_noise.py.
struct Noise {
  int64_t threads;
  int64_t batch, rows, vocabulary;
  const int64_t *seeds, *first;  // [batch]
  float* out;                    // [batch, rows, vocabulary]
};

// tree_accept, see medusa_kernels/tree_accept.py for the shapes.
struct Accept {
  int64_t batch, nodes, places, ends, hidden_bytes, output_columns, log_columns;
  const int64_t *tokens, *next_tokens;
  const void* hidden;
  const int32_t* depths;
  int64_t depths_stride;
  const int64_t* paths;
  int64_t paths_stride;
  const int64_t* eos;  // [ends]
  const int32_t* max_new;
  const int64_t* step;
  int32_t* lengths;
  int64_t* root;
  void* state_hidden;
  int64_t* output;
  int32_t* count;
  uint8_t* finished;
  int32_t* log;
  int32_t *path, *accept_lens, *old_lengths;
  const int32_t* check;  // the bits of floats
  int32_t* report;       // [batch, report_columns], or null
  int64_t report_columns;
};

// What the C ABI returns.
enum Result : int {
  kDone = 0,
  kUnsupported = 1,  // types or sizes that have no form
  kNoMemory = 2,
  kOutside = 3,  // an index, a length or a position outside its tensor; nothing has been written
};

// What one instruction set implements.
struct Ops {
  const char* name;
  Result (*linear)(const Linear&);
  Result (*layers)(const Layers&);
  Result (*heads)(const Heads&);
  Result (*argmax)(const Argmax&);
  Result (*noise)(const Noise&);
};

}  // namespace medusa
