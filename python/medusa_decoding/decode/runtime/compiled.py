"""Compiled steps: torch.compile fuses small operations; on a CPU it packs the weights of modules that it runs."""

from __future__ import annotations

import types
import weakref

import torch
from torch import _inductor as inductor
from torch._C._dynamo.eval_frame import reset_code

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.loop import Step
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import HostTokenSelector, TokenSelector

KEPT_GRAPHS = 16
"""How many recent graphs each compiled step, and each state, caches."""


class CompiledStep:
    """A step compiled once for each set of shapes it meets. Compilation takes seconds to minutes.

    Args:
        step: the eager step.
        freeze: treat the weights as constants (CPU), so that the compiler can pack those of modules that it runs.
    """

    def __init__(self, step: Step, freeze: bool) -> None:
        self.step = step
        self.freeze = freeze
        self._graphs: dict[tuple[object, ...], Step] = {}

    def __call__(self, state: DecodeState, selector: TokenSelector, limits: Limits) -> bool:
        """Run the step in place, eagerly if the host selects tokens. Return whether it was compiled now."""
        if isinstance(selector, HostTokenSelector):
            self.step(state, selector, limits)
            return False
        key = _key(state, selector, limits)
        if key in self._graphs:
            self._graphs[key](state, selector, limits)
            return False
        graph = self._compile()
        # Whether weights are constants is decided while the function is traced, which is now.
        with inductor.config.patch(freezing=self.freeze):
            graph(state, selector, limits)
        if len(self._graphs) == KEPT_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = graph
        return True

    def is_made(self, state: DecodeState, selector: TokenSelector, limits: Limits) -> bool:
        """Return whether the step is compiled for a state's shapes, or runs eagerly."""
        return isinstance(selector, HostTokenSelector) or _key(state, selector, limits) in self._graphs

    def _compile(self) -> Step:
        step = self.step

        def call(state: DecodeState, selector: TokenSelector, limits: Limits) -> None:
            step(state, selector, limits)

        # Dynamo keeps its graphs with the code object and gives up after a few of them: each graph gets its own.
        code = call.__code__.replace(co_name=f"compiled_step_{id(self)}_{len(self._graphs)}")
        fresh = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
        # What dynamo compiles, weights included, and the code object keep each other alive until it is told to let go.
        weakref.finalize(self, reset_code, code).atexit = False
        return torch.compile(fresh, fullgraph=True, dynamic=False)


def _key(state: DecodeState, selector: TokenSelector, limits: Limits) -> tuple[object, ...]:
    """Return what a compiled step is made for."""
    cache, text = state.cache, None if state.text is None else state.text.tokens.shape
    return cache.kv.shape, cache.cos.shape, state.output.shape, text, limits.key, selector.key
