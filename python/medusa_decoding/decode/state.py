"""What one generation carries from step to step: tensors on the device, one row a sequence.

Nothing here is read by the host inside a step, so that a step can be captured and replayed. A row's length, accepted
length and end are its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from medusa_decoding.backbone.kv_cache import TreeCache, bucket
from medusa_decoding.decode.lookup import Text
from medusa_decoding.decode.verify import Greedy, TokenSelector


@dataclass
class Rules:
    """How tokens are chosen, and when a row ends.

    The ends are those of transformers' EosTokenCriteria, MaxLengthCriteria and MinNewTokens processor.

    Attributes:
        eos: int64 [E], token ids that end a row; may be empty.
        max_new: int32 [B], new tokens a row may get.
        min_new: int32 [B], new tokens before which an EOS token is never chosen; None where nothing is suppressed.
        longest: the largest of `max_new`, known to the host.
        choice: how the model's next token is chosen at a node.
    """

    eos: torch.Tensor
    max_new: torch.Tensor
    min_new: torch.Tensor | None
    longest: int
    choice: TokenSelector = field(default_factory=Greedy)

    def clone(self) -> Rules:
        """Copy the tensors."""
        min_new = None if self.min_new is None else self.min_new.clone()
        return replace(self, eos=self.eos.clone(), max_new=self.max_new.clone(), min_new=min_new)

    def copy_(self, other: Rules) -> None:
        """Take over rules of the same shapes, in place; the choice stays, which a captured step no longer asks."""
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
        draws: fp64 [B, as output], the uniform number of each position, which sampling draws with.
        check: fp32 [B], made by each step's verification: not finite where the model's output is not.
        text: prompts and new tokens where a tree copies from them, else None.
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
    draws: torch.Tensor
    check: torch.Tensor
    text: Text | None = None
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
            draws=zeros(batch, width, dtype=torch.float64),
            check=zeros(batch, dtype=torch.float32),
        )

    def hold_text(self, prompts: list[torch.Tensor]) -> None:
        """Keep the text, so that a tree may copy from it."""
        batch, room = self.output.shape
        width = max(map(len, prompts)) + room
        if self.text is None or self.text.tokens.shape[1] < width:
            self.text = Text.allocate(batch, bucket(width), room, self.output.device)
            # They are bound to the tensors that were there before.
            self.captured.clear()
        self.text.begin(prompts)

    def uniform(self, depth: int) -> torch.Tensor:
        """Return each row's uniform number for the token behind a node of this depth, fp64 [B]."""
        place = (self.count + depth).clamp(max=self.draws.shape[1] - 1).long()
        return self.draws.gather(1, place[:, None])[:, 0]

    def cut(self, row: int, count: int) -> None:
        """End a row behind its first `count` new tokens."""
        self.count[row] = count
        self.finished[row] = True

    def _running(self) -> tuple[torch.Tensor, ...]:
        """Everything that steps change, but for keys and values."""
        own = (self.root, self.hidden, self.output, self.count, self.finished, self.log, self.step, self.check)
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
        self.draws.copy_(other.draws)
        if other.text is not None:
            self.text, other.text = other.text, None
            self.captured.clear()
            other.captured.clear()
        self.restore(other._running())
