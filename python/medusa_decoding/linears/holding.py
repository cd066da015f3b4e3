"""LinearHold: a model's quantised linear modules, kept in a state that the ops can read.

Modules that lack what decoding needs are replaced for as long as a hold of the model lasts, each by a `PackedLinear`;
its end gives the modules back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from medusa_decoding.linears.packed import PackedLinear, TakenNumbers
from medusa_decoding.linears.reading import is_hooked, read
from medusa_kernels import Projection, quantised


@dataclass
class _Held:
    """What has been changed in a model's linear modules, for how many users, and how it is undone.

    With `rounds`, quantised modules round their inputs to 8 bits.
    """

    rounds: bool
    users: int = 0
    undo: list[Callable[[], object]] = field(default_factory=list)

    def change(self, causal: nn.Module) -> None:
        """Prepare the modules; raises `ValueError` for compressed ones that cannot be read, or inputs not rounded."""
        children = ((parent, *child) for parent in causal.modules() for child in parent._modules.items())
        places: list[tuple[nn.Module, str, Any]] = [place for place in children if place[2] is not None]
        stored = Counter(_address(module) for _, _, module in places)
        hook: Any = getattr(causal, "ct_decompress_hook", None)
        for parent, name, module in places:
            found: Projection | str | None = None
            order = taken = None
            if getattr(module, "support_avx512bf16_for_cpu", False):
                # bitsandbytes' first forward on such a CPU would repack the weight, and round its scales.
                module.support_avx512bf16_for_cpu = False
                self.undo.append(functools.partial(setattr, module, "support_avx512bf16_for_cpu", True))
            elif hook is not None and getattr(module, "quantization_scheme", None) is not None:
                found = _compressed(module)
                if isinstance(found, str):
                    raise ValueError(
                        f"base_model: expected compressed weights of 4 or 8 bits and plain activations, or on a CPU "
                        f"int8 weights and activations with a dynamic scale per token, got {found} in "
                        f"{_path(causal, module)}; load it by transformers and call it once, which decompresses it, "
                        "before MedusaModel(model, heads)"
                    )
            elif (found := None if "base_layer" in name else _int4_of_torchao(module)) is not None:
                taken = TakenNumbers(module.weight) if stored[_address(module)] == 1 else None
            if self.rounds:
                if type(module) is PackedLinear:
                    found, order = module.projection, module.order
                found = _rounding(read(module) if found is None else found)
                if isinstance(found, str):
                    raise ValueError(
                        "activation_dtype: expected weights in int8, or in int4 in groups of a multiple of "
                        f"{quantised.DYNAMIC_GROUP_MULTIPLE} without zero points, on a CPU, got {found} in "
                        f"{_path(causal, module)}"
                    )
            if isinstance(found, Projection):
                packed = PackedLinear(found, order, module, taken).train(module.training)
                self.undo.append(functools.partial(_put_back, causal, packed))
                parent._modules[name] = packed
                if taken is not None:
                    taken.free()
        if self.rounds and not any(isinstance(module, PackedLinear) for module in causal.modules()):
            raise ValueError("activation_dtype: expected a model with weights in int8 or int4, got none that is read")
        if hook is not None:
            # compressed-tensors decompresses the whole model in its first forward.
            hooks = causal._forward_pre_hooks
            function = hooks.pop(hook.id, None)  # a copy of a held model has none
            if function is not None:
                self.undo.append(lambda: hooks.setdefault(hook.id, function))

    def back(self) -> None:
        """Undo everything, the last change first."""
        while self.undo:
            self.undo.pop()()


def _path(causal: nn.Module, module: nn.Module) -> str:
    return next(name for name, one in causal.named_modules() if one is module)


def _put_back(causal: nn.Module, packed: PackedLinear) -> None:
    """Replace a module wherever it is by now: a wrapper that was put around it since stays."""
    original = packed.given_back()
    for parent in list(causal.modules()):
        for name, module in parent._modules.items():
            if module is packed:
                parent._modules[name] = original


def _address(module: Any) -> int:
    numbers = getattr(module._parameters.get("weight"), "qdata", None)
    return id(module) if numbers is None else numbers.data_ptr()


_LOCK = threading.RLock()
_held: weakref.WeakKeyDictionary[nn.Module, _Held] = weakref.WeakKeyDictionary()


class LinearHold(contextlib.AbstractContextManager["LinearHold"]):
    """Keeps a model's quantised linear modules in a state that the ops can read, until `undo`.

    Holds of one model share the changes; the last `undo` gives the modules back, bit for bit, as does garbage
    collection of the last hold. Weights of compressed-tensors and of torchao's int4 are replaced by `PackedLinear`, the
    former in the same memory, the latter packed to half of it, layer by layer. bitsandbytes' 4-bit layers are kept from
    repacking themselves. With `rounds` all that are quantised are replaced. Nothing else changes.

    Args:
        causal: the causal language model.
        rounds: whether weights in int8 and int4 meet inputs that are rounded to 8 bits (`quantised.rounded`).

    A module that cannot be read or rounded so is a `ValueError`, as is another `rounds` than that of another hold of
    the model; nothing is changed then.
    """

    def __init__(self, causal: nn.Module, rounds: bool = False) -> None:
        self.rounds = rounds
        self._of: list[nn.Module] = []
        self._finalizer = weakref.finalize(self, _release, self._of)
        self._finalizer.atexit = False
        self.resume(causal)

    def resume(self, causal: nn.Module) -> None:
        """Hold the model again after `undo`; arguments and errors as in the constructor."""
        with _LOCK:
            held = _held.get(causal) or _Held(self.rounds)
            if held.rounds != self.rounds:
                theirs, own = ("'int8'" if rounds else "None" for rounds in (held.rounds, self.rounds))
                raise ValueError(
                    f"activation_dtype: expected {theirs} like another MedusaModel of this base model, got {own}"
                )
            if not held.users:
                try:
                    held.change(causal)
                except BaseException:
                    held.back()
                    raise
                _held[causal] = held
            held.users += 1
            self._of.append(causal)

    def undo(self) -> None:
        """End this hold; a second call does nothing."""
        _release(self._of)

    def __exit__(self, *exc: object) -> None:
        self.undo()


def _release(of: list[nn.Module]) -> None:
    while of:
        with _LOCK:
            causal = of.pop()
            held = _held[causal]
            held.users -= 1
            if not held.users:
                del _held[causal]
                held.back()


def _int4_of_torchao(linear: Any) -> Projection | None:
    """Pack 4-bit numbers that are stored one per byte, on a CPU also those whose inputs are rounded to 8 bits.

    None if the weight is something else.
    """
    if type(linear) is not nn.Linear or is_hooked(linear) or type(linear.weight).__name__ != "IntxUnpackedToInt8Tensor":
        return None
    held: Any = linear.weight
    group = held.block_size[-1]
    whole = held.zero_point == held.zero_point.to(torch.int8)
    fits = str(held.target_dtype) == "torch.int4" and bool(whole.all()) and list(held.block_size) == [1, group]
    with_zeros, codes, multiple = bool(held.zero_point.any()), "int4", quantised.GROUP_MULTIPLE
    if held.activation_quantization is not None:
        known = held.activation_quantization == "int8_asym_per_token"
        fits = fits and known and not with_zeros and held.qdata.device.type == "cpu"
        codes, multiple = "dynamic", quantised.DYNAMIC_GROUP_MULTIPLE
    if not fits or group % multiple:
        return None
    packed, scale = quantised.pack(held.qdata + quantised.MIDDLE), held.scale.float().contiguous()
    zero = held.zero_point.to(torch.uint8) + quantised.MIDDLE if with_zeros else None
    if codes == "dynamic":
        zero = quantised.row_sums(packed, scale)
    return Projection(packed, linear.bias, scale, zero, codes)


def _compressed(module: Any) -> Projection | str:
    """Read a compressed module of compressed-tensors: its weight in place, zero points unpacked."""
    scheme: Any = module.quantization_scheme
    held: dict[str, Any] = {**module._parameters, **module._buffers}
    weights, form = scheme.weights, getattr(scheme.format, "value", scheme.format)
    if not isinstance(module, nn.Linear) or weights is None:
        return f"a compressed {type(module).__name__}"
    rounding, codes = scheme.input_activations, "int4"
    if rounding is not None and weights.num_bits == 8 and held["weight_scale"].device.type == "cpu":
        of_tokens = rounding.dynamic is True and rounding.strategy == "token" and rounding.symmetric
        codes = "dynamic" if of_tokens and (rounding.num_bits, rounding.type) == (8, "int") else codes
    if (rounding is not None and codes != "dynamic") or scheme.output_activations is not None:
        return "activations that are quantised too"
    described = (
        f"{weights.num_bits} bits in {form} with a scale per {getattr(weights.strategy, 'value', weights.strategy)}"
    )
    scale, zero, bias = held["weight_scale"].detach().float(), held.get("weight_zero_point"), module.bias
    if form == "pack-quantized" and weights.num_bits == 4 and scale.dim() == 2:
        stored = held["weight_packed"].detach().view(torch.uint8)
        columns, groups = quantised.columns(stored), scale.shape[-1]
        if columns == module.in_features and columns % (groups * quantised.GROUP_MULTIPLE) == 0:
            if zero is not None:
                of_rows = zero.detach().T.contiguous().view(torch.uint8)  # [groups, N / 2], the even row below
                zero = torch.stack((of_rows & 15, of_rows >> 4), -1).flatten(-2)[:, : len(stored)].T.contiguous()
            return Projection(stored, bias, scale.contiguous(), zero)
    stored = held.get("weight", scale)
    plain = stored.dtype == torch.int8 or (stored.dtype in quantised.BYTES and codes != "dynamic")
    plain = plain and (zero is None or not bool(zero.any()))
    if plain and scale.numel() in (1, len(stored)):
        return Projection(stored.detach(), bias, scale.reshape(-1).expand(len(stored)).contiguous(), None, codes)
    return described


def _rounding(found: Projection | str) -> Projection | str | None:
    """Return a projection with inputs that are rounded to 8 bits, or why that cannot be; None for a plain module."""
    if isinstance(found, str):
        return None
    weight, _, scale, zero, codes = found
    if scale is None:
        return None
    if codes == "dynamic":
        return found
    if weight.device.type != "cpu":
        return f"weights on {weight.device}"
    if weight.dtype == torch.int8:
        return found._replace(codes="dynamic")
    if weight.dtype != torch.uint8 or codes != "int4":
        return f"weights in {codes if weight.dtype == torch.uint8 else str(weight.dtype).removeprefix('torch.')}"
    if zero is not None and bool((zero != quantised.MIDDLE).any()):
        return "int4 with zero points"
    group = quantised.group_size(weight, scale)
    if group % quantised.DYNAMIC_GROUP_MULTIPLE:
        return f"int4 in groups of {group}"
    return found._replace(zero=quantised.row_sums(weight, scale), codes="dynamic")
