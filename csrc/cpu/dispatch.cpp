// The C ABI of the CPU ops: chooses the instruction set once, when the library is loaded.
#include <cstring>
#include <new>

#include "../kv_compact.h"
#include "ops.h"

namespace medusa {

const Ops* ops_base();
#if defined(MEDUSA_HAS_AVX2)
const Ops* ops_avx2();
#endif
#if defined(MEDUSA_HAS_AVX512)
const Ops* ops_avx512();
#endif
#if defined(MEDUSA_HAS_AVX512_VNNI)
const Ops* ops_avx512_vnni();
#endif
#if defined(MEDUSA_HAS_AVX512_BF16)
const Ops* ops_avx512_bf16();
#endif

namespace {

struct Choice {
  const Ops* (*ops)();
  bool (*runs)();   // whether this processor has the instructions
  bool (*pays)();   // whether they are the fastest that it has
};

bool yes() { return true; }

#if defined(MEDUSA_HAS_AVX2)
[[maybe_unused]] bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

const Choice kChoices[] = {
    {ops_base, yes, yes},
#if defined(MEDUSA_HAS_AVX2)
    {ops_avx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, yes},
#endif
#if defined(MEDUSA_HAS_AVX512)
    {ops_avx512, has_avx512, yes},
#endif
#if defined(MEDUSA_HAS_AVX512_VNNI)
    {ops_avx512_vnni, has_vnni, yes},
#endif
#if defined(MEDUSA_HAS_AVX512_BF16)
    // Intel's processors multiply floats twice as fast as bfloat16 pairs, AMD's the other way round.
    {ops_avx512_bf16, [] { return has_vnni() && __builtin_cpu_supports("avx512bf16"); },
     [] { return __builtin_cpu_is("amd") != 0; }},
#endif
};

const Ops* chosen(const char* name) {
  const Ops* found = nullptr;
  for (const Choice& choice : kChoices) {
    if (choice.runs() && (name == nullptr ? choice.pays() : std::strcmp(choice.ops()->name, name) == 0)) {
      found = choice.ops();
    }
  }
  return found;
}

const Ops* ops = chosen(nullptr);

template <class Arguments>
int run(Result (*op)(const Arguments&), const Arguments* a) {
  try {
    return op(*a);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace
}  // namespace medusa

MEDUSA_EXPORT const char* medusa_cpu_isa(void) { return medusa::ops->name; }

MEDUSA_EXPORT int medusa_cpu_use(const char* name) {
  const medusa::Ops* found = medusa::chosen(name);
  if (found == nullptr) return medusa::kUnsupported;
  medusa::ops = found;
  return medusa::kDone;
}

MEDUSA_EXPORT int medusa_decode_linear_cpu(const medusa::Linear* a) { return medusa::run(medusa::ops->linear, a); }
MEDUSA_EXPORT int medusa_decoder_layers_cpu(const medusa::Layers* a) { return medusa::run(medusa::ops->layers, a); }
MEDUSA_EXPORT int medusa_heads_topk_cpu(const medusa::Heads* a) { return medusa::run(medusa::ops->heads, a); }
MEDUSA_EXPORT int medusa_argmax_cpu(const medusa::Argmax* a) { return medusa::run(medusa::ops->argmax, a); }
MEDUSA_EXPORT int medusa_gumbel_noise_cpu(const medusa::Noise* a) { return medusa::run(medusa::ops->noise, a); }
