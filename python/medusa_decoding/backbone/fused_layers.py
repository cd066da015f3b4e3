"""Run a model's layers without its modules: this project's ops read the model's own weights.

On a GPU a layer is eight or nine launches (`forward`). On a CPU all layers are one call of the C++ library
(`NativeLayers`), for the nodes of a tree; a prefill runs module by module there. The projections of q, k and v are one
product over three weights; gate, up and SiLU(gate) * up are one; and the residual is added before the product is
rounded. So products are rounded once, where the modules round twice: 16-bit results may differ in the last bit, float32
results hardly at all. Where a projection is too narrow to fill the GPU, its columns are divided (`linear_parts`), and
the kernel that follows anyway adds the parts up: the norm, or the rotary embedding. LoRA adapters that are not merged
are two thin products more, the second of which is added before the first one is rounded; with them `forward` runs the
layers on a CPU too, as with rotary embeddings that differ by layer or rotate a part of each head. `obstacle` and
`native_obstacle` return what prevents running this way.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from medusa_decoding.backbone.attention_swap import DecodeContext, TreeAttention
from medusa_decoding.backbone.families import Family
from medusa_decoding.backbone.tensor_parallel import is_sharded
from medusa_decoding.backbone.unsupported import foreign_forward
from medusa_decoding.linears.adapters import base_of, read_adapters
from medusa_decoding.linears.adapters import has_adapters as linears_have_adapters
from medusa_decoding.linears.reading import is_hooked, read
from medusa_kernels import (
    LayerWeights,
    Projection,
    add_rms_norm,
    decode_linear,
    decoder_layers,
    linear_parts,
    packed,
    quantised,
    served_by,
)

NORMS_IN_ROPE = True
"""Whether the norms of heads (Qwen3) are part of `rope_append`, instead of two launches of their own."""

_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def obstacle(decoder: Any) -> str | None:
    """Return what prevents running a decoder (such as `LlamaModel`) fused, or None."""
    dtype = decoder.norm.weight.dtype
    if any(is_sharded(parameter) for parameter in decoder.parameters()):
        return "the model is tensor parallel: its projections exchange with other processes"
    for index, layer in enumerate(decoder.layers):
        if not isinstance(layer.self_attn, TreeAttention):
            return f"layer {index} has a {type(layer.self_attn).__name__} as its attention"
    family: Family = decoder.layers[0].self_attn.family
    if family.unlike is not None:
        return f"{family.prefix}: {family.unlike}"
    if not family.has(decoder.norm, "RMSNorm") or is_hooked(decoder.norm):
        return f"the final norm is not a plain RMSNorm: {type(decoder.norm).__name__}"
    if not decoder.norm.weight.is_contiguous():
        return "the final norm's weight is not contiguous"
    classes: set[type[nn.Module]] = {type(decoder.norm)}
    for index, layer in enumerate(decoder.layers):
        attention, mlp = layer.self_attn, layer.mlp
        if not family.has(layer, "DecoderLayer") or not family.has(mlp, "MLP"):
            return f"layer {index} is a {type(layer).__name__} with a {type(mlp).__name__}"
        groups, activation = _groups(layer), getattr(mlp, family.activation)
        linears = [module for group in groups for module in group]
        if type(activation) not in _SILU:
            return f"layer {index} has the activation {type(activation).__name__}, not SiLU"
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if family.normed else []
        for module in (layer, activation, *layer.children()):
            if is_hooked(module):
                return f"layer {index} has forward hooks on its {type(module).__name__}"
        for norm in norms:
            if not family.has(norm, "RMSNorm"):
                return f"layer {index} has a {type(norm).__module__}.{type(norm).__name__}"
            if is_hooked(norm):
                return f"layer {index} has forward hooks on its {type(norm).__name__}"
            if norm.weight.dtype != dtype or not norm.weight.is_contiguous():
                return f"layer {index} has a norm of another dtype or layout than the final one"
        for group in groups:
            found = [read(base_of(module)) for module in group]
            for one in found:
                if isinstance(one, str):
                    return f"layer {index} has {one}"
                plain = [one.bias, *([one.weight] if one.scale is None else [])]
                if any(t is not None and (t.dtype != dtype or not t.is_contiguous()) for t in plain):
                    return f"layer {index} has a weight or bias of another dtype or layout than the norms'"
            if len({one.form for one in found if not isinstance(one, str)}) > 1:
                return f"layer {index} has projections side by side that are quantised differently"
        classes.update(map(type, (*norms, layer, mlp, activation)))
        classes.update({nn.Linear}.intersection(map(type, map(base_of, linears))))
        classes.update(type(linear) for linear in linears if base_of(linear) is not linear)
    for cls in classes:
        other = foreign_forward(cls)
        if other is not None:
            return f"{cls.__name__} has another forward: {other}"
    return None


def native_obstacle(decoder: Any) -> str | None:
    """Return what prevents running a decoder on a CPU as `NativeLayers`, or None."""
    found = obstacle(decoder)
    return native_limit(decoder) if found is None else found


def native_limit(decoder: Any) -> str | None:
    """Return what prevents running a decoder that has no `obstacle` as `NativeLayers`, or None."""
    apart = apart_limit(decoder)
    if apart is not None:
        return apart
    served = served_by("decoder_layers", "cpu")
    if served.name != "cpp":
        return served.reason
    if decoder.norm.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"the weights are {decoder.norm.weight.dtype}, not float32 or bfloat16"
    family: Family = decoder.layers[0].self_attn.family
    norms = {module.variance_epsilon for module in decoder.modules() if family.has(module, "RMSNorm")}
    scales = {layer.self_attn.scaling for layer in decoder.layers}
    if len(norms) > 1 or len(scales) > 1:
        return f"the layers differ in epsilon ({norms}) or attention scale ({scales})"
    sizes = {
        tuple((len(one.weight), quantised.columns(one.weight)) for one in _projections(layer))
        for layer in decoder.layers
    }
    return "the layers differ in the sizes of their weights" if len(sizes) > 1 else None


def apart_limit(decoder: Any) -> str | None:
    """Return why a decoder that has no `obstacle` runs by an op for each stage on any device, or None."""
    if has_adapters(decoder):
        return "LoRA adapters that are not merged"
    for layer in decoder.layers:
        if layer.self_attn.table is not None:
            return "layers with different rotary embeddings"
        if layer.self_attn.rotary_width < layer.self_attn.head_dim:
            return "rotary embeddings of a part of each head"
    return None


def has_adapters(decoder: Any) -> bool:
    """Return whether a decoder that has no `obstacle` has active adapters that are not merged."""
    return any(linears_have_adapters(group) for layer in decoder.layers for group in _groups(layer))


def refresh_adapters(decoder: Any) -> None:
    """Read the weights of all adapters again."""
    for layer in decoder.layers:
        for group in _groups(layer):
            read_adapters(group, decoder.norm.weight.dtype, anew=True)


def forward(decoder: Any, hidden: torch.Tensor, context: DecodeContext) -> torch.Tensor:
    """Run embedded tokens [B, N, H] through all layers and the final norm, and append to the cache.

    The decoder has no `obstacle`, and swapped attention modules. The hidden states [B, N, H] are those after the norm.
    """
    normed = _normed(hidden, None, decoder.layers[0].input_layernorm)[1]
    # After each layer comes the norm of the next one's input, and at last the final norm.
    norms = [*(layer.input_layernorm for layer in decoder.layers[1:]), decoder.norm]
    for layer, next_norm in zip(decoder.layers, norms, strict=True):
        qkv, out, gate_up, down = _groups(layer)
        attended = _attended(layer.self_attn, qkv, normed, context)
        hidden, normed = _added(hidden, attended, out, layer.post_attention_layernorm)
        hidden, normed = _added(hidden, _linear(normed, gate_up, gate=True), down, next_norm)
    return normed


def _attended(attention: Any, modules: list[Any], x: torch.Tensor, context: DecodeContext) -> torch.Tensor:
    """Return the attention's output before its last projection, from normed hidden states: both [B, N, .]."""
    has_norms = attention.family.normed is not None
    same_eps = has_norms and attention.q_norm.variance_epsilon == attention.k_norm.variance_epsilon
    fold = NORMS_IN_ROPE and same_eps
    parts = 1 if has_norms and not fold else _parts(x, modules)
    qkv = _linear(x, modules, parts=parts)
    q, k, v = attention.split(qkv)
    if has_norms and not fold:
        # Both norms run over all heads, including v, whose result is unused: two launches and no copies.
        heads = qkv.view(*qkv.shape[:2], -1, attention.head_dim)
        q = attention.split(_normed(heads, None, attention.q_norm)[1].view_as(qkv))[0]
        k = attention.split(_normed(heads, None, attention.k_norm)[1].view_as(qkv))[1]
    return attention.attend(q, k, v, context, norm_heads=fold)


