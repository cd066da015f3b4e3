"""The operators of a decoding step and their roofline times (Medusa paper, appendix G.1, table 5).

An operator is a number of operations and of elements moved. Its time on a device is the longer of the times that its
arithmetic and its bytes take. `step_operators` lists those of a whole step as this project runs it. A tree is only a
number of nodes here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from benchmarks.simulator.devices import Device
from benchmarks.simulator.shapes import HeadShape, ModelShape

Kind = Literal["linear", "attention"]


@dataclass(frozen=True)
class Operator:
    """One operator, or several equal ones in sequence.

    Attributes:
        name: what it computes.
        kind: linear (weights) or attention (no weights).
        rows: rows of the product's left side: batch times tokens.
        flops: operations of one; a multiply-add counts as two.
        weights: elements of weights that one reads.
        activations: elements of activations, keys and values that one reads and writes.
        times: how many there are.
    """

    name: str
    kind: Kind
    rows: int
    flops: int
    weights: int
    activations: int
    times: int = 1

    def bytes(self, element: float = 2, weight: float | None = None) -> float:
        """Return the bytes that one moves: `element` per activation, `weight` per weight (default: the same)."""
        return self.activations * element + self.weights * (element if weight is None else weight)

    def seconds(self, device: Device, weight: float | None = None) -> float:
        """Return the roofline time of all `times` of them.

        Args:
            device: peaks, and what is attained of them; activations are of its dtype.
            weight: bytes per weight; None for the device's dtype.
        """
        attained = device.linear if self.kind == "linear" else device.attention
        computed = self.flops / self.rows * math.ceil(self.rows / attained.tile) * attained.tile
        arithmetic = computed / (device.flops * attained.compute)
        memory = self.bytes(device.element_bytes, weight) / (device.bandwidth * attained.bandwidth)
        return self.times * (attained.fixed_us * 1e-6 + max(arithmetic, memory))


def linear(name: str, rows: int, inputs: int, outputs: int, times: int = 1, stored: bool = True) -> Operator:
    """Return a projection of `rows` rows: 2 r in out operations, in out weights, r (in + out) activations.

    Args:
        name: what it computes.
        rows: r, batch times tokens.
        inputs: width of a row before.
        outputs: width of a row after.
        times: how many there are.
        stored: whether the result goes to memory.
    """
    moved = rows * (inputs + (outputs if stored else 0))
    return Operator(name, "linear", rows, 2 * rows * inputs * outputs, inputs * outputs, moved, times)


def fused_attention(name: str, batch: int, tokens: int, keys: int, shape: ModelShape, times: int = 1) -> Operator:
    """Return attention in one pass: both products, keys and values read once, scores never in memory."""
    flops = 4 * batch * tokens * keys * shape.heads * shape.head_dim
    moved = 2 * batch * (keys * shape.kv_heads + tokens * shape.heads) * shape.head_dim
    return Operator(name, "attention", batch * tokens, flops, 0, moved, times)


def step_operators(shape: ModelShape, heads: HeadShape | None, batch: int, nodes: int, prefix: int) -> list[Operator]:
    """Return a whole step: lm_head at every node without stored logits, the heads at the accepted node.

    Every token sees every key: sliding windows are not modelled. Not counted: norms, rotary embedding, residual sums,
    the embedding's rows, acceptance and the cache's compaction.

    Args:
        shape: of the model.
        heads: of Medusa; None for a plain step.
        batch: sequences.
        nodes: of the tree, root included; 1 for a plain step.
        prefix: cached rows a sequence.

    Raises:
        ValueError: a trimmed vocabulary larger than the model's.
    """
    rows, layers = batch * nodes, shape.layers
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    operators = [
        linear("qkv", rows, shape.hidden, queries + 2 * keys, layers),
        fused_attention("attention", batch, nodes, prefix + nodes, shape, layers),
        linear("output", rows, queries, shape.hidden, layers),
        linear("up/gate", rows, shape.hidden, 2 * shape.intermediate, layers),
        linear("down", rows, shape.intermediate, shape.hidden, layers),
        linear("lm_head", rows, shape.hidden, shape.vocabulary, stored=False),
    ]
    if heads is None:
        return operators
    vocabulary = shape.vocabulary if heads.vocabulary is None else heads.vocabulary
    if vocabulary > shape.vocabulary:
        raise ValueError(f"heads: expected a vocabulary of at most {shape.vocabulary}, got {vocabulary}")
    # All heads in one launch: their weights side by side.
    if heads.root_rank:
        operators.append(linear("root", batch, shape.hidden, heads.root_rank))
        operators.append(linear("head roots", batch, heads.root_rank, heads.count * shape.hidden))
    operators.append(linear("head blocks", batch, shape.hidden, heads.count * heads.layers * shape.hidden))
    if heads.shared:
        projected = linear("head projections", batch * heads.count, shape.hidden, vocabulary, stored=False)
    else:
        projected = linear("head projections", batch, shape.hidden, heads.count * vocabulary, stored=False)
    return [*operators, projected]


def total_seconds(operators: Iterable[Operator], device: Device, weight: float | None = None) -> float:
    """Return the time of operators that run in sequence; see `Operator.seconds`."""
    return sum(operator.seconds(device, weight) for operator in operators)
