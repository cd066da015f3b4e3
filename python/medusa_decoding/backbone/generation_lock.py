"""GenerationLock: one generation of a model runs at a time, whichever threads call it.

A generation holds the lock until it ends, also while the caller's own code runs (a streamer, criteria, processors).
This code may call the model itself. It must not wait for another thread that does: both would wait forever.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import nn


class GenerationLock:
    """The lock of one model's generations; the thread that holds it may take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._last: int | None = None  # the thread that launched on the device last

    @contextlib.contextmanager
    def held(self, device: torch.device | None = None) -> Iterator[None]:
        """Hold the lock for a generation, or for anything that must not happen during one of another thread.

        `device` is where the block launches. If another thread has launched there before, this waits for the device:
        that thread may use another stream, and captured steps share memory.
        """
        with self._lock:
            if device is not None:
                before, self._last = self._last, threading.get_ident()
                if device.type == "cuda" and before not in (None, self._last):
                    torch.cuda.synchronize(device)
            yield


_locks: weakref.WeakKeyDictionary[nn.Module, GenerationLock] = weakref.WeakKeyDictionary()
_finding = threading.Lock()


def lock_of(decoder: nn.Module) -> GenerationLock:
    """Return the lock of a decoder (such as `LlamaModel`), which all models around it share."""
    with _finding:
        return _locks.setdefault(decoder, GenerationLock())
