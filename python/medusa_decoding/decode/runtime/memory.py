"""Memory of a generation: what it will take, stated before any of it is allocated, and what a device has left.

Counted are tensors: the cache, the rotary tables, what steps carry along, and the activations of the widest pass. Not
counted are the weights, which are there already, and workspaces of kernels and libraries (some tens of MiB). This
module knows the sizes of a model and the files that a Linux kernel tells memory in; it does not know who allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.kv_cache import bucket

UNCHECKED = 64 * 2**20
"""Bytes up to which nobody asks whether they are there: asking takes a fraction of a millisecond."""

STATE_BYTES = 8 + 4 + 8
"""Of each new token that a row may get: its id, a step's count, a uniform number."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a generation takes.

    Attributes:
        batch: B, sequences.
        rows: S, cache rows a sequence, rounded up as the cache is.
        cache: keys and values of all layers.
        tables: the rotary tables.
        state: tokens and counters that steps carry along.
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
        """All of it."""
        return self.cache + self.tables + self.state + self.activations

    @property
    def lasting(self) -> int:
        """What stays from pass to pass."""
        return self.total - self.activations

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{size(self.total)}: cache {size(self.cache)} ({self.batch} x {self.rows:,} rows), rotary tables "
            f"{size(self.tables)}, state {size(self.state)}, activations {size(self.activations)}"
        )


def size(count: int) -> str:
    """Word a number of bytes: "1.50 GiB", "12.0 MiB", "3.1 KiB"."""
    for unit, digits, factor in (("GiB", 2, 2**30), ("MiB", 1, 2**20)):
        if count >= factor:
            return f"{count / factor:,.{digits}f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def estimate(
    backbone: Backbone,
    batch: int,
    prompt: int,
    new_tokens: int,
    nodes: int,
    chunk: int,
    *,
    depth: int = 0,
    logits: bool = False,
    own_trees: bool = False,
) -> MemoryUse:
    """State what a generation takes once it has written all it may.

    Args:
        backbone: the model.
        batch: B, sequences.
        prompt: tokens of the longest prompt.
        new_tokens: new tokens a row.
        nodes: N of the tree that steps verify, root included; 1 for plain decoding.
        chunk: tokens that the prefill runs at once, all rows together.
        depth: of the tree.
        logits: whether a step makes the logits of all nodes (sampling, processors). On a CPU it always does.
        own_trees: whether every row has a tree of its own (a dynamic one), and so, on a CPU, a mask.
    """
    rows = prompt + new_tokens + nodes + depth
    return use_of_rows(backbone, batch, rows, new_tokens, min(chunk, batch * prompt), nodes, logits, own_trees)


def use_of_rows(
    backbone: Backbone,
    batch: int,
    rows: int,
    budget: int,
    at_once: int,
    nodes: int = 1,
    logits: bool = False,
    own_trees: bool = False,
) -> MemoryUse:
    """State what a generation takes in a cache of at least `rows` rows a sequence.

    Args:
        backbone: the model.
        batch: B, sequences.
        rows: cache rows a sequence needs.
        budget: new tokens a row may get at most.
        at_once: tokens of the prefill's widest chunk, all rows together.
        nodes: N of the widest tree.
        logits: whether a step makes the logits of all nodes.
        own_trees: whether every row has a tree of its own.
    """
    capacity, item = bucket(rows), backbone.dtype.itemsize
    kv = backbone.kv_shape(batch, capacity)
    rotary = backbone.decoder.rotary_emb
    # One table a row where prompts of different lengths may scale it differently.
    own = batch if "dynamic" in rotary.rope_type and capacity > rotary.original_max_seq_len else 1
    return MemoryUse(
        batch=batch,
        rows=capacity,
        cache=torch.Size(kv).numel() * item,
        tables=2 * own * capacity * kv[-1] * item,
        state=batch * (bucket(budget + 1) * STATE_BYTES + backbone.config.hidden_size * item),
        activations=max(
            _pass(backbone, at_once, item), _step(backbone, batch, nodes, capacity, item, logits, own_trees)
        ),
    )


def _pass(backbone: Backbone, rows: int, item: int) -> int:
    """Bytes of the widest place of one layer's pass over `rows` rows: its norms, its attention or its MLP."""
    config, head_dim = backbone.config, backbone.decoder.layers[0].self_attn.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    # Beside everything live the layer's input, the residual stream and its normed copy, and what the rotation reads.
    beside = (3 * hidden + 2 * head_dim) * item + 16
    norm = 3 * hidden * 4  # in fp32: the input, its square, the product
    attention = (5 * q + 4 * kv) * item  # projected, rotated (with the products of the rotation), output and its copy
    mlp = 3 * inner * item  # two of gate, its activation and up, and their product
    return rows * (beside + max(norm, attention, mlp))


def _step(backbone: Backbone, batch: int, nodes: int, capacity: int, item: int, logits: bool, own_trees: bool) -> int:
    """Bytes of the widest place of a step: its pass, or the logits behind it, beside the CPU's mask of the tree."""
    config, on_cpu = backbone.config, backbone.device.type == "cpu"
    # Logits come with a copy in fp32, and another one to change where they are asked for.
    width = item + 4 * (item < 4) + 4 * logits if logits or on_cpu else 0
    wide = batch * nodes * backbone.vocab_size * width
    if not on_cpu or nodes == 1:
        return max(_pass(backbone, batch * nodes, item), wide)
    groups = config.num_attention_heads // config.num_key_value_heads
    columns, masks = capacity, 1
    if own_trees:
        # Made anew at each step, of no more columns than are seen; those of a static tree look ahead.
        windows = [layer.self_attn.window or capacity for layer in backbone.decoder.layers]
        columns, masks = min(capacity, max(windows) + nodes), batch
    made, kept = masks * nodes * columns * (1 + item), masks * nodes * columns * groups * item
    return max(_pass(backbone, batch * nodes, item) + made, wide) + kept


def available(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None where nobody tells.

    CUDA: what the driver has free and what PyTorch's allocator holds without using it. CPU: what the kernel takes for
    available, and no more than each control group above this process leaves.
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
        groups: where the control groups (version 1 or 2) are.
    """
    bounds = []
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            bounds.append(int(value.split()[0]) * 1024)
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, root = ("memory.max", "memory.current", "inactive_file"), groups
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = groups / "memory"
        else:
            continue
        # In a container the path may be the host's, of which only the root is to be seen here.
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            bounds += _left_in(folder, *names)
            if folder == root:
                break
    return max(0, min(bounds)) if bounds else None


def _left_in(folder: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Return the bytes that one control group leaves, in a list that is empty where it sets no limit."""
    limits, used = _lines(folder / limit), _lines(folder / usage)
    if not limits or not used or limits[0] == "max":
        return []
    # Pages of files that nobody has used lately count as used, and are given up first.
    files = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(reclaimable + " ")]
    return [int(limits[0]) - int(used[0]) + sum(files)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
