"""The paper's simplified block (Medusa paper, appendix G.3): its operators, and the simulation of a step made of one.

Unlike a step of this project it has no output projection, lm_head or heads, and attention's scores go to memory.
"""

from __future__ import annotations

from benchmarks.simulator.operators import Operator, linear
from benchmarks.simulator.shapes import ModelShape
from benchmarks.simulator.simulate import Simulation


class BlockSimulation(Simulation):
    """A simulation of the simplified block instead of a whole step; heads cost nothing."""

    def operators(self, batch: int, sequence: int, nodes: int) -> list[Operator]:
        """Return the operators of a step; one node is a plain step."""
        return block_operators(self.shape, batch, nodes, sequence)


def block_operators(shape: ModelShape, batch: int, tokens: int, sequence: int) -> list[Operator]:
    """Return the paper's simplified block (appendix G.3), run in this order; scores go to memory and come back.

    Args:
        shape: of the model; as in the paper every query head has keys and values of its own.
        batch: b.
        tokens: q: 1 for plain decoding, the candidates for Medusa, s itself for the prefill.
        sequence: s, keys that each token sees.
    """
    rows, width = batch * tokens, shape.heads * shape.head_dim
    return [
        linear("qkv", rows, shape.hidden, width, 3),
        attention_product("qk", batch, tokens, sequence, shape.heads, shape.head_dim),
        attention_product("pv", batch, tokens, sequence, shape.heads, shape.head_dim),
        linear("up/gate", rows, shape.hidden, shape.intermediate, 2),
        linear("down", rows, shape.intermediate, shape.hidden),
    ]


def attention_product(name: str, batch: int, tokens: int, sequence: int, heads: int, head_dim: int) -> Operator:
    """Return one of the two products of attention, its scores in memory (table 5).

    2 b s q n d operations; b s q n + b (s + q) n d elements, with q = `tokens` queries over s = `sequence` keys.
    """
    scores = batch * sequence * tokens * heads
    rows = batch * (sequence + tokens) * heads * head_dim
    return Operator(name, "attention", batch * tokens, 2 * scores * head_dim, 0, scores + rows)
