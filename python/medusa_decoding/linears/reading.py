"""What this project's ops read of a linear module: a plain one, or one that a library has quantised.

`read` returns the tensors, or the reason why only the module itself can be called. Tensors are the module's own
wherever its bits allow; what has to be expanded (nested scales) is made once per module. No library is imported for
that: its modules are recognised by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from medusa_decoding.linears.packed import PackedLinear
from medusa_kernels import Projection, quantised


def read(linear: nn.Module | None) -> Projection | str:
    """Return what the ops read of a linear module, or why not: a phrase such as "a torch.nn.modules.linear.Bilinear".

    A weight without a scale is in the dtype of the activations; scales are fp32. While a step is traced, what a
    library's tensor holds cannot be checked.
    """
    if linear is None or is_hooked(linear):
        return "no module" if linear is None else f"forward hooks on its {type(linear).__name__}"
    if type(linear) is PackedLinear:
        return linear.projection if linear.order is None else "columns in another order than the input's (act-order)"
    if type(linear) is nn.Linear and type(linear.weight) in (nn.Parameter, Tensor):
        return Projection(linear.weight, linear.bias)
    if torch.compiler.is_compiling():
        return "a step that is being traced"
    module = type(linear).__module__
    if module.startswith("bitsandbytes.") and hasattr(linear, "quant_storage"):
        return _bitsandbytes(linear)
    if type(linear) is not nn.Linear:
        return f"a {_name(linear)}"
    return _torchao(linear) if type(linear.weight).__module__.startswith("torchao.") else _weight_of(linear)


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__name__}"


def _weight_of(linear: Any) -> str:
    return f"a weight of {_name(linear.weight)}"


def projection(linear: nn.Module | None) -> Projection | None:
    """Return what the ops project to a vocabulary with instead of a bias-free module, or None: call the module."""
    found = read(linear)
    return None if isinstance(found, str) or found.bias is not None else found


def plain_weight(linear: nn.Module | None) -> Tensor | None:
    """Return the weight of a plain bias-free `nn.Linear` without hooks, else None (call the module instead)."""
    found = projection(linear)
    return None if found is None or found.scale is not None else found.weight


_made: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Projection]] = weakref.WeakKeyDictionary()


def _once(linear: Any, sources: tuple[Tensor | None, ...], make: Callable[[], Projection | str]) -> Projection | str:
    """Return what `make` returns, made again only if one of the tensors that it reads was replaced or written to."""
    sources = (*sources, linear.bias)
    key = tuple(None if one is None else (one.data_ptr(), one.shape, one.device, version(one)) for one in sources)
    known = _made.get(linear)
    if known is not None and known[0] == key:
        return known[1]
    found = make()
    if not isinstance(found, str):
        _made[linear] = key, found
    return found


def version(tensor: Tensor) -> int:
    """Return a number that grows with every write to a tensor."""
    return 0 if tensor.is_inference() else tensor._version


def _bitsandbytes(linear: Any) -> Projection | str:
    """Read a `Linear4bit`: codes in place, its scales too unless they are quantised themselves."""
    weight, bias = linear.weight, linear.bias
    state = getattr(weight, "quant_state", None)
    if state is None:
        return "a bitsandbytes weight that is not quantised yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "a bitsandbytes weight that its first forward has repacked for AVX512_BF16 (load the model again)"
    rows, columns = state.shape
    group, codes = state.blocksize, state.quant_type
    if codes not in quantised.TABLES or columns % group or group % quantised.GROUP_MULTIPLE:
        return f"a bitsandbytes weight in {codes} with blocks of {group} in rows of {columns}"

    def make() -> Projection | str:
        if state.code.tolist() != torch.tensor(quantised.TABLES[codes]).tolist():
            return f"a bitsandbytes weight with its own table of {codes}"
        scale = state.absmax
        if state.nested:
            from bitsandbytes.functional import dequantize_blockwise

            scale = dequantize_blockwise(scale, state.state2) + state.offset
        stored = weight.data.view(torch.uint8).view(rows, columns // 2)
        return Projection(stored, bias, scale.float().view(rows, columns // group), None, codes)

    nested = (state.state2.absmax, state.offset) if state.nested else ()
    return _once(linear, (weight.data, state.absmax, *nested), make)


def _torchao(linear: Any) -> Projection | str:
    """Read 8-bit numbers with a scale per row, in place; on a CPU also those whose inputs are rounded to 8 bits."""
    weight = linear.weight
    if type(weight).__name__ not in ("Int8Tensor", "Float8Tensor") or weight.qdata.dtype not in quantised.BYTES:
        return _weight_of(linear)
    stored, scale, zero = weight.qdata, weight.scale, getattr(weight, "zero_point", None)
    rounding, codes = weight.act_quant_kwargs, "int4"
    if rounding is not None and stored.dtype == torch.int8 and stored.device.type == "cpu":
        of_rows = type(rounding.granularity).__name__ == "PerRow" and rounding.mapping_type.name == "SYMMETRIC"
        if of_rows and not rounding.reduce_range and weight.act_quant_scale is None:
            codes = "dynamic"
    if (rounding is not None and codes != "dynamic") or getattr(weight, "act_pre_scale", None) is not None:
        return f"{_weight_of(linear)} whose inputs are quantised or scaled too"
    by_row = list(weight.block_size) == [1, stored.shape[1]] and scale.numel() == len(stored)
    other = f"{_weight_of(linear)} that has more than one scale per row, or zero points"
    if not by_row or not stored.is_contiguous():
        return other

    def make() -> Projection | str:
        # Read by the host, which a step that is captured must not be.
        if zero is not None and bool(zero.any()):
            return other
        return Projection(stored, linear.bias, scale.reshape(-1).float().contiguous(), None, codes)

    return _once(linear, (stored, scale, zero), make)


def is_hooked(module: nn.Module) -> bool:
    """Return whether calling the module does more than its class's forward.

    transformers' hooks that record outputs do not count: they stay on a model after its first call with
    `output_hidden_states` or `output_attentions`, and do nothing in any other call.
    """
    recording = "transformers.utils.output_capturing"
    hooks = [hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", None) != recording]
    if hooks or module._forward_pre_hooks:
        return True
    # accelerate, when it removes its hooks, leaves the class's forward bound to the module.
    forward = vars(module).get("forward")
    own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return "forward" in vars(module) and not own
