"""Which step runs for a tree: eager, compiled or captured as a CUDA graph; all run `loop.decode_step`.

Each tree, set of shapes (batch, cache bucket, output bucket, EOS tokens) and kind of token selection gets its own graph
when it is first met. Graphs are dropped when weights have moved or changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.tensor_parallel import is_sharded
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.loop import Step, decode_step, plain_step
from medusa_decoding.decode.runtime.compiled import CompiledStep
from medusa_decoding.decode.runtime.cuda_graph import CapturedStep
from medusa_decoding.decode.runtime.state_pool import StatePool
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.options import BACKENDS
from medusa_decoding.trees.tree import Tree

Backend = Literal["auto", "eager", "compiled", "graph"]
KEPT_STEPS = 16
"""How many recent steps (one per tree) a model caches."""
KEPT_STATES = 2
"""States, with their captured steps, that a model keeps however large they are: a small and a grown cache, say."""


def resolve_backend(backend: Backend, device: torch.device, processes: int = 1) -> Backend:
    """Return what a backend means on a device: "auto" is "graph" on CUDA and "eager" elsewhere.

    A tensor parallel model's steps run eagerly, since they hold collectives.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected 'auto', 'eager', 'compiled' or 'graph', got {backend!r}")
    if processes > 1:
        if backend not in ("auto", "eager"):
            raise ValueError(f"backend: expected 'auto' or 'eager' for a tensor parallel model, got {backend!r}")
        return "eager"
    if backend == "auto":
        return "graph" if device.type == "cuda" else "eager"
    if backend == "graph" and device.type != "cuda":
        raise ValueError(f"backend: expected 'auto', 'eager' or 'compiled' on {device.type}, got 'graph'")
    return backend


def is_made(step: Step, state: DecodeState, selector: TokenSelector, limits: Limits) -> bool:
    """Return whether a step can run over a state as it is, without being compiled or captured first."""
    return not isinstance(step, CapturedStep | CompiledStep) or step.is_made(state, selector, limits)


class Steps:
    """The steps of one model, cached by tree and backend, and the pool of the states they run on."""

    def __init__(self, backbone: Backbone, heads: MedusaHeads | None) -> None:
        self.backbone = backbone
        self.heads = heads
        self.pool = StatePool(backbone, KEPT_STATES)
        self._made: dict[tuple[Tree, str, torch.device], Step] = {}
        self._made_for: tuple[object, ...] = ()

    def get(self, tree: Tree, backend: Backend) -> Step:
        """Return the step for a tree; see `prepare`."""
        return self.prepare(backend)(tree)

    def prepare(self, backend: Backend) -> Callable[[Tree], Step]:
        """Check the model for changes, once per generation before its prefill; return a function from tree to step."""
        backend = resolve_backend(backend, self.backbone.device, self.backbone.peers.size)
        if backend != "eager":
            model = self.fingerprint()
            if model != self._made_for:
                self.clear()
                self._made_for = model
        if self.backbone.choose_layers(captured=backend == "graph", traced=backend == "compiled"):
            stale = "compiled" if self.backbone.device.type == "cpu" else "graph"
            for key in [key for key in self._made if key[1] == stale]:
                self._drop(key)
        self.pool.keep = KEPT_STATES if self._captures(backend) else 0
        met: dict[int, tuple[Tree, Step]] = {}  # by id: a tree's hash takes as long as some steps

        def step_for(tree: Tree) -> Step:
            if id(tree) not in met:
                key = (tree, backend, self.backbone.device)
                step = self._made.pop(key, None) or self._make(tree, backend)
                self._made[key] = step  # the last entry is the most recent one
                if len(self._made) > KEPT_STEPS:
                    oldest = next(iter(self._made))
                    for known in [known for known, (other, _) in met.items() if other == oldest[0]]:
                        del met[known]
                    self._drop(oldest)
                met[id(tree)] = tree, step
            return met[id(tree)][1]

        return step_for

    def _drop(self, key: tuple[Tree, str, torch.device]) -> None:
        self.pool.forget(self._made.pop(key))

    def clear(self) -> None:
        """Free what is kept between generations: caches, compiled and captured steps."""
        self._made.clear()
        self.pool.clear()

    def fingerprint(self) -> tuple[object, ...]:
        """Return what changes whenever compiled or captured steps, or cached keys and values, would no longer be right.

        Weights by address and version (writes through `.data` leave no trace); modules by identity, mode, hooks, and
        which of peft's adapters they apply, how strongly.
        """
        roots = [self.backbone.causal_lm] + ([self.heads] if self.heads is not None else [])
        modules = [module for root in roots for module in root.modules()]
        tensors: list[Any] = [t for root in roots for t in (*root.parameters(), *root.buffers())]
        places = ((t.to_local() if is_sharded(t) else t).data_ptr() for t in tensors)
        versions = (0 if t.is_inference() else t._version for t in tensors)
        return (
            *zip(map(id, tensors), places, versions, strict=True),
            *(_module_state(module) for module in modules),
        )

    def _captures(self, backend: str) -> bool:
        return backend == "graph" or (backend == "compiled" and self.backbone.device.type == "cuda")

    def _make(self, tree: Tree, backend: Backend) -> Step:
        plain = tree.num_nodes == 1
        tensors = TreeTensors.from_tree(Tree([]) if plain else tree, self.backbone.device)
        step: Step = (
            functools.partial(plain_step, self.backbone, tensors)
            if plain
            else functools.partial(decode_step, self.backbone, self.heads, tensors)
        )
        if backend == "compiled":
            step = CompiledStep(step, freeze=self.backbone.device.type != "cuda")
        return CapturedStep(step, tree.num_nodes) if self._captures(backend) else step


def _module_state(module: torch.nn.Module) -> tuple[object, ...]:
    own = vars(module)
    return (
        id(module),
        module.training,
        tuple(module._forward_hooks),
        tuple(module._forward_pre_hooks),
        id(own.get("forward")),
        own.get("_disable_adapters"),
        str(own.get("_active_adapter")),
        str(own.get("merged_adapters")),
        str(own.get("scaling")),
    )
