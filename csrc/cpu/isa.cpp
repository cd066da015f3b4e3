// The CPU ops for one instruction set, MEDUSA_ISA: setup.py compiles this file once for each, with its flags.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ops.h"
#include "threads.h"

#define MEDUSA_JOINED(a, b) a##b
#define MEDUSA_NAMED(a, b) MEDUSA_JOINED(a, b)
#define MEDUSA_TEXT(a) #a
#define MEDUSA_QUOTED(a) MEDUSA_TEXT(a)

namespace medusa {
namespace MEDUSA_ISA {
namespace {

#include "vectors.h"
#include "weights.h"
#include "int4.h"
#include "linear.h"
#include "layers.h"
#include "heads.h"
#include "noise.h"

template <class Arguments>
using Run = Result (*)(const Arguments&);

// The form of an op for the type of its activations.
template <class Arguments, Run<Arguments> kFloats, Run<Arguments> kHalves>
Result typed(const Arguments& a) {
  return a.type == kFloat32 ? kFloats(a) : a.type == kBFloat16 ? kHalves(a) : kUnsupported;
}

}  // namespace

const Ops kOps = {
    MEDUSA_QUOTED(MEDUSA_ISA),
    typed<Linear, linear<Float32>, linear<BFloat16>>,
    typed<Layers, layers<Float32>, layers<BFloat16>>,
    typed<Heads, heads<Float32>, heads<BFloat16>>,
    typed<Argmax, argmax<Float32>, argmax<BFloat16>>,
    gumbel_noise,
};

}  // namespace MEDUSA_ISA

const Ops* MEDUSA_NAMED(ops_, MEDUSA_ISA)() { return &MEDUSA_ISA::kOps; }

}  // namespace medusa
