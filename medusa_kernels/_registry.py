"""Declares the ops, and chooses, logs and reports the implementation that serves each of them.

Each op is a `torch.library` op in the namespace `medusa_kernels`. Its signature is written once, at the public function
of its name: the schema is inferred from it, and the reference and all implementations name the same arguments. The
implementation is chosen at the first call on each device, because GPUs of one machine may differ. The choice is logged
once per device, with its reason, and `served_by` (used by `medusa doctor`) reports it. Nothing falls back silently.

The ops are for decoding and are not differentiable: their results never require a gradient.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

NAMESPACE = "medusa_kernels"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
OPS = (
    "tree_attention",
    "rope_append",
    "heads_topk",
    "tree_verify",
    "kv_compact",
    "decode_linear",
    "add_rms_norm",
    "decoder_layers",
    "tree_accept",
    "tree_select",
    "gumbel_noise",
    "draw_tokens",
)

logger = logging.getLogger(NAMESPACE)


@dataclass(frozen=True)
class Implementation:
    """One way to run an op: its short name, the function, and why it was chosen."""

    name: str
    function: Callable[..., Any]
    reason: str


Chooser = Callable[[torch.device], Implementation]

LOWEST_CAPABILITY = (8, 0)
"""The oldest GPUs that the Triton kernels are written and compiled for (bf16 tensor cores, asynchronous copies)."""

_choosers: dict[tuple[str, str], Chooser] = {}
_chosen: dict[tuple[str, torch.device], Implementation] = {}


def register(
    public: Callable[..., Any],
    outputs: Callable[[Any], Any],
    *,
    cpu: Chooser,
    cuda: Chooser | None = None,
    mutates: Sequence[str] = (),
    schema: str | None = None,
) -> None:
    """Register the op of a public function.

    Args:
        public: the typed function that checks the arguments and calls the op. The op has its name.
        outputs: returns empty tensors like the op's results, from a namespace with all arguments by name.
        cpu: chooses what serves the op on a CPU.
        cuda: chooses what serves it on a CUDA device; None: the same as `cpu`.
        mutates: names of the arguments that the op writes.
        schema: the arguments and results, if PyTorch cannot infer them from `public`.
    """
    # Types instead of strings: not every supported PyTorch evaluates the strings in the namespace of `public`.
    public.__annotations__ = inspect.get_annotations(public, eval_str=True)
    name, signature = public.__name__, inspect.signature(public)
    # A plain int: torch.compile takes the value of such an argument as a constant.
    inferred = schema or torch.library.infer_schema(public, mutates_args=mutates).replace("SymInt", "int")
    LIBRARY.define(name + inferred, tags=(torch.Tag.pt2_compliant_tag,))

    def fake(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return outputs(SimpleNamespace(**bound.arguments))

    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    serve(name, "cpu", cpu)
    serve(name, "cuda", cuda or cpu)


def serve(op: str, device_type: str, choose: Chooser) -> None:
    """Let `choose` decide, at the first call on each device of a type ("cpu" or "cuda"), what serves `op` there.

    The first argument of every op is a tensor, whose device decides.
    """
    _choosers[op, device_type] = choose

    def run(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device
        function = (_chosen.get((op, device)) or served_by(op, device)).function
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    LIBRARY.impl(op, run, device_type.upper())


def served_by(op: str, device: str | torch.device) -> Implementation:
    """Return the implementation that serves an op on a device, choosing and logging it at the first call.

    Args:
        op: one of `OPS`.
        device: "cpu", "cuda:1", or "cuda" for the current GPU.

    Raises:
        ValueError: an unknown op, or a device that is neither a CPU nor a CUDA device.
    """
    if (op, str(device).partition(":")[0]) not in _choosers:
        raise ValueError(f"expected one of the ops {OPS} on cpu or cuda, got {op!r} on {str(device)!r}")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if (op, device) not in _chosen:
        chosen = _choosers[op, device.type](device)
        logger.info("%s on %s: %s (%s)", op, device, chosen.name, chosen.reason)
        _chosen[op, device] = chosen
    return _chosen[op, device]


@functools.cache
def interpreted() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, which takes CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_or(op: str, name: str, function: Callable[..., Any], why: str = "") -> Chooser:
    """Return a chooser of the op's Triton kernel if it can run, else of another implementation.

    Args:
        op: the op; its kernel is launched by the function of that name in `medusa_kernels._triton.<op>`.
        name: the other implementation's short name.
        function: the other implementation.
        why: the reason for it on a CPU, where Triton kernels run in Triton's interpreter only.
    """

    def choose(device: torch.device) -> Implementation:
        if device.type == "cpu" and not interpreted():
            return Implementation(name, function, why)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                return Implementation(name, function, "PyTorch finds no CUDA device")
            capability = torch.cuda.get_device_capability(device)
            if capability < LOWEST_CAPABILITY:
                return Implementation(name, function, f"Triton kernels need compute capability 8.0, got {capability}")
        try:
            module = importlib.import_module(f"medusa_kernels._triton.{op}")
        except ImportError as error:
            return Implementation(name, function, f"the Triton kernel cannot be imported: {error}")
        reason = (
            "Triton kernel in Triton's interpreter: TRITON_INTERPRET=1 is set" if interpreted() else "Triton kernel"
        )
        return Implementation("triton", getattr(module, op), reason)

    return choose
