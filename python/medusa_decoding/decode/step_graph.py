"""How a step is run: eagerly, or as one compiled graph.

Both run the same Python (`loop.decode_step`). A compiled step fuses the model's small operations and removes the
interpreter's cost between them; on a CPU, freezing also packs the weights for the step's own row count. Compilation
takes seconds and needs a C++ compiler (CPU) or Triton (CUDA), so it is asked for, never assumed. Each tree and each set
of shapes (batch, cache bucket, output bucket, EOS tokens) gets a graph of its own, compiled when first met; graphs are
thrown away when weights have changed.
"""

from __future__ import annotations

import functools
import types
from typing import Literal

import torch
from torch import _inductor as inductor

from medusa_decoding.decode.arrange import TreeOnDevice
from medusa_decoding.decode.loop import Step, decode_step, plain_step
from medusa_decoding.decode.state import DecodeState, StopRules
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.tree import Tree
from medusa_decoding.trunk import Trunk

Backend = Literal["eager", "compiled"]


class Steps:
    """The steps of one model: made at first use a tree and backend, then reused."""

    def __init__(self, trunk: Trunk, heads: MedusaHeads | None) -> None:
        self.trunk = trunk
        self.heads = heads
        self._made: dict[tuple[Tree, str, torch.device], Step] = {}
        self._compiled_for: tuple[tuple[int, int], ...] = ()

    def get(self, tree: Tree, backend: Backend) -> Step:
        """Return the step for a tree.

        Raises:
            ValueError: an unknown backend.
        """
        if backend not in ("eager", "compiled"):
            raise ValueError(f"backend: expected 'eager' or 'compiled', got {backend!r}")
        if backend == "compiled":
            weights = self._weights()
            if weights != self._compiled_for:
                self._made = {key: step for key, step in self._made.items() if key[1] != "compiled"}
                self._compiled_for = weights
        key = (tree, backend, self.trunk.device)
        if key not in self._made:
            self._made[key] = self._make(tree, backend)
        return self._made[key]

    def _weights(self) -> tuple[tuple[int, int], ...]:
        """Tell states of the weights apart, by address and version (writes through `.data` leave no trace)."""
        modules = [self.trunk.causal] + ([self.heads] if self.heads is not None else [])
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)

    def _make(self, tree: Tree, backend: Backend) -> Step:
        shape = TreeOnDevice.make(tree, self.trunk.device)
        step: Step
        if tree.num_nodes == 1:
            step = functools.partial(plain_step, self.trunk, shape)
        else:
            assert self.heads is not None, "trees beyond the root are checked against the heads before steps are made"
            step = functools.partial(decode_step, self.trunk, self.heads, shape)
        if backend == "eager":
            return step

        return CompiledStep(step, freeze=self.trunk.device.type == "cpu")


class CompiledStep:
    """A step compiled once for each set of shapes it meets.

    Args:
        step: the eager step.
        freeze: treat the weights as constants (CPU), which lets the compiler pack them for the step's row count.
    """

    def __init__(self, step: Step, freeze: bool) -> None:
        self.step = step
        self.freeze = freeze
        self._graphs: dict[tuple[object, ...], Step] = {}

    def __call__(self, state: DecodeState, rules: StopRules) -> None:
        """Run the step in place."""
        cache = state.cache
        key = (cache.kv.shape, cache.cos.shape, state.output.shape, rules.eos.shape, rules.min_new is None)
        if key in self._graphs:
            self._graphs[key](state, rules)
            return
        graph = self._compile()
        # Whether weights are constants is decided while the function is traced, which is now.
        with inductor.config.patch(freezing=self.freeze):
            graph(state, rules)
        self._graphs[key] = graph

    def _compile(self) -> Step:
        step = self.step

        def call(state: DecodeState, rules: StopRules) -> None:
            step(state, rules)

        # Dynamo keeps its graphs with the code object and gives up behind a few of them: each graph gets its own.
        code = call.__code__.replace(co_name=f"compiled_step_{id(self)}_{len(self._graphs)}")
        fresh = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
        return torch.compile(fresh, fullgraph=True, dynamic=False)
