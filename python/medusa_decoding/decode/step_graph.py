"""How a step is run: eagerly, or as one compiled graph.

Both run the same Python (`loop.decode_step`). A compiled step fuses the model's small operations and removes the
interpreter's cost between them; on a CPU, freezing also packs the weights for the step's own row count. Compilation
takes seconds a tree and needs a C++ compiler (CPU) or Triton (CUDA), so it is asked for, never assumed. Steps are kept
a tree; shapes that differ (batch, cache capacity) are compiled once each.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from medusa_decoding.decode.arrange import TreeOnDevice
from medusa_decoding.decode.loop import Step, decode_step, plain_step
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

    def get(self, tree: Tree, backend: Backend) -> Step:
        """Return the step for a tree.

        Raises:
            ValueError: an unknown backend.
        """
        if backend not in ("eager", "compiled"):
            raise ValueError(f"backend: expected 'eager' or 'compiled', got {backend!r}")
        key = (tree, backend, self.trunk.device)
        if key not in self._made:
            self._made[key] = self._make(tree, backend)
        return self._made[key]

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

        def call(state, rules):  # type: ignore[no-untyped-def]  # dynamo cannot start at a functools.partial
            step(state, rules)

        options: dict[str, Any] = {"freezing": True} if self.trunk.device.type == "cpu" else {}
        return torch.compile(call, fullgraph=True, dynamic=False, options=options)
