"""Record the launches that ops would make on any GPU, without one, and describe their compiled forms.

Tensors are on the meta device, which have shapes and strides but no memory, so models of any size take none. The host
code of the kernels runs as it would on the GPU; only the launch itself is replaced, by a note of kernel, grid and
arguments.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from medusa_kernels import _registry
from medusa_kernels._triton.launch import Device

OPS = tuple(op for op in _registry.OPS if op not in ("kv_compact", "decoder_layers"))
"""Ops with Triton kernels, each in the module of that name in `medusa_kernels._triton`."""
META = torch.device("meta")
TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bool: "i1",
}
"""Names of dtypes in Triton's signatures."""
STAGES = {
    "heads_topk": "heads",
    "tree_select": "arrange",
    "gumbel_noise": "noise",
    "rope_append": "rope, append",
    "tree_attention": "attention",
    "tree_verify": "verify",
    "tree_accept": "accept",
    "kv_compact": "compact",
}
"""Stage of an op, if it has another name; `decode_linear` and `add_rms_norm` serve several stages."""
STAGES_BY_MODULE = {
    "q_proj": "qkv",
    "o_proj": "output",
    "gate_proj": "gate, up",
    "down_proj": "down",
    "q_norm": "head norms",
    "k_norm": "head norms",
}
"""Stage of a launch by the module whose weight it reads."""
NORMS = "norms"