def _added(hidden: torch.Tensor, x: torch.Tensor, linear: list[Any], norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden plus a projection of x, and its norm."""
    parts = _parts(x, linear)
    if parts > 1:
        return _normed(hidden, _linear(x, linear, parts=parts), norm)
    return _normed(_linear(x, linear, residual=hidden), None, norm)


def _normed(hidden: torch.Tensor, delta: torch.Tensor | None, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(hidden, delta, norm.weight, norm.variance_epsilon)


def _linear(
    x: torch.Tensor,
    modules: list[nn.Module],
    *,
    gate: bool = False,
    residual: torch.Tensor | None = None,
    parts: int = 1,
) -> torch.Tensor:
    given = [_projection(module) for module in modules]
    weights, biases, scales, zeros, codes = zip(*(_divided(given, 1, 1) if gate else given), strict=True)
    adapters = read_adapters(modules, x.dtype)
    if adapters is not None:
        residual = decode_linear(decode_linear(x, [adapters.down]), [adapters.up], residual=residual)
    return decode_linear(
        x, weights, None if all(bias is None for bias in biases) else biases,
        gate=gate, residual=residual, parts=parts, codes=codes[0],
        scales=None if scales[0] is None else scales, zeros=None if zeros[0] is None else zeros,
    )  # fmt: skip


def _parts(x: torch.Tensor, modules: list[Any]) -> int:
    """Return into how many parts the columns are divided; what adapters add goes with whole products."""
    if read_adapters(modules, x.dtype) is not None:
        return 1
    given = [_projection(module) for module in modules]
    return linear_parts(x, sum(len(one.weight) for one in given), given[0].weight, given[0].scale)


class NativeLayers:
    """The layers of a decoder (such as `LlamaModel`) that has no `obstacle`, as the op `decoder_layers` takes them.

    It holds the model's own tensors: what changes in place is seen, a replaced tensor needs another object.
    """

    def __init__(self, decoder: Any) -> None:
        attentions = [layer.self_attn for layer in decoder.layers]
        self.weights, self.forms = packed([_layer_weights(layer) for layer in decoder.layers], decoder.norm.weight)
        self.windows = [attention.window or 0 for attention in attentions]
        self.eps, self.scale = decoder.norm.variance_epsilon, attentions[0].original.scaling

    def same(self, other: NativeLayers | None) -> bool:
        """Return whether both have the same settings, and weights at the same addresses."""
        if other is None:
            return False
        settings = [(layers.forms, layers.windows, layers.eps, layers.scale) for layers in (self, other)]
        places = [[(weight.data_ptr(), weight.shape) for weight in layers.weights] for layers in (self, other)]
        return settings[0] == settings[1] and places[0] == places[1]

    def __call__(self, hidden: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        """Run embedded nodes [B, N, H] through all layers and the final norm, and append to the cache."""
        assert context.ancestors is not None, "a prefill runs module by module"
        cache = context.cache
        return decoder_layers(
            hidden, self.weights, self.forms, cache.kv, cache.cos, cache.sin, cache.lengths, context.depths,
            context.ancestors, windows=self.windows, eps=self.eps, scale=self.scale, slots=cache.slots,
        )  # fmt: skip


def forms(decoder: Any) -> str:
    """Describe how the weights of a decoder that has no `obstacle` are stored."""
    found = {one.form for layer in decoder.layers for one in _projections(layer)}
    names = {str(codes if dtype == torch.uint8 else dtype).removeprefix("torch.") for dtype, _, _, codes in found}
    stored = "plain modules" if names == {"None"} else f"weights in {', '.join(sorted(names - {'None'}))}"
    return f"{stored}, LoRA" if has_adapters(decoder) else stored


def _projection(linear: Any) -> Projection:
    found = read(base_of(linear))
    if isinstance(found, str):
        raise ValueError(f"linear: expected a module that the ops can read, got {found}")
    return found


def _groups(layer: Any) -> list[list[Any]]:
    """Return a layer's linear modules: of q, k and v, of the attention's output, of gate and up, and down."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = ([getattr(parent, name) for name in names] for parent, names in
                    ((attention, attention.family.qkv), (mlp, attention.family.gate_up)))  # fmt: skip
    return [qkv, [attention.o_proj], gate_up, [mlp.down_proj]]


def _projections(layer: Any) -> list[Projection]:
    """Return what the ops read of q, k, v, o, gate, up and down; joint ones are divided by rows."""
    qkv, out, gate_up, down = ([_projection(module) for module in group] for group in _groups(layer))
    return [*_divided(qkv, layer.self_attn.num_key_value_groups, 1, 1), *out, *_divided(gate_up, 1, 1), *down]


def _divided(given: list[Projection], *shares: int) -> list[Projection]:
    """Return projections side by side; a joint one is divided into views of so many shares of its rows."""
    if len(given) > 1:
        return given
    [(weight, bias, scale, zero, codes)] = given
    sizes = [len(weight) // sum(shares) * share for share in shares]
    tensors = (repeat(None) if tensor is None else tensor.split(sizes) for tensor in (weight, bias, scale, zero))
    return [Projection(w, b, s, z, codes) for w, b, s, z in zip(*tensors, strict=False)]


def _layer_weights(layer: Any) -> LayerWeights:
    attention = layer.self_attn
    norms = (attention.q_norm.weight, attention.k_norm.weight) if attention.family.normed else (None, None)
    return LayerWeights(
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        _projections(layer),
        *norms,
    )
