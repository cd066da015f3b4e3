"""How a step is run: eagerly, compiled, or as one captured graph.

All run the same Python (`loop.decode_step`). A captured step (CUDA) is that Python recorded once as a CUDA graph and
replayed, so that the host launches one thing a step. A compiled step goes through torch.compile, which fuses the
model's small operations; on a CPU, freezing also packs the weights for the step's own row count; on CUDA the compiled
step is captured as well. Compilation takes seconds to minutes, so it is asked for, never assumed. Each tree and each
set of shapes (batch, cache bucket, output bucket, EOS tokens), and each way of choosing tokens, gets a graph of its
own, made when first met; graphs are thrown away when weights have moved or changed. Where the host chooses tokens
(logits processors), a captured step is two graphs with the host's choice between them, and a compiled one runs eagerly.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import _inductor as inductor
from torch._C._dynamo.eval_frame import reset_code

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.fused_layers import obstacle
from medusa_decoding.decode.arrange import TreeOnDevice
from medusa_decoding.decode.loop import Step, decode_step, plain_step
from medusa_decoding.decode.runtime.state_pool import StatePool
from medusa_decoding.decode.selection.processors import Processed
from medusa_decoding.decode.state import DecodeState, Rules
from medusa_decoding.decode.verify import Nodes
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.trees.tree import Tree

logger = logging.getLogger(__name__)

Backend = Literal["auto", "eager", "compiled", "graph"]
BACKENDS = ("auto", "eager", "compiled", "graph")
KEPT_STEPS = 16
"""Steps (a tree each) that a model keeps, and graphs that a state or a compiled step keeps: the most recent ones."""
KEPT_STATES = 2
"""States, and with them captured steps, that a model keeps between generations: a small and a grown cache, say."""


def resolve_backend(backend: Backend, device: torch.device, processes: int = 1) -> Backend:
    """Return what a backend means on a device: "auto" is "graph" on CUDA and "eager" elsewhere.

    A tensor parallel model's steps run eagerly: they hold collectives, launched by transformers' Python around every
    sharded module, which have never been captured or compiled here.

    Raises:
        ValueError: an unknown backend, or one that the device, or a model sharded over several processes, cannot run.
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