@dataclass(frozen=True)
class Specialisation:
    """One compiled form of a kernel.

    Attributes:
        name: op, kernel and what distinguishes this form: "tree_attention attend bf16 128 64 64".
        kernel: the `triton.jit` function.
        signature: Triton type of every argument that is not a constant: "*bf16", "i32", "fp32".
        constants: value of every `tl.constexpr` argument.
        num_warps: warps per program.
        num_stages: depth of software pipelining.
        aligned: integers that a launch always passes as multiples of 16, so that the compiler may load 16 bytes at
            once. Pointers always count as aligned.
        programs: programs per multiprocessor that a launch counts on; 0 if it does not.
        options: the compiler options of the launch.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = field(default=())
    programs: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments by name, tensors on the meta device."""

    op: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        op: the op that launches it.
        name: of the kernel, as profilers show it.
        kernel: the `triton.jit` function; None for the CUDA kernel of csrc/, whose grid is not known here.
        grid: programs along each axis.
        arguments: by name, constants included.
        options: keyword arguments that are not the kernel's: warps, stages and the compiler's options.
        weights: names of the model's and heads' parameters among the arguments, by argument.
        call: what launched it, if that is known.
    """

    op: str
    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    weights: Mapping[str, str]
    call: Call | None = None

    @property
    def programs(self) -> int:
        """The number of programs."""
        return math.prod(self.grid)

    @property
    def stage(self) -> str:
        """The stage of a step that it belongs to."""
        if self.op not in ("decode_linear", "add_rms_norm"):
            return STAGES.get(self.op, self.op)
        module, _ = next(iter(self.weights.values())).split(".")[-2:]
        return STAGES_BY_MODULE.get(module, NORMS)

    @property
    def stream(self) -> Stream | None:
        """How it streams weights or keys past activations; None if it does not."""
        return _STREAMS[self.name](self) if self.name in _STREAMS else None


@dataclass(frozen=True)
class Stream:
    """What the programs of a launch read.

    Attributes:
        tile_bytes: of weights, or keys and values, that a program loads per stage of its pipeline.
        reads: how many times all programs together read an argument, by its name; others are read once.
    """

    tile_bytes: int
    reads: Mapping[str, int]


def _linear_stream(launch: Launch) -> Stream:
    a = launch.arguments
    # A row of a weight in 4 bits has fewer bytes than x has columns.
    tile = a["BLOCK_N"] * (1 + a["GATE"]) * a["BLOCK_K"] * a["w0"].shape[1] * a["w0"].itemsize // a["x"].shape[1]
    # The parts of one tile of weight rows read x once between them.
    return Stream(tile, {"x": launch.programs // a["PARTS"]})


def _vocabulary_stream(launch: Launch, activations: str, weight: str) -> Stream:
    a = launch.arguments
    row_tiles, programs, *groups = launch.grid
    # Every tile of weight rows is multiplied by all activations; of a matrix all groups read all of it.
    times = programs * a["tiles"] * (math.prod(groups) if a[activations].dim() == 2 else 1)
    return Stream(a["BLOCK_V"] * a["BLOCK_K"] * a[weight].itemsize, {activations: times, weight: row_tiles})


def _attention_stream(launch: Launch) -> Stream:
    a = launch.arguments
    row_tiles = -(-a["nodes"] * a["groups"] // a["BLOCK_M"])
    tile = 2 * a["BLOCK_N"] * a["BLOCK_D"] * a["k_cache"].itemsize
    return Stream(tile, {"q": launch.grid[0] // row_tiles, "k_cache": row_tiles, "v_cache": row_tiles})


_STREAMS = {
    "_decode_linear_kernel": _linear_stream,
    "residual_kernel": lambda one: _vocabulary_stream(one, "x", "w1"),
    "vocabulary_kernel": lambda one: _vocabulary_stream(one, "states", "w2"),
    "project_kernel": lambda one: _vocabulary_stream(one, "hidden", "weight"),
    "attend_kernel": _attention_stream,
}
"""By kernel, of those that stream weights or keys."""


def l2_bytes(launch: Launch, keys: int) -> int:
    """Return the bytes that the programs of a launch read from the L2 and write to it.

    Activations, partial sums and norms' weights count once, or as often as `stream` says; larger weights, keys and
    values only if they are streamed. `keys` are the rows of the cache that hold something. The rotary tables, of which
    few rows are read, do not count.
    """
    stream, total = launch.stream, 0
    reads, seen = {} if stream is None else stream.reads, set()
    for name, tensor in launch.arguments.items():
        # Unused arguments are other arguments again.
        if not isinstance(tensor, torch.Tensor) or name in ("cos", "sin"):
            continue
        place = storage(tensor), tensor.storage_offset(), tensor.numel()
        if place in seen:
            continue
        seen.add(place)
        times, size = reads.get(name, 1), tensor.numel() * tensor.itemsize
        if name == "w2" and launch.arguments.get("GATHER"):
            size = size // tensor.shape[-2] * launch.arguments["vocabulary"]
        if name == "hidden" and launch.op == "tree_accept":
            size //= tensor.shape[-2]  # the last accepted node's
        if name in ("k_cache", "v_cache"):
            times, size = reads.get(name, 0), size * keys // tensor.shape[-2]
        elif name in launch.weights and tensor.dim() > 1 and stream is None:
            times = 0
        total += times * size
    return total


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # tensors without memory have no other address


@contextlib.contextmanager
def recorded(device: Device, parameters: Mapping[int, str]) -> Iterator[list[Launch]]:
    """Record launches by ops on meta tensors, as they would be on a device, instead of launching.

    Args:
        device: the GPU to launch for.
        parameters: names of weights by their storages.
    """
    modules = {op: importlib.import_module(f"medusa_kernels._triton.{op}") for op in OPS}
    found: list[Launch] = []
    mode = _Ops(found)

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **keywords: Any) -> None:
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {n: v for n, v in keywords.items() if n in names}
        arguments = {name: given[name] for name in names}
        options = {name: value for name, value in keywords.items() if name not in names}
        weights = {
            name: parameters[storage(value)]
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and storage(value) in parameters
        }
        launch = Launch(mode.call.op, kernel.fn.__name__, kernel, tuple(grid), arguments, options, weights, mode.call)
        found.append(launch)

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("medusa_kernels."):
                for function, result in (("describe", device), ("programmatic", device.programmatic)):
                    if callable(vars(module).get(function)):
                        stack.enter_context(mock.patch.object(module, function, lambda *_, given=result: given))
        chosen = {op: _registry.Implementation("triton", getattr(modules[op], op), "recorded") for op in OPS}
        choosers = {(op, META.type): lambda _, one=one: one for op, one in chosen.items()}
        stack.enter_context(mock.patch.dict(_registry._choosers, choosers))
        stack.enter_context(mock.patch.dict(_registry._chosen))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mode)
        yield found


class _Ops(TorchDispatchMode):
    """Runs the host code of ops in place of what serves meta tensors, and remembers the call."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches, self.call = launches, Call("", {})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace != _registry.NAMESPACE:
            return function(*args, **(kwargs or {}))
        names = (argument.name for argument in function._schema.arguments)
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        self.call = Call(function._schema.name.partition("::")[2], given)
        if self.call.op == "kv_compact":
            return self.launches.append(Launch("kv_compact", "compact_kernel", None, (), {}, {}, {}, self.call))
        return _registry.served_by(self.call.op, META).function(**given)


def specialisation(launch: Launch) -> Specialisation:
    """Return the compiled form that Triton would make for a launch: integers of 1 are constants, multiples of 16 known.

    Pointers count as multiples of 16, as memory is allocated.
    """
    signature, constants, aligned = {}, {}, []
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TRITON_TYPES[value.dtype]}"
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free and not parameter.do_not_specialize_on_alignment:
                aligned.append(name)
    options = dict(launch.options)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    name = f"{launch.op} {launch.name}"
    return Specialisation(name, launch.kernel, signature, constants, warps, stages, tuple(aligned), options=options)
