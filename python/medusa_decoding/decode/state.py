"""What one generation carries from step to step: tensors on the device, one row a sequence.

Nothing here is read by the host inside a step, so that a step can be captured and replayed. A row's length, accepted
length and end are its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_decoding.cache import TreeCache, bucket


@dataclass
class StopRules:
    """When a row ends: the same rules as transformers' EosTokenCriteria, MaxLengthCriteria and MinNewTokens processor.

    Attributes:
        eos: int64 [E], token ids that end a row; may be empty.
        max_new: int32 [B], new tokens a row may get.
        min_new: int32 [1], new tokens before which an EOS token is never chosen; None where nothing is suppressed.
        longest: the largest of `max_new`, known to the host.
    """

    eos: torch.Tensor
    max_new: torch.Tensor
    min_new: torch.Tensor | None
    longest: int

    def clone(self) -> StopRules:
        """Copy the tensors."""
        min_new = None if self.min_new is None else self.min_new.clone()
        return StopRules(self.eos.clone(), self.max_new.clone(), min_new, self.longest)

    def copy_(self, other: StopRules) -> None:
        """Take over rules of the same shapes, in place."""
        self.eos.copy_(other.eos)
        self.max_new.copy_(other.max_new)
        if self.min_new is not None and other.min_new is not None:
            self.min_new.copy_(other.min_new)
        self.longest = other.longest


@dataclass(eq=False)
class DecodeState:
    """The running state of a batch.

    Attributes:
        cache: keys and values; `cache.lengths` are the committed tokens of each row, its root excluded.
        root: int64 [B], the model's own next token: emitted, but not yet in the cache.
        hidden: [B, H], final hidden state of each row's last accepted token, the heads' input.
        output: int64 [B, more than max_new], tokens emitted so far; the last column takes what is to be thrown away.
        count: int32 [B], tokens emitted so far.
        finished: bool [B].
        log: int32 [B, more than max_new], tokens each step committed; column s is step s, 0 once a row has finished.
        step: int64 [1], steps so far.
        captured: steps captured over these very tensors (see `step_graph`); they live as long as the tensors do.
    """

    cache: TreeCache
    root: torch.Tensor
    hidden: torch.Tensor
    output: torch.Tensor
    count: torch.Tensor
    finished: torch.Tensor
    log: torch.Tensor
    step: torch.Tensor
    captured: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def allocate(cls, cache: TreeCache, hidden_size: int, budget: int) -> DecodeState:
        """Make the state before a prefill, for at most `budget` new tokens a row."""
        batch, device = len(cache.lengths), cache.kv.device
        # One column more than the budget, for what is thrown away, and so that a step past the end has its place.
        width = bucket(budget + 1)

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            cache=cache,
            root=zeros(batch, dtype=torch.int64),
            hidden=zeros(batch, hidden_size, dtype=cache.kv.dtype),
            output=zeros(batch, width, dtype=torch.int64),
            count=zeros(batch, dtype=torch.int32),
            finished=zeros(batch, dtype=torch.bool),
            log=zeros(batch, width, dtype=torch.int32),
            step=zeros(1, dtype=torch.int64),
        )

    def _running(self) -> tuple[torch.Tensor, ...]:
        """Everything that steps change, but for keys and values."""
        own = (self.root, self.hidden, self.output, self.count, self.finished, self.log, self.step)
        return (*own, self.cache.lengths)

    def clear(self) -> None:
        """Return to the state before a prefill. Keys and values stay: rows behind the lengths are never read."""
        for tensor in self._running():
            tensor.zero_()

    def snapshot(self) -> tuple[torch.Tensor, ...]:
        """Copy what steps change. Steps write keys and values behind the lengths only, so these need no copy."""
        return tuple(tensor.clone() for tensor in self._running())

    def restore(self, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Go back to a snapshot."""
        for tensor, kept in zip(self._running(), snapshot, strict=True):
            tensor.copy_(kept)

    def continue_from(self, other: DecodeState) -> None:
        """Take over a generation from a state with a smaller cache."""
        rows = other.cache.capacity
        self.cache.kv[..., :rows, :].copy_(other.cache.kv)
        self.restore(other._running())
