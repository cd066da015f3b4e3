"""All decoder layers of a Llama-family model and its final norm, over the nodes of a tree and a KV cache.

On a CPU it is one call of the C++ library, so that nothing is dispatched between a step's small operations. Elsewhere
it is the other ops in turn. It does not know modules, nor where the weights come from.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from medusa_kernels import _checks, _cpu, cache_rows, quantised, reference
from medusa_kernels._registry import Implementation, register
from medusa_kernels.decode_linear import ACTIVATIONS, MOST_ROWS_CPU


class Projection(NamedTuple):
    """A linear layer's weight `[N, K]`, its bias `[N]` or None, and how it is stored: see `medusa_kernels.quantised`.

    Without a scale the weight is in the dtype of the activations. The scale is fp32.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    zero: Tensor | None = None
    codes: str = "int4"

    @property
    def form(self) -> tuple[object, ...]:
        """What must be the same for weights that one product reads."""
        dtype = None if self.scale is None else self.weight.dtype
        return dtype, quantised.group_size(self.weight, self.scale), self.zero is None, self.codes


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weights of one decoder layer, each contiguous.

    Attributes:
        input_norm: `[H]`, of the norm before attention, or None.
        post_norm: `[H]`, of the norm before the MLP, or None.
        projections: q `[Hq D, H]`, k and v `[Hkv D, H]`, o `[H, Hq D]`, gate and up `[I, H]`, down `[H, I]`. q, k and v
            have the same form, and gate and up.
        q_norm: `[D]`, of the norm of each query head, or `[Hq D]`, of all together, or None.
        k_norm: `[D]`, of the norm of each key head, or `[Hkv D]`, of all together, or None; with q_norm, of its kind.
        attention_norm: `[H]`, of the norm of what attention adds, or None.
        mlp_norm: `[H]`, of the norm of what the MLP adds, or None.
    """

    input_norm: Tensor | None
    post_norm: Tensor | None
    projections: Sequence[Projection]
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        """The norms in the order of the enum Slot of csrc/cpu/ops.h."""
        return self.input_norm, self.post_norm, self.q_norm, self.k_norm, self.attention_norm, self.mlp_norm


def packed(layers: Sequence[LayerWeights], final_norm: Tensor) -> tuple[list[Tensor], list[int]]:
    """Return the arguments `weights` and `forms` of `decoder_layers`: the tensors that exist, and which these are.

    Raises:
        ValueError: a tensor is not contiguous, or its shape, dtype or device does not fit the others'; all layers have
            the same sizes.
    """
    weights: list[Tensor] = []
    forms: list[int] = []
    for index, layer in enumerate(layers):
        _check_sizes(index, layer, layers[0], final_norm)
        slots = list(layer.norms)
        form = 0
        for place, projection in enumerate(layer.projections):
            *tensors, codes = projection
            slots += tensors
            form |= quantised.KINDS.index(codes) << reference.SLOTS + reference.KIND_BITS * place
        forms.append(form + sum(1 << slot for slot, tensor in enumerate(slots) if tensor is not None))
        weights += [tensor for tensor in slots if tensor is not None]
    _checks.contiguous("final_norm", final_norm)
    return [*weights, final_norm], forms


def _check_sizes(index: int, layer: LayerWeights, first: LayerWeights, final_norm: Tensor) -> None:
    (width,), heads = final_norm.shape, first.projections[0].weight.shape[0]
    kv_width, inner = first.projections[1].weight.shape[0], first.projections[4].weight.shape[0]
    rows = (heads, kv_width, kv_width, width, inner, inner, width)
    columns = (width, width, width, heads, width, width, inner)
    sizes: list[tuple[int | str, ...]] = [(width,), (width,), ("D",), ("D",), (width,), (width,)]
    for tensor, size in zip(layer.norms, sizes, strict=True):
        if tensor is not None:
            _checks.typed(f"layers[{index}]", tensor, size, final_norm.dtype, "final_norm", final_norm)
            _checks.contiguous(f"layers[{index}]", tensor)
    pair = (layer.q_norm is None) == (layer.k_norm is None)
    _checks.require(pair, f"layers[{index}]", "both of q_norm and k_norm, or neither", "one")
    for place, (projection, n, k) in enumerate(zip(layer.projections, rows, columns, strict=True)):
        name, like = f"layers[{index}].projections[{place}]", final_norm
        weight, bias, scale, zero, codes = projection
        names = (name, f"{name}.scale", f"{name}.zero")
        quantised.check(names, weight, scale, zero, codes, (n, k), "final_norm", like)
        _checks.contiguous(name, weight)
        if scale is not None:
            _checks.dtype(f"{name}.scale", scale, torch.float32)
        if bias is not None:
            _checks.match(f"{name}.bias", bias, (n,), "final_norm", like)
            _checks.contiguous(f"{name}.bias", bias)
        other = layer.projections[0 if place < 3 else 4 if place in (4, 5) else place].form
        _checks.require(projection.form == other, name, f"the form {other} of the weights beside it", projection.form)


def decoder_layers(
    hidden: Tensor,
    weights: Sequence[Tensor],
    forms: Sequence[int],
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache_lens: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    *,
    windows: Sequence[int],
    eps: float,
    scale: float,
    slots: Tensor | None = None,
    norm_offset: float | None = None,
    activation: str = "silu",
    factor: float = 1.0,
    softcap: float | None = None,
    tables: Sequence[int] | None = None,
    states: Sequence[int] | None = None,
) -> Tensor:
    """Run embedded nodes through all layers and the final norm, and append their keys and values to the cache.

    A layer is `add_rms_norm`, `decode_linear` of q, k and v, the norms of their heads, `rope_append`, `tree_attention`,
    `decode_linear` with the residual, `add_rms_norm`, the gated `decode_linear` of the MLP and that with the residual;
    each result is rounded as that op rounds it. Norms that a layer lacks are left out. With a norm of what attention
    or MLP adds, `decode_linear` has no residual, and `add_rms_norm` norms its result and adds it.

    Args:
        hidden: embedded tokens `[B, N, H]`; fp16, bf16 or fp32.
        weights: all layers' tensors and the final norm's, from `packed`; dtype of hidden, or in 8 or 4 bits.
        forms: which tensors each layer has, and what codes stand for, from `packed`.
        kv: the cache `[L, 2, B, Hkv, S, D]`, dtype of hidden, or int8 `[.., D + 4]` (see `medusa_kernels.cache_rows`);
            contiguous, or neighbouring sequences of a contiguous one; with `slots`, of any number of sequences.
            Mutated: rows `cache_lens[b]` to `cache_lens[b] + N` of every layer.
        cos: table `[P, R]` or `[B, P, R]`, with `tables` one more axis before these; contiguous, dtype of hidden. The
            first R numbers of each head are rotated, as by `rope_append`.
        sin: like `cos`.
        cache_lens: int32 `[B]`, rows already cached; not changed.
        depths: int32 `[N]` or `[B, N]`, each node's position relative to `cache_lens`.
        ancestors: int64 `[N, W]` or `[B, N, W]`, see `tree_attention`.
        windows: the sliding window of each layer in positions, 0 for none.
        eps: of all norms.
        scale: factor of the attention scores.
        slots: int32 `[B]`, which sequence of the cache belongs to each batch row, each at most once. None: sequence b
            to row b.
        norm_offset: of all norms, as in `add_rms_norm`.
        activation: of the MLP's gate, as in `decode_linear`.
        factor: of what attention and MLP add to the hidden states, as in `decode_linear`.
        softcap: of the attention scores, as in `tree_attention`, or None.
        tables: which of several tables cos[i] and sin[i] each layer has; None: cos and sin are one table.
        states: after how many layers, 1 to L, hidden states are returned as well, or None.

    Returns:
        The hidden states after the final norm, `[B, N, H]`, a new contiguous tensor. With S `states`
        `[1 + S, B, N, H]`: these, and then the hidden states after so many layers, without a norm.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value (on the CPU also if a row or slot would be
            outside the cache or a position outside the tables). Shapes of single weights are checked by `packed`, which
            builds them, except how they fit the heads of the cache, which is checked on the CPU.
    """
    _checks.axes("hidden", hidden, "B", "N", "H")
    batch, nodes, width = hidden.shape
    _checks.dtype("hidden", hidden, *_checks.FLOATS)
    count = len(forms)
    head_dim = cache_rows.head_size(kv)
    sequences = _checks.slots_axis("hidden", hidden, batch, slots)
    cache_rows.check("kv", kv, (count, 2, sequences, "Hkv", "S", head_dim), "hidden", hidden)
    _checks.cache_slots("kv", kv)
    several: tuple[int | str, ...] = () if tables is None else ("T",)
    table_shape = (*several, "P", "R") if cos.dim() == 2 + len(several) else (*several, batch, "P", "R")
    for name, table, shape in (("cos", cos, table_shape), ("sin", sin, cos.shape)):
        _checks.match(name, table, shape, "hidden", hidden)
        _checks.contiguous(name, table)
    _checks.typed("cache_lens", cache_lens, (batch,), torch.int32, "hidden", hidden)
    _checks.typed("depths", depths, (nodes,) if depths.dim() == 1 else (batch, nodes), torch.int32, "hidden", hidden)
    words = -(-nodes // reference.WORD)
    sets = (nodes, words) if ancestors.dim() == 2 else (batch, nodes, words)
    _checks.typed("ancestors", ancestors, sets, torch.int64, "hidden", hidden)
    _checks.require(len(windows) == count, "windows", f"{count}, one per layer", len(windows))
    _checks.require(min(windows, default=0) >= 0, "windows", "numbers of positions, or 0 for none", windows)
    rotated = cos.shape[-1]
    fits = 0 < rotated <= head_dim and rotated % 2 == 0
    _checks.require(fits, "cos", f"an even number of columns up to the head size {head_dim}", rotated)
    _checks.require(activation in ACTIVATIONS, "activation", " or ".join(ACTIVATIONS), activation)
    _checks.require(softcap is None or softcap > 0, "softcap", "a positive number or None", softcap)
    if tables is not None:
        of_each = len(tables) == count and all(0 <= table < len(cos) for table in tables)
        _checks.require(of_each, "tables", f"{count} numbers below {len(cos)}, one per layer", tables)
    within = all(0 < number <= count for number in states or ())
    _checks.require(within, "states", f"numbers of layers from 1 to {count}", states)
    held = sum((form & _SLOT_BITS).bit_count() for form in forms) + 1
    _checks.require(len(weights) == held, "weights", f"{held} tensors, as forms has", len(weights))
    _checks.match("weights[-1]", weights[-1], (width,), "hidden", hidden)
    return torch.ops.medusa_kernels.decoder_layers.default(
        hidden, list(weights), list(forms), kv, cos, sin, cache_lens, depths, ancestors,
        windows=list(windows), eps=eps, scale=scale, slots=slots, norm_offset=norm_offset, activation=activation,
        factor=factor, softcap=softcap, tables=None if tables is None else list(tables),
        states=None if states is None else list(states),
    )  # fmt: skip


_composed = functools.partial(reference.layers_by, sys.modules["medusa_kernels"])
"""The layers by the package's public ops, where no single call does it all."""

