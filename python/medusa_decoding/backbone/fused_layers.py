"""Run a model's layers without its modules: this project's ops read the model's own weights.

On a GPU a layer is eight to ten launches (`forward`). On a CPU all layers are one call of the C++ library
(`NativeLayers`), for the nodes of a tree; a prefill runs module by module there. Which norms, activation and factors a
layer has is read from its family's description. The projections of q, k and v are one product over three weights; gate,
up and the gated activation are one; and the residual, or the norm of what is added to it, takes no launch of its own.
So products are rounded once, where the modules round twice: 16-bit results may differ in the last bit, float32 results
hardly at all. Where a projection is too narrow to fill the GPU, its columns are divided (`linear_parts`), and the
kernel that follows anyway adds the parts up: the norm, or the rotary embedding. LoRA adapters that are not merged are
two thin products more, the second of which is added before the first one is rounded; mixtures of experts are called as
modules. With either `forward` runs the layers on a CPU too. `obstacle` and `native_limit` return what prevents
running this way.
"""

from __future__ import annotations

from collections.abc import Sequence
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

EXPERTS = "SparseMoeBlock"
"""What the names of the classes that mix experts, in the place of an MLP, end in."""
_SILU = (nn.SiLU, type(ACT2FN["silu"]))
_GELU_TANH = type(ACT2FN["gelu_pytorch_tanh"])


def obstacle(decoder: Any) -> str | None:
    """Return what prevents running a decoder (such as `LlamaModel`) fused, or None."""
    dtype = decoder.norm.weight.dtype
    if any(is_sharded(parameter) for parameter in decoder.parameters()):
        return "the model is tensor parallel: its projections exchange with other processes"
    for index, layer in enumerate(decoder.layers):
        if not isinstance(layer.self_attn, TreeAttention):
            return f"layer {index} has a {type(layer.self_attn).__name__} as its attention"
    family: Family = decoder.layers[0].self_attn.family
    if not family.has(decoder.norm, "RMSNorm") or is_hooked(decoder.norm):
        return f"the final norm is not a plain RMSNorm: {type(decoder.norm).__name__}"
    if not decoder.norm.weight.is_contiguous():
        return "the final norm's weight is not contiguous"
    eps = getattr(decoder.norm, family.epsilon)
    classes: set[type[nn.Module]] = {type(decoder.norm)}
    for index, layer in enumerate(decoder.layers):
        attention, mlp = layer.self_attn, layer.mlp
        experts = family.has(mlp, EXPERTS)
        if not family.has(layer, "DecoderLayer") or not (experts or family.has(mlp, "MLP")):
            return f"layer {index} is a {type(layer).__name__} with a {type(mlp).__name__}"
        groups, called = _groups(layer), [] if experts else [mlp, getattr(mlp, family.activation)]
        linears = [module for group in groups for module in group]
        if not experts and _settings(layer)["activation"] is None:
            return f"layer {index} has the activation {type(called[1]).__name__}, not SiLU or GELU by tanh"
        norms = [norm for norm in family.norms_of(layer) if norm is not None]
        norms += [attention.q_norm, attention.k_norm] if family.normed else []
        for module in (layer, *called, *layer.children()):
            if is_hooked(module):
                return f"layer {index} has forward hooks on its {type(module).__name__}"
        for norm in norms:
            if not family.has(norm, "RMSNorm"):
                return f"layer {index} has a {type(norm).__module__}.{type(norm).__name__}"
            if is_hooked(norm):
                return f"layer {index} has forward hooks on its {type(norm).__name__}"
            if norm.weight.dtype != dtype or not norm.weight.is_contiguous():
                return f"layer {index} has a norm of another dtype or layout than the final one"
            if getattr(norm, family.epsilon) != eps:
                return f"layer {index} has a norm with the epsilon {getattr(norm, family.epsilon)}, the final one {eps}"
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
        classes.update(map(type, (*norms, layer, *called)))
        classes.update({nn.Linear}.intersection(map(type, map(base_of, linears))))
        classes.update(type(linear) for linear in linears if base_of(linear) is not linear)
    for cls in classes:
        other = foreign_forward(cls)
        if other is not None:
            return f"{cls.__name__} has another forward: {other}"
    return None


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
    if any(_settings(layer) != _settings(decoder.layers[0]) for layer in decoder.layers):
        return "the layers differ in the scale or cap of scores, the activation, or the factor of what they add"
    sizes = {
        tuple((len(one.weight), quantised.columns(one.weight)) for one in _projections(layer))
        for layer in decoder.layers
    }
    return "the layers differ in the sizes of their weights" if len(sizes) > 1 else None


