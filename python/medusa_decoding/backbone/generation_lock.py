"""GenerationLock: one generation of a model runs at a time, whichever threads call it.

A generation holds the lock while it runs the model, and releases it while the caller's own code runs (a streamer,
criteria, processors), so that this code may wait for any other thread. The next generation begins when the one
before has ended. It begins earlier in two cases: if this code itself calls it, or if this code has not returned for
`PATIENCE` seconds, since it may be waiting for the next generation.
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
"""Seconds for which a generation waits for the caller's code in another one, before it begins."""


class GenerationLock:
    """The lock of one model's generations.

    Attributes:
        holder: the thread that holds the lock, or None.
    """

    def __init__(self) -> None:
        self.holder: int | None = None
        self._changed = threading.Condition()
        self._under_way: dict[object, int] = {}  # generations that have begun and not ended, to their threads
        self._times_taken = 0
        self._last: int | None = None
        self._device: torch.device | None = None

    @contextlib.contextmanager
    def held(self, device: torch.device | None = None) -> Iterator[None]:
        """Hold the lock for a generation, or for anything that must not happen during one of another thread.

        If another thread held it before, this waits for what that thread launched on the model's device: it may be on
        another stream, and captured steps share memory.
        """
        me = threading.get_ident()
        self._device = device or self._device
        if self.holder == me:  # within a generation that has begun
            yield
            return
        generation = object()
        try:
            with self._changed:
                while self.holder is not None or (self._under_way and me not in self._under_way.values()):
                    taken = self._times_taken
                    if not self._changed.wait(PATIENCE) and self.holder is None and taken == self._times_taken:
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
    def released(self) -> Iterator[None]:
        """Release the lock while the caller's code runs, and take it again."""
        me = threading.get_ident()
        with self._changed:
            self._release(me)
        try:
            yield
        finally:
            with self._changed:
                while self.holder is not None:
                    self._changed.wait()
                self._take(me)

    def releasing(self, functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """Chain the caller's functions into one that releases the lock while it runs.

        The last argument of each function is what the one before returned.
        """

        def call(*args: Any) -> Any:
            with self.released():
                for function in functions:
                    args = (*args[:-1], function(*args))
            return args[-1]

        return call

    def _end(self, generation: object, me: int) -> None:
        with self._changed:
            self._under_way.pop(generation, None)
            self._release(me)

    def _take(self, me: int) -> None:
        self.holder, before, self._last = me, self._last, me
        self._times_taken += 1
        if before not in (None, me) and self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _release(self, me: int) -> None:
        if self.holder == me:
            self.holder = None
            self._changed.notify_all()


_locks: weakref.WeakKeyDictionary[nn.Module, GenerationLock] = weakref.WeakKeyDictionary()
_finding = threading.Lock()


def lock_of(decoder: nn.Module) -> GenerationLock:
    """Return the lock of a decoder (such as `LlamaModel`), which all models around it share."""
    with _finding:
        return _locks.setdefault(decoder, GenerationLock())
