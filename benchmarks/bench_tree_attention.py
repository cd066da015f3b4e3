"""Tree attention against masked attention of PyTorch and, where installed, FlashInfer.

    python -m benchmarks.bench_tree_attention --budget 480
    python -m benchmarks.bench_tree_attention --quick --only nodes=64

Every peer computes the same function (its difference from ours is printed) with its mask prepared outside the timing;
keys and values are the valid rows only. Lines named "unmasked" compute plain attention over the same rows: a floor, not
a peer. Bytes: keys and values of all valid rows once, queries and output. FlexAttention is compiled for each shape, so
it is limited to the first `--flex` cases in the order of `--list`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import gpu, suite
from medusa_decoding.trees.tree import Tree
from medusa_kernels import tree_attention

OP = "tree_attention"
HEADS = {
    "Llama-3-8B, Qwen3-8B": (32, 8, 128),
    "Llama-2-7B": (32, 32, 128),
    "Llama-2-13B": (40, 40, 128),
}
# Relative to the norm. Two bf16 results differ by 3e-3 to 5e-3; without the tree's mask, 64 nodes after a prefix of
# 32,768 differ by 4e-2.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
MOST_LOGITS = 2**30
FLEX_SECONDS = 20
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case(suite.Case):
    """One shape; `models` are those that have these heads."""

    models: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    nodes: int
    prefix: int
    batch: int

    @property
    def rows(self) -> int:
        """Valid cache rows, the tree's included."""
        return self.prefix + self.nodes

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    def bytes(self, element: int) -> int:
        """Count keys, values, queries and output once."""
        return element * self.batch * self.head_dim * (
            2 * self.kv_heads * self.rows + 2 * self.nodes * self.heads
        )  # fmt: skip

    def flop(self) -> int:
        """Count both matrix products, masked entries included."""
        return 4 * self.batch * self.nodes * self.heads * self.head_dim * self.rows


def cases() -> Iterator[Case]:
    """All cases, the most telling first."""
    axes = {
        "batch": (1, 4, 16),
        "nodes": (64, 1, 16, 256),
        "prefix": (8192, 32768, 1024, 131072),
        "model": tuple(HEADS),
    }
    for chosen in suite.by_rank(axes):
        name = chosen.pop("model")
        yield Case(tuple(name.split(", ")), *HEADS[name], **chosen)


@functools.cache
def tree(nodes: int) -> Tree:
    """A tree of a usual form: four heads whose drafts get worse with depth and rank."""
    return Tree.optimal([[0.6 * 0.75**head * 0.55**rank for rank in range(16)] for head in range(4)], nodes)


@functools.cache
def visible(nodes: int) -> Tensor:
    """Which nodes each node sees, bool `[N, N]`, from the tree's parents."""
    seen = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(tree(nodes).parents.tolist()):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