def apart_limit(decoder: Any) -> str | None:
    """Return why a decoder that has no `obstacle` runs by an op for each stage on any device, or None."""
    if has_adapters(decoder):
        return "LoRA adapters that are not merged"
    return "mixtures of experts" if has_experts(decoder) else None


def has_experts(decoder: Any) -> bool:
    """Return whether a decoder with swapped attention modules has a layer with a mixture of experts."""
    return any(layer.self_attn.family.has(layer.mlp, EXPERTS) for layer in decoder.layers)


def has_adapters(decoder: Any) -> bool:
    """Return whether a decoder that has no `obstacle` has active adapters that are not merged."""
    return any(linears_have_adapters(group) for layer in decoder.layers for group in _groups(layer))


def refresh_adapters(decoder: Any) -> None:
    """Read the weights of all adapters again."""
    for layer in decoder.layers:
        for group in _groups(layer):
            read_adapters(group, decoder.norm.weight.dtype, anew=True)


def forward(
    decoder: Any, hidden: torch.Tensor, context: DecodeContext, feature_layers: Sequence[int] = ()
) -> torch.Tensor:
    """Run embedded tokens [B, N, H] through all layers and the final norm, and append to the cache.

    The decoder has no `obstacle`, and swapped attention modules. The hidden states [B, N, H] are those after the norm,
    or with `context.hold_last` the last layer's input. Those before layer i are added to `context.features` for each i
    of `feature_layers`.
    """
    family: Family = decoder.layers[0].self_attn.family
    norms = [family.norms_of(layer) for layer in decoder.layers]
    _, normed = _normed(hidden, None, norms[0][0], family)
    # After each layer comes the norm of the next one's input, and at last the final norm.
    for index, (layer, own, following) in enumerate(
        zip(decoder.layers, norms, [*norms[1:], [decoder.norm]], strict=True)
    ):
        _, after_attention, before_mlp, after_mlp = own
        if index in feature_layers:
            context.features.append(hidden)
        if context.hold_last and layer is decoder.layers[-1]:
            layer.self_attn.append(normed, context)
            return hidden
        settings = _settings(layer)
        factor = settings["factor"]
        qkv, out, *mlp = _groups(layer)
        attended = _attended(layer.self_attn, qkv, normed, context)
        hidden, normed = _added(hidden, attended, out, after_attention, before_mlp, family, factor)
        if mlp:
            gated = _linear(normed, mlp[0], gate=True, activation=settings["activation"])
            hidden, normed = _added(hidden, gated, mlp[1], after_mlp, following[0], family, factor)
        else:
            hidden, normed = _normed(hidden, layer.mlp(normed), following[0], family, after_mlp)
    return normed


def _attended(attention: Any, modules: list[Any], x: torch.Tensor, context: DecodeContext) -> torch.Tensor:
    """Return the attention's output before its last projection, from normed hidden states: both [B, N, .]."""
    family: Family = attention.family
    qkv = _linear(x, modules, parts=1 if family.normed == "projections" else _parts(x, modules))
    q, k, v = attention.split(qkv)
    if family.normed == "projections":
        q, k = (
            _normed(part.flatten(-2), None, norm, family)[1].view_as(part)
            for part, norm in ((q, attention.q_norm), (k, attention.k_norm))
        )
    return attention.attend(q, k, v, context, norm_heads=family.normed == "heads")


