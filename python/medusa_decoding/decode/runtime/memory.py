"""Memory of a generation, computed before any of it is allocated, and how much a device has left.

Counted are the cache, the rotary tables, the state, and the activations of the widest pass; not the weights, which are
there already, and workspaces of kernels and libraries (some tens of MiB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.kv_cache import bucket
from medusa_decoding.decode.prefill import PREFILL_CHUNK
from medusa_decoding.linears.logits import logits_projection
from medusa_decoding.trees.tree import Tree
from medusa_kernels import served_by
from medusa_kernels.decode_linear import MOST_ROWS_CPU

UNCHECKED = 64 * 2**20
"""Bytes below which free memory is not checked: the check takes a fraction of a millisecond."""

STATE_BYTES = 8 + 4
"""Per new token that a row may get: its id, a step's count."""


@dataclass(frozen=True)
class Sizes:
    """What a generation's memory depends on, next to its model and its cache's rows.

    Attributes:
        prompt_lengths: tokens of each row's prompt.
        budget: the most new tokens that a row may get.
        nodes: N of the widest tree, root included; 1 for plain decoding.
        spare: cache rows that a step needs after a row's last token.
        logits: whether steps make the logits of all nodes (filters, processors). On a CPU other steps may, too.
        noise: rows of random numbers that a step makes for each sequence, one number per token; 0 if nothing is drawn.
        drafted: logits of the heads that a step stores for each sequence, see `MedusaHeads.stored_logits`.
        row_trees: whether every row has its own tree (a dynamic one), and so, on a CPU, its own mask.
    """

    prompt_lengths: list[int]
    budget: int
    nodes: int = 1
    spare: int = 0
    logits: bool = False
    noise: int = 0
    drafted: int = 0
    row_trees: bool = False

    @classmethod
    def for_trees(
        cls, prompt_lengths: list[int], budget: int, trees: Sequence[Tree], logits: bool = False, noise: int = 0,
        drafted: int = 0,
    ) -> Sizes:  # fmt: skip
        """Return the sizes of a generation whose steps verify some of these trees."""
        return cls(
            prompt_lengths,
            budget,
            nodes=max(tree.num_nodes for tree in trees),
            # A step writes a cache row per node, and may accept a whole path past the budget before it is cut.
            spare=max(tree.num_nodes + tree.depth for tree in trees),
            logits=logits,
            noise=noise,
            drafted=drafted,
            row_trees=any(tree.keep is not None for tree in trees),
        )


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a generation takes.

    Attributes:
        batch: B, sequences.
        rows: S, cache rows per sequence, rounded up as the cache's are.
        cache: keys and values of all layers.
        tables: the rotary tables.
        state: tokens and counters of the state.
        activations: of the widest pass, a chunk of the prefill or a step.
    """

    batch: int
    rows: int
    cache: int
    tables: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.cache + self.tables + self.state + self.activations

    @property
    def lasting(self) -> int:
        """All but the activations."""
        return self.total - self.activations

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{size(self.total)}: cache {size(self.cache)} ({self.batch} x {self.rows:,} rows), rotary tables "
            f"{size(self.tables)}, state {size(self.state)}, activations {size(self.activations)}"
        )


def size(count: int) -> str:
    """Format a number of bytes: "1.50 GiB", "12.0 MiB", "3.1 KiB"."""
    for unit, digits, factor in (("GiB", 2, 2**30), ("MiB", 1, 2**20)):
        if count >= factor:
            return f"{count / factor:,.{digits}f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def memory_use(backbone: Backbone, sizes: Sizes, rows: int, chunk: int = PREFILL_CHUNK) -> MemoryUse:
    """Return what a generation takes when it has written all it may.

    Args:
        backbone: the model.
        sizes: of the generation.
        rows: cache rows that a sequence needs.
        chunk: the most tokens that the prefill runs at once, all rows together.
    """
    capacity, item, batch = bucket(rows), backbone.dtype.itemsize, len(sizes.prompt_lengths)
    kv = backbone.kv_shape(batch, capacity)
    # Of a cache in 8 bits, a prefill copies one layer, of which keys or values are in fp32 meanwhile.
    copied = 0 if backbone.cache_dtype is None else batch * kv[3] * capacity * backbone.head_dim * (2 * item + 4)
    rotary = backbone.decoder.rotary_emb
    # One table per row if prompts of different lengths may scale it differently.
    tables = batch if "dynamic" in rotary.rope_type and capacity > rotary.original_max_seq_len else 1
    tables *= len(backbone.family.tables(backbone.config) or (0,))
    at_once = min(batch * max(sizes.prompt_lengths), max(chunk, batch))
    return MemoryUse(
        batch=batch,
        rows=capacity,
        cache=torch.Size(kv).numel() * backbone.kv_dtype.itemsize,
        tables=2 * tables * capacity * backbone.family.rotary_width(backbone.config, backbone.head_dim) * item,
        state=batch * (bucket(sizes.budget + 1) * STATE_BYTES + backbone.states_size * item),
        activations=max(_pass(backbone, at_once, item) + copied, _step(backbone, sizes, capacity, item)),
    )


def _pass(backbone: Backbone, rows: int, item: int) -> int:
    """Return the peak bytes of one layer's pass over `rows` rows: of its norms, its attention or its MLP."""
    config, head_dim = backbone.config, backbone.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    # Always live: the layer's input, the residual stream, its normed copy, features, and what the rotation reads.
    always = (2 * hidden + backbone.states_size + 2 * head_dim) * item + 16
    norm = 3 * hidden * 4  # in fp32: the input, its square, the product
    attention = (5 * q + 4 * kv) * item  # projected, rotated (with the products of the rotation), output and its copy
    mlp = 3 * inner * item  # two of gate, its activation and up, and their product
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:  # as many copies of the input and the output as a token has experts, and gate and up together
        own = getattr(config, "moe_intermediate_size", None) or inner
        shared = getattr(config, "shared_expert_intermediate_size", 0)
        mlp = max(mlp, (experts * (4 * own + 2 * hidden) + 3 * shared) * item)
    return rows * (always + max(norm, attention, mlp))