_SLOT_BITS = 2**reference.SLOTS - 1
_PROJECTION = 4
"""Slots of a projection: weight, bias, scale and zero points; those of the norms come first."""


class _Layout(NamedTuple):
    """Each weight's place in a table [L, SLOTS], and the index of the first q, k and gate weight."""

    places: tuple[int, ...]
    q: int
    k: int
    gate: int


@functools.lru_cache(maxsize=8)
def _layout(forms: tuple[int, ...]) -> _Layout:
    slots = reference.SLOTS
    places = [layer * slots + slot for layer, form in enumerate(forms) for slot in range(slots) if form >> slot & 1]
    return _Layout(tuple(places), *(places.index(reference.NORMS + _PROJECTION * place) for place in (0, 1, 4)))


class _Tables(NamedTuple):
    """What the C++ library reads of the weights, and of which weights: rebuilding it costs more than a small layer."""

    weights: tuple[weakref.ref[Tensor], ...]
    addresses: list[int]
    forms: tuple[int, ...]
    head_dim: int
    pointers: Tensor
    kinds: Tensor
    whole_norms: bool


_known = WeakTensorKeyDictionary()
"""The last `_Tables` of each first weight."""


def _tables(weights: tuple[Tensor, ...], forms: tuple[int, ...], head_dim: int, whole: tuple[int, int]) -> _Tables:
    """Return what the struct Layers holds of the weights; `whole` are the rows of q and of k."""
    addresses = [weight.data_ptr() for weight in weights]
    known = _known.get(weights[0])
    if (
        known is not None
        and (known.addresses, known.forms, known.head_dim) == (addresses, forms, head_dim)
        and all(ref() is weight for ref, weight in zip(known.weights, weights, strict=True))
    ):
        return known
    table, kinds = [0] * (len(forms) * reference.SLOTS), [0] * (len(forms) * 2 * 7)
    norms: tuple[set[int], set[int]] = (set(), set())
    for index, (place, weight) in enumerate(zip(_layout(forms).places, weights, strict=False)):
        layer, slot = divmod(place, reference.SLOTS)
        if slot in (2, 3):
            norms[slot - 2].add(len(weight))
        table[place] = addresses[index]
        projection, member = divmod(slot - reference.NORMS, _PROJECTION)
        if projection >= 0 and member == 0:
            kind = 2 * (7 * layer + projection)
            kinds[kind] = _cpu.weight_type(weight, reference.codes_of(forms[layer], projection))
            if weight.dtype == torch.uint8:
                of_codes = weights[index + (2 if forms[layer] >> slot + 1 & 1 else 1)]
                kinds[kind + 1] = quantised.group_size(weight, of_codes)
    whole_norms = norms == tuple({rows} for rows in whole)
    if not whole_norms and any(norms) and norms != ({head_dim}, {head_dim}):
        expected = f"norms of q and k of size {head_dim} in all layers, or of sizes {whole[0]} and {whole[1]}"
        raise ValueError(f"weights: expected {expected}, got {norms[0]} and {norms[1]}")
    pointers, of_each = (torch.tensor(numbers, dtype=torch.int64, device="cpu") for numbers in (table, kinds))
    refs = tuple(map(weakref.ref, weights))
    known = _known[weights[0]] = _Tables(refs, addresses, forms, head_dim, pointers, of_each, whole_norms)
    return known