class Steps:
    """The steps of one model: made at first use a tree and backend, then reused; and the pool they run in."""

    def __init__(self, backbone: Backbone, heads: MedusaHeads | None) -> None:
        self.backbone = backbone
        self.heads = heads
        self.pool = StatePool(backbone, KEPT_STATES)
        self._made: dict[tuple[Tree, str, torch.device], Step] = {}
        self._made_for: tuple[object, ...] = ()
        self._why_not_fused: str | None = None

    def get(self, tree: Tree, backend: Backend) -> Step:
        """Return the step for a tree.

        Raises:
            ValueError: an unknown backend, or one that the device cannot run.
        """
        return self.of_generation(backend)(tree)

    def of_generation(self, backend: Backend) -> Callable[[Tree], Step]:
        """Look at the model once, before a generation's prefill; return what gives each tree its step.

        Raises:
            ValueError: an unknown backend, or one that the device cannot run.
        """
        processes = self.backbone.peers.size
        backend = resolve_backend(backend, self.backbone.device, processes)
        if processes > 1 and self._why_not_fused is None:
            self._why_not_fused = f"tensor parallel over {processes} processes"
            logger.info("steps: eager, layers module by module (%s)", self._why_not_fused)
        if backend != "eager":
            model = self.fingerprint()
            if model != self._made_for:
                self.clear()
                self._made_for = model
        self._choose_layers(backend)
        self.pool.keep = KEPT_STATES if backend != "eager" and self.backbone.device.type == "cuda" else 0
        met: dict[int, tuple[Tree, Step]] = {}  # a tree's hash takes as long as some steps

        def step_of(tree: Tree) -> Step:
            if id(tree) not in met:
                met[id(tree)] = tree, self._kept(tree, backend)
            return met[id(tree)][1]

        return step_of

    def _kept(self, tree: Tree, backend: Backend) -> Step:
        key = (tree, backend, self.backbone.device)
        step = self._made.pop(key, None) or self._make(tree, backend)
        self._made[key] = step
        if len(self._made) > KEPT_STEPS:
            self._drop(next(iter(self._made)))
        return step

    def _choose_layers(self, backend: Backend) -> None:
        """Have captured steps run fused layers wherever the model allows it; whether and why not is logged once."""
        why_not = None
        if backend == "graph":
            why_not = obstacle(self.backbone.decoder)
            if self._why_not_fused != (why_not or ""):
                self._why_not_fused = why_not or ""
                logger.info("layers: %s", f"module by module ({why_not})" if why_not else "fused (plain modules)")
        fuse = backend == "graph" and why_not is None
        if fuse != self.backbone.fuse:
            self.backbone.fuse = fuse
            for key in [key for key in self._made if key[1] == "graph"]:
                self._drop(key)

    def _drop(self, key: tuple[Tree, str, torch.device]) -> None:
        self.pool.forget(self._made.pop(key))

    def clear(self) -> None:
        """Free what is kept between generations: caches, compiled and captured steps."""
        self._made.clear()
        self.pool.clear()

    def fingerprint(self) -> tuple[object, ...]:
        """Tell states of the model apart that a compiled or captured step would differ by.

        Weights by address and version (writes through `.data` leave no trace); modules by identity, mode, hooks, and
        which of peft's adapters they apply, how strongly.
        """
        roots = [self.backbone.causal] + ([self.heads] if self.heads is not None else [])
        modules = [module for root in roots for module in root.modules()]
        tensors = [t for root in roots for t in (*root.parameters(), *root.buffers())]
        return (
            *((id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors),
            *(_module_state(module) for module in modules),
        )

    def _make(self, tree: Tree, backend: Backend) -> Step:
        step: Step
        if tree.num_nodes == 1:
            step = functools.partial(plain_step, self.backbone, TreeOnDevice.make(Tree([]), self.backbone.device))
        else:
            step = functools.partial(
                decode_step, self.backbone, self.heads, TreeOnDevice.make(tree, self.backbone.device)
            )
        on_gpu = self.backbone.device.type == "cuda"
        if backend == "compiled":
            step = CompiledStep(step, freeze=not on_gpu)
        return CapturedStep(step, tree.num_nodes) if on_gpu and backend != "eager" else step


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


@dataclass(eq=False)
class Captured:
    """One captured step and the rules that it reads.

    Attributes:
        graphs: one, or two where the host chooses tokens in between.
        rules: the tensors that the graphs read.
        source: the rules last copied into them. They belong to a generation, and end with it.
        pause: what the host's choice is given and fills in, between two graphs.
    """

    graphs: tuple[torch.cuda.CUDAGraph, ...]
    rules: Rules
    source: weakref.ref[Rules]
    pause: HostSelection | None


class HostSelection:
    """Takes the place of a choice made on the host: makes the logits that it needs, and then calls `split`.

    Args:
        next_tokens: int64 [B, N], where the step reads the choice; allocated outside of the capture.

    Attributes:
        split: ends the first graph and begins the second; does nothing until a capture sets it.
    """

    key = "pause"
    on_host = False

    def __init__(self, next_tokens: torch.Tensor) -> None:
        self.next_tokens = next_tokens
        self.split: Callable[[], None] = lambda: None
        self.logits: torch.Tensor | None = None
        self.nodes: Nodes | None = None

    def __call__(self, nodes: Nodes, lm_head: torch.nn.Module, state: DecodeState, rules: Rules) -> torch.Tensor:
        """Make the logits, split, and return the tensor that the choice will be written to."""
        self.nodes, self.logits = nodes, lm_head(nodes.hidden)
        self.split()
        return self.next_tokens

    def choose(self, state: DecodeState, rules: Rules) -> None:
        """Between two replays: let the host choose."""
        assert isinstance(rules.choice, Processed)
        assert self.nodes is not None
        assert self.logits is not None
        self.next_tokens.copy_(rules.choice.walk(self.logits, self.nodes.tokens, self.nodes.shape, state))


class CapturedStep:
    """A step captured once for each state it meets, as a CUDA graph over the state's own tensors.

    Some quantised layers read device data on the host and cannot be captured: by their sources (never run here),
    bitsandbytes' 8-bit layers unless `llm_int8_threshold=0.0` (are there outliers?), and dynamic int8 of torchao up to
    0.18, which prints its input to find out whether it is traced. Its weight-only layers and 4-bit ones read nothing.

    Args:
        step: the step to capture. It reads nothing back to the host and its shapes depend on no data.
        nodes: the tree's nodes.
    """

    def __init__(self, step: Step, nodes: int) -> None:
        self.step = step
        self.nodes = nodes
        self._pool: Any = None
        self._alive: weakref.WeakSet[Captured] = weakref.WeakSet()

    def __call__(self, state: DecodeState, rules: Rules) -> bool:
        """Replay the step in place; the first time over a state, capture it. Return whether it was captured now.

        Raises:
            RuntimeError: the model does something that cannot be captured; the generation cannot go on.
        """
        key = (self, rules.eos.shape, rules.min_new is None, rules.choice.key)
        captured = state.captured.pop(key, None)
        new = captured is None
        if captured is None:
            captured = self._capture(state, rules)
            if len(state.captured) == KEPT_STEPS:
                del state.captured[next(iter(state.captured))]
        elif captured.source() is not rules:
            captured.rules.copy_(rules)
            captured.source = weakref.ref(rules)
        state.captured[key] = captured  # behind all others: the most recent
        captured.graphs[0].replay()
        if captured.pause is not None:
            captured.pause.choose(state, rules)
            captured.graphs[1].replay()
        return new

    def _capture(self, state: DecodeState, rules: Rules) -> Captured:
        own_rules, pause = rules.clone(), None
        if rules.choice.on_host:
            # The host's own choice may remember what it is shown, and belongs to one generation: no graph refers to it.
            pause = HostSelection(torch.zeros(len(state.root), self.nodes, dtype=torch.int64, device=state.root.device))
            own_rules = replace(own_rules, choice=pause)
        step = self.step
        if rules.choice.on_host and isinstance(step, CompiledStep):
            step = step.step  # compiled code is one piece
        before = state.snapshot()
        if not self._alive:  # a pool whose graphs are all gone cannot be captured into again
            self._pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            # A first run outside of the capture, of the very operations that are captured next and on their stream,
            # loads kernels and makes workspaces; then everything is put back.
            with torch.cuda.stream(side):
                step(state, own_rules)
                state.restore(before)
            torch.cuda.current_stream().wait_stream(side)
            if pause is not None:
                graphs = self._capture_in_two(step, state, own_rules, pause, side)
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    step(state, own_rules)
                graphs = (graph,)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "backend 'graph': expected a model whose step can be captured as a CUDA graph (no reads of device data "
                f"on the host); use backend='eager' for this one. The step failed with: {error}"
            ) from error
        captured = Captured(graphs, own_rules, weakref.ref(rules), pause)
        self._alive.add(captured)
        return captured

    def _capture_in_two(
        self, step: Step, state: DecodeState, rules: Rules, pause: HostSelection, side: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, ...]:
        """Capture a step up to the host's choice, and from there on."""
        graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        open_ones: list[torch.cuda.CUDAGraph] = []

        def begin(graph: torch.cuda.CUDAGraph) -> None:
            open_ones[:] = [graph]
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def split() -> None:
            graphs[0].capture_end()
            begin(graphs[1])

        pause.split = split
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            begin(graphs[0])
            try:
                step(state, rules)
            finally:
                open_ones[0].capture_end()
        return graphs


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

    def __call__(self, state: DecodeState, rules: Rules) -> bool:
        """Run the step in place; eagerly where the host chooses tokens, as compiled code is one piece.

        Return whether it was compiled now.
        """
        if rules.choice.on_host:
            self.step(state, rules)
            return False
        cache = state.cache
        shapes = (cache.kv.shape, cache.cos.shape, state.output.shape, rules.eos.shape)
        text = None if state.text is None else state.text.tokens.shape
        key = (*shapes, text, rules.min_new is None, rules.choice.key)
        if key in self._graphs:
            self._graphs[key](state, rules)
            return False
        graph = self._compile()
        # Whether weights are constants is decided while the function is traced, which is now.
        with inductor.config.patch(freezing=self.freeze):
            graph(state, rules)
        if len(self._graphs) == KEPT_STEPS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = graph
        return True

    def _compile(self) -> Step:
        step = self.step

        def call(state: DecodeState, rules: Rules) -> None:
            step(state, rules)

        # Dynamo keeps its graphs with the code object and gives up behind a few of them: each graph gets its own.
        code = call.__code__.replace(co_name=f"compiled_step_{id(self)}_{len(self._graphs)}")
        fresh = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
        # What dynamo compiles, weights included, and the code object keep each other alive until it is told to let go.
        weakref.finalize(self, reset_code, code).atexit = False
        return torch.compile(fresh, fullgraph=True, dynamic=False)