@dataclass
class Inputs:
    """One copy of a case's inputs; caches are sliced to the valid rows for the peers."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_lens: Tensor
    ancestors: Tensor
    rows: int

    @property
    def k(self) -> Tensor:
        """Valid keys `[B, Hkv, P + N, D]`."""
        return self.k_cache[:, :, : self.rows]

    @property
    def v(self) -> Tensor:
        """Valid values."""
        return self.v_cache[:, :, : self.rows]


def inputs(case: Case, run: suite.Run) -> Inputs:
    """Draw one copy of a case's inputs."""
    make = functools.partial(torch.empty, dtype=run.dtype, device=run.device)
    capacity = -(-case.rows // 64) * 64
    cache = make(2, case.batch, case.kv_heads, capacity, case.head_dim).normal_()
    return Inputs(
        make(case.batch, case.nodes, case.heads, case.head_dim).normal_(),
        cache[0],
        cache[1],
        torch.full((case.batch,), case.prefix, dtype=torch.int32, device=run.device),
        tree(case.nodes).ancestors.to(run.device),
        case.rows,
    )


def ours(x: Inputs) -> Tensor:
    """Our op."""
    return tree_attention(x.q, x.k_cache, x.v_cache, x.cache_lens, x.ancestors)


def prepare(case: Case, run: suite.Run) -> suite.Copy:
    """Draw one copy, for our op alone."""
    return suite.Copy({suite.OURS: functools.partial(ours, inputs(case, run))})


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then each peer that agrees with it."""
    element = run.dtype.itemsize
    cache_bytes = case.bytes(element)
    if cache_bytes > suite.MEMORY_CAP:
        run.skip(case, "all", f"{cache_bytes / 2**30:.0f} GiB of inputs, above the cap of this benchmark")
        return
    copies = [inputs(case, run) for _ in range(gpu.sets_needed(cache_bytes, run.device))]
    known = {"bytes": cache_bytes, "flop": case.flop()}

    def timed(name: str, way: Callable[[Inputs], Tensor], **more: Any) -> None:
        run.time(case, name, lambda i: functools.partial(way, copies[i]), len(copies), **known, **more)

    timed(suite.OURS, ours, **suite.served(OP, run.device))
    expected = ours(copies[0])
    peers: dict[str, Callable[[Case, suite.Run], Variants | str]] = {"sdpa": sdpa, "flashinfer": flashinfer}
    if case.nodes > 1:  # with one node sdpa has no mask
        peers["sdpa unmasked"] = sdpa_unmasked
    if run.limits.get("flex", 0) > 0 and run.left() > FLEX_SECONDS:
        run.limits["flex"] -= 1
        peers["flex"] = flex
    for name, prepare in peers.items():
        run.attempt(case, name, functools.partial(_peer, case, run, name, prepare, copies, expected, known))


Variants = dict[str, Attend]


def _on_copy(attend: Attend, copies: list[Inputs], i: int) -> gpu.Call:
    x = copies[i]
    return lambda: attend(x.q, x.k, x.v)


def _peer(
    case: Case,
    run: suite.Run,
    name: str,
    prepare: Callable[[Case, suite.Run], Variants | str],
    copies: list[Inputs],
    expected: Tensor,
    known: dict[str, int],
) -> None:
    """Check and time every variant of a peer; record the best, with the others' medians."""
    variants = prepare(case, run)
    if isinstance(variants, str):
        run.skip(case, name, variants)
        return
    timings: dict[str, gpu.Timing] = {}
    refused: dict[str, str] = {}
    errors: dict[str, float] = {}
    for variant, attend in variants.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = attend(copies[0].q, copies[0].k, copies[0].v)
                errors[variant] = float((out.float() - expected.float()).norm() / expected.float().norm())
                masked = "unmasked" not in name
                if masked and not run.agrees(case, f"{name} {variant}", errors[variant], TOLERANCE[run.dtype]):
                    continue
                del out
                timings[variant] = gpu.cold_replay(
                    functools.partial(_on_copy, attend, copies),
                    len(copies),
                    run.device,
                    seconds=run.seconds / 2,
                )
        except Exception as error:
            refused[variant] = f"{type(error).__name__}: {gpu.first_line(error)}"
            run.check_device(refused[variant])
    if not timings:
        run.skip(case, name, f"no variant ran: {refused}")
        return
    best = min(timings, key=lambda variant: timings[variant].median_us)
    others = {variant: round(timing.median_us, 1) for variant, timing in timings.items()}
    run.write_timing(
        case,
        name,
        timings[best],
        variant=best,
        variants_us=others,
        refused=refused,
        error=float(f"{errors[best]:.2e}"),
        **known,
    )


def float_mask(case: Case, run: suite.Run, group: int) -> Tensor | None:
    """Additive mask `[1, 1, N * group, P + N]`, its rows 16-element aligned as the kernels want; None for one node."""
    if case.nodes == 1:
        return None
    padded = torch.zeros(case.nodes, -(-case.rows // 16) * 16, dtype=run.dtype)
    padded[:, case.prefix : case.rows].masked_fill_(~visible(case.nodes), -torch.inf)
    return padded.to(run.device).repeat_interleave(group, dim=0)[None, None, :, : case.rows]


def _layouts(case: Case, mask_of: Callable[[int], Tensor | None]) -> dict[str, Attend]:
    """Return the two ways to give grouped heads to SDPA: `enable_gqa`, and packed into the rows of their KV head."""

    def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=case.group > 1)
        return out.transpose(1, 2)

    def packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        split = q.unflatten(2, (case.kv_heads, case.group)).transpose(1, 2).flatten(2, 3)
        out = scaled_dot_product_attention(split, k, v, attn_mask=mask)
        return out.unflatten(2, (case.nodes, case.group)).transpose(1, 2).flatten(2, 3)

    layouts: Variants = {"": functools.partial(grouped, mask=mask_of(1))}
    if case.group > 1:
        layouts = {"gqa": layouts[""], "packed": functools.partial(packed, mask=mask_of(case.group))}
    return layouts


def _backends(case: Case, masked: bool) -> dict[str, SDPBackend]:
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    if not masked:
        backends["flash"] = SDPBackend.FLASH_ATTENTION
    if (masked or case.nodes == 1) and case.batch * case.heads * case.nodes * case.rows <= MOST_LOGITS:
        backends["math"] = SDPBackend.MATH
    return backends


def _with_backends(case: Case, mask_of: Callable[[int], Tensor | None]) -> Variants:
    def run_on(attend: Attend, backend: SDPBackend) -> Attend:
        def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(q, k, v)

        return attended

    masked = mask_of(1) is not None
    backends = _backends(case, masked)
    return {
        " ".join(filter(None, (layout, name))): run_on(attend, backend)
        for layout, attend in _layouts(case, mask_of).items()
        for name, backend in backends.items()
    }


def sdpa(case: Case, run: suite.Run) -> Variants:
    """PyTorch's attention with an additive mask, every layout and backend (one node needs no mask)."""
    return _with_backends(case, functools.cache(lambda group: float_mask(case, run, group)))


def sdpa_unmasked(case: Case, run: suite.Run) -> Variants:
    """PyTorch's attention without any mask: the floor of this library."""
    variants = _with_backends(case, lambda group: None)
    return {name: attend for name, attend in variants.items() if "packed" not in name and "efficient" not in name}


def flex(case: Case, run: suite.Run) -> Variants:
    """FlexAttention with the tree as its mask function; compiled on a GPU."""
    seen = visible(case.nodes).to(run.device)
    prefix, last = case.prefix, case.nodes - 1

    def mask_mod(b: Tensor, h: Tensor, node: Tensor, row: Tensor) -> Tensor:
        return (row < prefix) | seen[node, (row - prefix).clamp(0, last)]

    block_mask = create_block_mask(mask_mod, None, None, case.nodes, case.rows, device=run.device.type)
    attend: Any = flex_attention
    if run.device.type == "cuda":
        # Each shape is its own compilation; without the reset, the limit of recompilations would end in eager code.
        torch._dynamo.reset()
        attend = torch.compile(flex_attention, dynamic=False)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(q.transpose(1, 2), k, v, block_mask=block_mask, enable_gqa=case.group > 1)
        return out.transpose(1, 2)

    return {"compiled" if run.device.type == "cuda" else "eager": attended}


def flashinfer(case: Case, run: suite.Run) -> Variants | str:
    """FlashInfer's single-request attention with a packed custom mask."""
    try:
        import flashinfer as library
    except ImportError:
        return "flashinfer is not installed"
    if case.batch > 1:
        return "FlashInfer is measured for one request"
    mask = torch.ones(case.nodes, case.rows, dtype=torch.bool)
    mask[:, case.prefix :] = visible(case.nodes)
    packed = library.packbits(mask.to(run.device).view(-1), bitorder="little")

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = library.single_prefill_with_kv_cache(q[0], k[0], v[0], packed_custom_mask=packed, kv_layout="HND")
        return out[None]

    return {"custom mask": attended}


SMALL = Case(("small",), heads=4, kv_heads=2, head_dim=64, nodes=16, prefix=512, batch=1)


def main() -> None:
    """Measure from the command line."""
    options = suite.parser(__doc__, 480)
    options.add_argument("--flex", type=int, default=14, help="cases that FlexAttention is compiled for (default: 14)")
    suite.main(__doc__, OP, cases(), measure, options=options, limits=("flex",))


if __name__ == "__main__":
    main()