def _step(backbone: Backbone, sizes: Sizes, capacity: int, item: int) -> int:
    """Return the peak bytes of a step: of its pass or the logits after it, plus its noise and the CPU's mask."""
    config, on_cpu = backbone.config, backbone.device.type == "cpu"
    batch, nodes = len(sizes.prompt_lengths), sizes.nodes
    # Logits come with a copy in fp32, and with another one that selectors change, or with noise and their sum.
    stored = sizes.logits or (on_cpu and _verifies_by_logits(backbone, batch * nodes))
    added = 4 if sizes.logits else 8 if sizes.noise else 0
    wide = batch * nodes * backbone.vocab_size * (item + 4 * (item < 4) + added if stored else 0)
    wide = max(wide, batch * sizes.drafted * (item + 8))  # and in fp32, over the temperature
    noise = batch * sizes.noise * backbone.vocab_size * 4
    if not on_cpu or nodes == 1:
        return max(_pass(backbone, batch * nodes, item), wide) + noise
    groups = config.num_attention_heads // config.num_key_value_heads
    columns, masks = capacity, 1
    if sizes.row_trees:
        # Made at each step, with only the columns that are visible; masks of a static tree are made ahead.
        windows = [layer.self_attn.window or capacity for layer in backbone.decoder.layers]
        columns, masks = min(capacity, max(windows) + nodes), batch
    # While a mask is made: distances in int64 and two of bool, then one of bool, a float one and that for all heads.
    made = masks * nodes * columns * max(1 + item, 10 - groups * item)
    expanded = masks * nodes * columns * groups * item
    # PyTorch's attention holds the scores of 32 queries and 512 keys for each thread, in fp32 and in the dtype.
    scores = 0 if stored else torch.get_num_threads() * 32 * 512 * (4 + item * (item < 4))
    return max(_pass(backbone, batch * nodes, item) + made + scores, wide) + expanded + noise


def _verifies_by_logits(backbone: Backbone, rows: int) -> bool:
    """Return whether `tree_verify` of `rows` nodes on a CPU stores their logits: whether PyTorch serves it."""
    native = served_by("tree_verify", "cpu").name == "cpp" and logits_projection(backbone.lm_head)[0] is not None
    return not native or rows > MOST_ROWS_CPU or backbone.dtype == torch.float16


def available(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None if unknown.

    CUDA: what the driver has free plus what PyTorch's allocator holds unused. CPU: what the kernel reports as
    available, limited by each control group above this process.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "cpu":
        return host_memory()
    return None


def host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this process may still take of the host's memory, or None.

    Args:
        proc: where the kernel's process files are.
        groups: where the control groups (version 2) are.
    """
    bounds = []
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            bounds.append(int(value.split()[0]) * 1024)
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers:  # version 1
            continue
        # In a container the path may be the host's, of which only the root is visible here.
        inner = groups / path.lstrip("/")
        for folder in (inner, *inner.parents):
            bounds += _left_in(folder)
            if folder == groups:
                break
    return max(0, min(bounds)) if bounds else None


def _left_in(folder: Path) -> list[int]:
    """Return the bytes that one control group leaves, as a list that is empty if it sets no limit."""
    limits, used = _lines(folder / "memory.max"), _lines(folder / "memory.current")
    if not limits or not used or limits[0] == "max":
        return []
    # Inactive pages of files count as used, and are reclaimed first.
    files = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith("inactive_file ")]
    return [int(limits[0]) - int(used[0]) + sum(files)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
