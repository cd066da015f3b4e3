"""CUDA graphs: a step captured once per state, then replayed, so that the host launches one thing per step.

If the host selects tokens (logits processors), a captured step is two graphs with the host's selection between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.loop import Step
from medusa_decoding.decode.runtime.compiled import KEPT_GRAPHS, CompiledStep
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import HostTokenSelector, Nodes, TokenSelector


class HostSelection(TokenSelector):
    """Takes the place of a selector on the host: makes the logits it needs, then calls `split`.

    Args:
        selector: that selector; it is not kept.
        next_tokens: int64 [B, N], from which the step reads the selected tokens; allocated outside of the capture.

    Attributes:
        split: ends the first graph and begins the second; does nothing until a capture sets it.
    """

    key = "host"

    def __init__(self, selector: HostTokenSelector, next_tokens: torch.Tensor) -> None:
        self.draw_temperature, self.temperatures = selector.draw_temperature, selector.temperatures
        self.next_tokens = next_tokens
        self.split: Callable[[], None] = lambda: None
        self.logits: torch.Tensor | None = None
        self.nodes: Nodes | None = None

    def __call__(self, nodes: Nodes, lm_head: torch.nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
        """Make the logits, split, and return the tensor that `select` fills."""
        self.nodes, self.logits = nodes, lm_head(nodes.hidden)
        self.split()
        return self.next_tokens

    def select(self, selector: HostTokenSelector, state: DecodeState) -> None:
        """Have the host select, between two replays."""
        assert self.logits is not None
        assert self.nodes is not None
        self.next_tokens.copy_(selector.walk(self.logits, self.nodes, state))


@dataclass(eq=False)
class Captured:
    """A captured step and the limits that it reads.

    Attributes:
        graphs: one, or two if the host selects tokens in between.
        limits: the tensors that the graphs read.
        source: the limits last copied into them. They belong to a generation, and end with it.
        host_selection: runs between two graphs.
    """

    graphs: tuple[torch.cuda.CUDAGraph, ...]
    limits: Limits
    source: weakref.ref[Limits]
    host_selection: HostSelection | None


class CapturedStep:
    """A step captured once for each state it meets, as a CUDA graph over the state's own tensors.

    Layers that read device data on the host cannot be captured: by their sources, those of bitsandbytes in 8 bits
    unless `llm_int8_threshold=0.0`, and of torchao's dynamic int8 up to 0.18.

    Args:
        step: the step to capture. It reads nothing back to the host and its shapes depend on no data.
        nodes: the tree's nodes.
    """

    def __init__(self, step: Step, nodes: int) -> None:
        self.step = step
        self.nodes = nodes
        self._pool: Any = None
        self._alive: weakref.WeakSet[Captured] = weakref.WeakSet()

    def __call__(self, state: DecodeState, selector: TokenSelector, limits: Limits) -> bool:
        """Replay the step in place, capturing it the first time over a state. Return whether it was captured now."""
        key = (self, limits.key, selector.key)
        captured = state.captured.pop(key, None)
        new = captured is None
        if captured is None:
            captured = self._capture(state, selector, limits)
            if len(state.captured) == KEPT_GRAPHS:
                del state.captured[next(iter(state.captured))]
        elif captured.source() is not limits:
            captured.limits.copy_(limits)
            captured.source = weakref.ref(limits)
        state.captured[key] = captured  # the last entry is the most recent one
        captured.graphs[0].replay()
        if captured.host_selection is not None:
            assert isinstance(selector, HostTokenSelector)
            captured.host_selection.select(selector, state)
            captured.graphs[1].replay()
        return new

    def is_made(self, state: DecodeState, selector: TokenSelector, limits: Limits) -> bool:
        """Return whether the step is captured over a state."""
        return (self, limits.key, selector.key) in state.captured

    def _capture(self, state: DecodeState, selector: TokenSelector, limits: Limits) -> Captured:
        own_limits, step, host_selection = replace(limits), self.step, None
        if isinstance(selector, HostTokenSelector):
            # The host's selector may remember what it is shown, and belongs to one generation: no graph refers to it.
            next_tokens = torch.zeros(len(state.root), self.nodes, dtype=torch.int64, device=state.root.device)
            selector = host_selection = HostSelection(selector, next_tokens)
            if isinstance(step, CompiledStep):
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
                step(state, selector, own_limits)
                state.restore(before)
            torch.cuda.current_stream().wait_stream(side)
            if host_selection is not None:
                graphs = self._capture_in_two(step, state, host_selection, own_limits, side)
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    step(state, selector, own_limits)
                graphs = (graph,)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "backend 'graph': expected a model whose step can be captured as a CUDA graph (no reads of device data "
                f"on the host); use backend='eager' for this one. The step failed with: {error}"
            ) from error
        captured = Captured(graphs, own_limits, weakref.ref(limits), host_selection)
        self._alive.add(captured)
        return captured

    def _capture_in_two(
        self, step: Step, state: DecodeState, selector: HostSelection, limits: Limits, side: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, ...]:
        """Capture a step up to the host's selection, and from there on."""
        graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        open_graph = graphs[0]

        def begin() -> None:
            open_graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def split() -> None:
            nonlocal open_graph
            open_graph.capture_end()
            open_graph = graphs[1]
            begin()

        selector.split = split
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            begin()
            try:
                step(state, selector, limits)
            finally:
                open_graph.capture_end()
        return graphs