def _added(
    hidden: torch.Tensor, x: torch.Tensor, linear: list[Any], after: Any, norm: Any, family: Family, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden plus a projection of x, times the factor and with the norm after it, and the norm of the sum."""
    parts = _parts(x, linear)
    if parts > 1 or after is not None:
        return _normed(hidden, _linear(x, linear, parts=parts, factor=factor), norm, family, after)
    return _normed(_linear(x, linear, residual=hidden, factor=factor), None, norm, family)


def _normed(
    hidden: torch.Tensor, delta: torch.Tensor | None, norm: Any, family: Family, after: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden plus delta, which `after` norms, and the norm of the sum; the sum itself without a norm."""
    if delta is None and norm is None:
        return hidden, hidden
    weight, delta_norm = (None if module is None else module.weight for module in (norm, after))
    eps = getattr(after if norm is None else norm, family.epsilon)
    return add_rms_norm(hidden, delta, weight, eps, delta_norm=delta_norm, norm_offset=family.norm_offset)


def _linear(
    x: torch.Tensor,
    modules: list[nn.Module],
    *,
    gate: bool = False,
    residual: torch.Tensor | None = None,
    parts: int = 1,
    activation: str = "silu",
    factor: float = 1.0,
) -> torch.Tensor:
    given = [_projection(module) for module in modules]
    weights, biases, scales, zeros, codes = zip(*(_divided(given, 1, 1) if gate else given), strict=True)
    adapters = read_adapters(modules, x.dtype)
    if adapters is not None:
        residual = decode_linear(decode_linear(x, [adapters.down]), [adapters.up], residual=residual, factor=factor)
    return decode_linear(
        x, weights, None if all(bias is None for bias in biases) else biases,
        gate=gate, residual=residual, parts=parts, codes=codes[0], activation=activation, factor=factor,
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

    def __init__(self, decoder: Any, feature_layers: Sequence[int] = ()) -> None:
        attentions = [layer.self_attn for layer in decoder.layers]
        self.weights, self.forms = packed([_layer_weights(layer) for layer in decoder.layers], decoder.norm.weight)
        family: Family = attentions[0].family
        self.options: dict[str, Any] = {
            "windows": [attention.window or 0 for attention in attentions],
            "eps": getattr(decoder.norm, family.epsilon),
            "norm_offset": family.norm_offset,
            "tables": None if attentions[0].table is None else [attention.table for attention in attentions],
            "states": list(feature_layers) or None,
            **_settings(decoder.layers[0]),
        }

    def same(self, other: NativeLayers | None) -> bool:
        """Return whether both have the same settings, and weights at the same addresses."""
        if other is None:
            return False
        settings = [(layers.forms, layers.options) for layers in (self, other)]
        places = [[(weight.data_ptr(), weight.shape) for weight in layers.weights] for layers in (self, other)]
        return settings[0] == settings[1] and places[0] == places[1]

    def __call__(self, hidden: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        """Run embedded nodes [B, N, H] through all layers and the final norm, and append to the cache."""
        assert context.ancestors is not None, "a prefill runs module by module"
        cache = context.cache
        found = decoder_layers(
            hidden, self.weights, self.forms, cache.kv, cache.cos, cache.sin, cache.lengths, context.depths,
            context.ancestors, slots=cache.slots, **self.options,
        )  # fmt: skip
        if self.options["states"] is None:
            return found
        context.features.extend(found[1:].unbind())
        return found[0]


def forms(decoder: Any) -> str:
    """Describe how the weights of a decoder that has no `obstacle` are stored."""
    found = {one.form for layer in decoder.layers for one in _projections(layer)}
    names = set()
    for dtype, _, _, codes in found:
        rounds = codes == "dynamic"
        of_codes = "int4" if rounds else codes
        name = str(of_codes if dtype == torch.uint8 else dtype).removeprefix("torch.")
        names.add(f"{name} (dynamic)" if rounds else name)
    stored = "plain modules" if names == {"None"} else f"weights in {', '.join(sorted(names - {'None'}))}"
    return f"{stored}, LoRA" if has_adapters(decoder) else stored


def _projection(linear: Any) -> Projection:
    found = read(base_of(linear))
    if isinstance(found, str):
        raise ValueError(f"linear: expected a module that the ops can read, got {found}")
    return found


def _settings(layer: Any) -> dict[str, Any]:
    """Return what `decoder_layers` takes once for all layers; "activation" is None if the ops have no such one."""
    attention, family = layer.self_attn, layer.self_attn.family
    module = getattr(layer.mlp, family.activation, None)
    by_tanh = type(module) is _GELU_TANH or (type(module) is nn.GELU and module.approximate == "tanh")
    activation = "silu" if type(module) in _SILU else "gelu_tanh" if by_tanh else None
    factor = 1.0 if family.factor is None else getattr(layer, family.factor)
    return {"scale": attention.scaling, "softcap": attention.softcap, "activation": activation, "factor": factor}


def _groups(layer: Any) -> list[list[Any]]:
    """Return a layer's linear modules: of q, k and v, the attention's output; and of an MLP gate and up, and down."""
    attention, mlp = layer.self_attn, layer.mlp
    family: Family = attention.family
    groups = [[getattr(attention, name) for name in family.qkv], [attention.o_proj]]
    if not family.has(mlp, EXPERTS):
        groups += [[getattr(mlp, name) for name in family.gate_up], [mlp.down_proj]]
    return groups


def _projections(layer: Any) -> list[Projection]:
    """Return what the ops read of q, k, v, o, gate, up and down; joint ones are divided by rows."""
    qkv, out, *mlp = ([_projection(module) for module in group] for group in _groups(layer))
    found = [*_divided(qkv, layer.self_attn.num_key_value_groups, 1, 1), *out]
    return [*found, *_divided(mlp[0], 1, 1), *mlp[1]] if mlp else found


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
    of_heads = (attention.q_norm, attention.k_norm) if attention.family.normed else (None, None)
    before, after, before_mlp, after_mlp, q_norm, k_norm = (
        None if norm is None else norm.weight for norm in (*attention.family.norms_of(layer), *of_heads)
    )
    return LayerWeights(before, before_mlp, _projections(layer), q_norm, k_norm, after, after_mlp)
