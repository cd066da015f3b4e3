"""LoRA adapters of peft that are not merged: two thin products beside a module's own (Hu et al., arXiv:2106.09685).

`base_of` unwraps a module, whose own weight is then read as without an adapter. `read_adapters` returns the thin
weights of modules that have one input, such as q, k and v, as one pair for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_decoding.linears.reading import is_hooked, version


class Adapters(NamedTuple):
    """What is added to the products of some modules with one input x: `x down^T up^T`.

    Attributes:
        down: [R, K], R the ranks of all adapters together.
        up: [sum of N, R], times the adapters' factors; each module's rows have zeros in the columns of other modules.
    """

    down: Tensor
    up: Tensor


def base_of(linear: nn.Module) -> nn.Module:
    """Return the module below the adapters of peft, if they are plain LoRA; any other module as it is.

    Not plain are variants (such as DoRA, whose factor depends on the weight), biases of adapters and hooks.
    """
    return _base_layer(linear) if _is_lora(linear) else linear


def _base_layer(linear: Any) -> nn.Module:
    return linear.base_layer


def _is_lora(linear: Any) -> bool:
    lora = type(linear).__module__.startswith("peft.tuners.lora.") and hasattr(linear, "lora_A")
    if not lora or linear.training or is_hooked(linear) or getattr(linear, "fan_in_fan_out", False):
        return False
    if linear.disable_adapters and linear.merged:  # its own forward takes the adapters out of the weight again
        return False
    if set(getattr(linear, "lora_variant", ())).intersection(linear.active_adapters) and _is_added(linear):
        return False
    return all(
        type(thin) is nn.Linear and type(thin.weight) is nn.Parameter and thin.bias is None and not is_hooked(thin)
        for name in _active(linear)
        for thin in (linear.lora_A[name], linear.lora_B[name])
    )


def _is_added(linear: Any) -> bool:
    return not linear.disable_adapters and not linear.merged


def _active(linear: Any) -> list[str]:
    """Return the names of the adapters that the module adds to its base's result."""
    if not hasattr(linear, "lora_A") or not _is_added(linear):
        return []
    return [name for name in linear.active_adapters if name in linear.lora_A]


def has_adapters(linears: Sequence[Any]) -> bool:
    """Return whether one of the modules adds an adapter to its base's result."""
    return any(map(_active, linears))


class _Made(NamedTuple):
    key: object
    parts: object
    """The adapters' weights: while they are held, no other tensor has their id."""
    adapters: Adapters


_made: weakref.WeakKeyDictionary[nn.Module, dict[int, _Made]] = weakref.WeakKeyDictionary()
"""By the first module and the number of modules, which say what the others are."""


@torch.no_grad()
def read_adapters(linears: Sequence[Any], dtype: torch.dtype, *, anew: bool = False) -> Adapters | None:
    """Return the adapters of modules with one input, in the dtype of the activations; None if they have none.

    The result is made again only if an adapter was replaced, written to, scaled or switched. With `anew` it is also
    written again, in place, since a write to `weight.data` cannot be noticed.
    """
    parts = [[(m.lora_A[name].weight, m.lora_B[name].weight, m.scaling[name]) for name in _active(m)] for m in linears]
    if not any(parts):
        return None
    key = dtype, [[(id(a), version(a), id(b), version(b), factor) for a, b, factor in one] for one in parts]
    known = _made.setdefault(linears[0], {}).get(len(linears))
    same = known is not None and known.key == key
    if known is not None and same and not anew:
        return known.adapters
    down = torch.cat([a for one in parts for a, _, _ in one]).to(dtype)
    ups = [torch.cat([b * factor for _, b, factor in one], 1) if one else down.new_zeros(m.out_features, 0)
           for m, one in zip(linears, parts, strict=True)]  # fmt: skip
    found = Adapters(down, torch.block_diag(*ups).to(dtype))
    if known is not None and same:  # a captured step knows the addresses
        for old, new in zip(known.adapters, found, strict=True):
            old.copy_(new)
        return known.adapters
    _made[linears[0]][len(linears)] = _Made(key, parts, found)
    return found
