"""Record the launches of a whole decoding step for any GPU, without one.

The step is the one that `bench_step` times: `decode_step` over fused layers. Its tensors are on the meta device, which
have shapes and strides but no memory, so models of any size take none. The host code of the kernels runs as it would on
the GPU; only the launch itself is replaced, by a note of kernel, grid and arguments.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from benchmarks import bench_step
from benchmarks.inspection import OPS
from benchmarks.kernel_forms import TRITON_TYPES, Specialisation
from medusa_decoding.backbone.fused_layers import obstacle
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from medusa_kernels import _registry
from medusa_kernels._triton.launch import Device

META = torch.device("meta")
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
        place = _storage(tensor), tensor.storage_offset(), tensor.numel()
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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # tensors without memory have no other address


def step_launches(
    model: str,
    nodes: int,
    prefix: int,
    heads: str,
    device: Device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch: int = 1,
    selector: TokenSelector | None = None,
) -> list[Launch]:
    """Return the launches of one step of `bench_step` on a device, in order.

    Args:
        model: key of `bench_step.MODELS`.
        nodes: of the tree, 1 to 64; 1 for a plain step, without heads.
        prefix: cached rows.
        heads: key of `bench_step.HEADS`.
        device: the GPU to launch for.
        dtype: of weights and activations.
        batch: sequences.
        selector: how tokens are picked; None for greedy decoding.

    Raises:
        ValueError: an unknown model or kind of heads, nodes outside of 1 to 64, or layers that do not run fused.
    """
    for name, value, known in (("model", model, bench_step.MODELS), ("heads", heads, bench_step.HEADS)):
        if value not in known:
            raise ValueError(f"--{name}: expected one of {', '.join(known)}, got {value}")
    if not 1 <= nodes <= 64:
        raise ValueError(f"--nodes: expected 1 to 64, got {nodes}")
    base = bench_step.build(model, META, dtype)
    drafting = bench_step.random_heads(base, heads) if nodes > 1 else None
    tree = Tree([]) if drafting is None else bench_step.tree_of(drafting, nodes)
    parameters = {_storage(parameter): name for name, parameter in base.named_parameters()}
    if drafting is not None:
        parameters |= {_storage(parameter): f"heads.{name}" for name, parameter in drafting.named_parameters()}
    with torch.no_grad(), MedusaModel(base, drafting, tree, backend="eager") as medusa:
        run, _ = bench_step.prepare_step(medusa, tree, "eager", prefix, batch, selector)
        why_not = obstacle(medusa.backbone.decoder)
        if why_not is not None:
            raise ValueError(f"model: expected one whose layers run fused, got {model}: {why_not}")
        medusa.backbone.fuse = True
        with recorded(device, parameters) as launches:
            run()
    return launches


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
            name: parameters[_storage(value)]
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and _storage(value) in parameters
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
            signature[name] = f"*{_TYPES[value.dtype]}"
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free and not parameter.do_not_specialize_on_alignment:
                aligned.append(name)
    warps, stages = launch.options["num_warps"], launch.options["num_stages"]
    return Specialisation(
        f"{launch.op} {launch.name}", launch.kernel, signature, constants, warps, stages, tuple(aligned)
    )


_TYPES = TRITON_TYPES | {torch.bool: "i1", torch.uint8: "u8"}
