"""Keeps the last result that was computed from some tensors, for as long as neither they nor their contents change.

Every layer of a forward pass asks for the same masks and rotation factors, so one result is enough.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class LastResult(Generic[T]):
    """The last result. It is replaced as a whole, so that two threads at worst compute it twice."""

    _last: tuple[tuple[Tensor, ...], list[int], object, T] | None = None

    def get(self, tensors: tuple[Tensor, ...], values: object) -> T | None:
        """Return the result kept for these very tensors, unchanged since, and equal values; None if there is none."""
        last = self._last  # read once: another thread may forget it
        if last is None:
            return None
        kept, versions, kept_values, result = last
        # An inference tensor has no version that would tell of a change in place: it is never among those kept.
        if kept_values != values or any(a is not b for a, b in zip(kept, tensors, strict=True)):
            return None
        return result if [tensor._version for tensor in tensors] == versions else None

    def keep(self, tensors: tuple[Tensor, ...], values: object, result: T) -> T:
        """Keep a result instead of the last one, unless a change in place would go unseen; return it."""
        if not any(tensor.is_inference() for tensor in tensors):
            self._last = tensors, [tensor._version for tensor in tensors], values, result
        return result

    def forget(self) -> None:
        """Drop the last result."""
        self._last = None
