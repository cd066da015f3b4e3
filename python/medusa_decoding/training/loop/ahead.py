"""Work on the CPU that is done ahead, in a thread, while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Ahead(Generic[K, V]):
    """Makes values by their keys, each in the same thread, one of them before it is asked for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._begun: tuple[K, Future[V]] | None = None

    def get(self, make: Callable[[K], V], key: K, following: K | None = None) -> V:
        """Return make(key), and begin with make(following), which the next call asks for. Errors are those of `make`.

        A value that was begun for another key is made, and discarded.
        """
        begun, self._begun = self._begun, None
        future = begun[1] if begun is not None and begun[0] == key else self._thread.submit(make, key)
        if following is not None:
            self._begun = following, self._thread.submit(make, following)
        return future.result()
