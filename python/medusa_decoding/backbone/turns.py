"""Turns: generations of one model run one after the other, whichever threads call them.

All that a model shares between generations (attention modules, caches, captured steps, what `tree="auto"` has learned)
is used in a turn. A generation holds the turn while it runs the model, and gives it up while the caller's own code runs
(streamer, stopping criteria, logits processors), so that this code may wait for any other thread. Nevertheless the next
generation begins when the one before has ended, except if it is called from within that code, or if that code has not
come back for `PATIENCE` seconds: it may be waiting for just this generation. This module does not know what
generations do.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

PATIENCE = 1.0
"""Seconds in which a generation's caller may do as it likes before another generation begins meanwhile."""


class Turns:
    """The turns of one model's generations.

    Attributes:
        holder: the thread that has the turn, or None.
    """

    def __init__(self) -> None:
        self.holder: int | None = None
        self._changed = threading.Condition()
        self._under_way: dict[object, int] = {}  # generations that have begun and not ended, to their threads
        self._taken = 0
        self._last: int | None = None
        self._device: torch.device | None = None

    @contextlib.contextmanager
    def generation(self, device: torch.device | None = None) -> Iterator[None]:
        """Hold the turn for a generation, or for something that must not happen during one of another thread.

        Args:
            device: the model's. Where the turn comes from another thread, what that one launched is waited for: it may
                be on another stream, and captured steps share memory.
        """
        me = threading.get_ident()
        self._device = device or self._device
        if self.holder == me:  # within a generation that has begun: it is the same one
            yield
            return
        generation = object()
        try:
            with self._changed:
                while not self._may_begin(me):
                    taken = self._taken
                    if not self._changed.wait(PATIENCE) and self.holder is None and taken == self._taken:
                        break
                self._under_way[generation] = me
                self._take(me)
            yield
        finally:
            try:
                self._end(generation, me)
            except BaseException:  # an interrupt
                self._end(generation, me)
                raise

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Give the turn up while code of the caller's runs, and take it again."""
        me = threading.get_ident()
        with self._changed:
            self._give_up(me)
        try:
            yield
        finally:
            with self._changed:
                while self.holder is not None:
                    self._changed.wait()
                self._take(me)

    def without(self, functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """Return a chain of the caller's functions that runs without the turn.

        The last argument of each is what the one before returned.
        """

        def call(*args: Any) -> Any:
            with self.given_up():
                for function in functions:
                    args = (*args[:-1], function(*args))
            return args[-1]

        return call

    def _may_begin(self, me: int) -> bool:
        return self.holder is None and (not self._under_way or me in self._under_way.values())

    def _end(self, generation: object, me: int) -> None:
        with self._changed:
            self._under_way.pop(generation, None)
            self._give_up(me)

    def _take(self, me: int) -> None:
        self.holder, before, self._last = me, self._last, me
        self._taken += 1
        if before not in (None, me) and self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _give_up(self, me: int) -> None:
        if self.holder == me:
            self.holder = None
            self._changed.notify_all()


_turns: weakref.WeakKeyDictionary[nn.Module, Turns] = weakref.WeakKeyDictionary()
_finding = threading.Lock()


def turns_of(decoder: nn.Module) -> Turns:
    """Return the turns of a decoder (`LlamaModel` and its like), which all models around it share."""
    with _finding:
        return _turns.setdefault(decoder, Turns())


__all__ = ["Turns", "turns_of"]