def _native(
    hidden, weights, forms, kv, cos, sin, cache_lens, depths, ancestors, *, windows, eps, scale, slots=None,
    norm_offset=None, activation="silu", factor=1.0, softcap=None, tables=None, states=None,
):  # fmt: skip
    """Run the op by the C++ library, on a CPU."""
    batch, nodes, width = hidden.shape
    _, _, sequences, kv_heads, rows, _ = kv.shape
    head_dim = cache_rows.head_size(kv)
    few = 0 < batch * nodes <= MOST_ROWS_CPU
    if not few or not forms or hidden.dtype not in _cpu.ACTIVATIONS or head_dim > MOST_HEAD_DIM:
        return None
    layout = _layout(tuple(forms))
    query_rows, key_rows = weights[layout.q].shape[0], weights[layout.k].shape[0]
    if key_rows != kv_heads * head_dim or query_rows % key_rows:
        expected = f"{kv_heads * head_dim} rows of k ({kv_heads} heads of {head_dim}) and a multiple of that of q"
        raise ValueError(f"weights: expected {expected}, got {key_rows} and {query_rows}")
    known = _tables(tuple(weights), tuple(forms), head_dim, (query_rows, key_rows))
    sizes, chosen, after = (
        None if numbers is None else torch.tensor(numbers, dtype=torch.int64, device="cpu")
        for numbers in (windows, tables, states or None)
    )
    per_row = cos.dim() == (3 if tables is None else 4)
    # Held until the call has returned.
    hidden, cache_lens, depths, ancestors = (t.contiguous() for t in (hidden, cache_lens, depths, ancestors))
    own = None if slots is None else slots.contiguous()
    out = hidden.new_empty(_shape(hidden, states))
    try:
        _cpu.call(
            "decoder_layers",
            _cpu.threads(), _cpu.TYPES[hidden.dtype], hidden, out,
            batch, nodes, width, query_rows // head_dim, kv_heads, head_dim,
            weights[layout.gate].shape[0],
            kv, _checks.cache_slots("kv", kv), sequences, rows, own,
            cos, sin, cos.shape[-2], cos.stride(-3) if per_row else 0, cos.shape[-1], chosen, cos.stride(0),
            cache_lens, depths, 0 if depths.dim() == 1 else nodes,
            ancestors, 0 if ancestors.dim() == 2 else ancestors.stride(0),
            weights[-1], known.whole_norms, float(eps), math.nan if norm_offset is None else float(norm_offset),
            float(scale), softcap and float(softcap), float(factor), ACTIVATIONS.index(activation),
            len(forms), known.pointers, known.kinds, sizes, _cpu.TYPES[kv.dtype], after, len(states or ()),
        )  # fmt: skip
    except _cpu.OutsideError:
        _checks.rows_fit(cache_lens.tolist(), nodes, rows)
        _checks.slots_fit(slots, sequences)
        positions = cache_lens[:, None] + depths
        low, high = (int(position) for position in positions.aminmax())
        raise ValueError(
            f"depths: expected positions cache_lens + depths within the {cos.shape[-2]} rows of cos and sin, "
            f"got positions {low} to {high}"
        ) from None
    return out


MOST_HEAD_DIM = 256
"""The largest head that the C++ library holds in a thread's own memory."""


def _shape(hidden: Tensor, states: Sequence[int] | None) -> tuple[int, ...]:
    return (1 + len(states), *hidden.shape) if states else tuple(hidden.shape)


def _compose(device: torch.device) -> Implementation:
    return Implementation("composed", _composed, "the other ops in turn")


register(
    decoder_layers,
    lambda a: a.hidden.new_empty(_shape(a.hidden, a.states)),
    mutates=["kv"],
    cpu=_cpu.native_or(
        "decoder_layers", _native, _compose, f"the others for more than {MOST_ROWS_CPU} rows and float16"
    ),
    cuda=_compose,
)
