"""The state that a generation carries from step to step: tensors on the device, one row per sequence.

The host reads none of it within a step, so that a step can be captured and replayed. Each row has its own length,
acceptance length and end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_decoding.backbone.kv_cache import TreeCache, bucket
from medusa_decoding.decode.lookup import Text
from medusa_kernels.tree_attention import MAX_NODES


@dataclass(eq=False)
class DecodeState:
    """The running state of a batch.

    Attributes:
        cache: keys and values; `cache.lengths` are the committed tokens of each row, its root excluded.
        root: int64 [B], the model's own next token: emitted, but not yet in the cache.
        hidden: [B, (1 + F) H], the heads' input: final hidden state of each row's last accepted token, followed by its
            states after F feature layers.
        output: int64 [B, more than the largest budget], tokens emitted so far; discarded tokens go to the last column.
        count: int32 [B], tokens emitted so far.
        finished: bool [B].
        log: int32 [B, as output], tokens each step committed; column s is step s, 0 after a row has finished.
        step: int64 [1], steps so far.
        seeds: int64 [B], keys of the random numbers of sampling (see `TokenSelector.noise`).
        report: int32 [B, 3 + 256], what `runtime.progress` reads of the last step: `count`, `finished`, the bits of
            `check` and the tokens of the accepted path (see `tree_accept`).
        check: fp32 [B], set by each step's token selection: not finite if the model's output is not.
        copies: int64 [B, length], tokens that the host has copied from each row's text for the next step (on a CPU).
        text: prompts and new tokens if a tree of a GPU copies from them, else None.
        captured: steps captured over these tensors (see `runtime.cuda_graph`); they live as long as the tensors do.
    """

    cache: TreeCache
    root: torch.Tensor
    hidden: torch.Tensor
    output: torch.Tensor
    count: torch.Tensor
    finished: torch.Tensor
    log: torch.Tensor
    step: torch.Tensor
    seeds: torch.Tensor
    check: torch.Tensor
    report: torch.Tensor
    copies: torch.Tensor | None = None
    text: Text | None = None
    captured: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def allocate(cls, cache: TreeCache, states_size: int, budget: int) -> DecodeState:
        """Make the state before a prefill, for at most `budget` new tokens per row."""
        batch, device = len(cache.lengths), cache.kv.device
        # One column more than the budget: for discarded tokens, and for the log of a step past the end.
        width = bucket(budget + 1)
        zeros = functools.partial(torch.zeros, device=device)
        return cls(
            cache=cache,
            root=zeros(batch, dtype=torch.int64),
            hidden=zeros(batch, states_size, dtype=cache.cos.dtype),
            output=zeros(batch, width, dtype=torch.int64),
            count=zeros(batch, dtype=torch.int32),
            finished=zeros(batch, dtype=torch.bool),
            log=zeros(batch, width, dtype=torch.int32),
            step=zeros(1, dtype=torch.int64),
            seeds=zeros(batch, dtype=torch.int64),
            check=zeros(batch, dtype=torch.float32),
            report=zeros(batch, 3 + MAX_NODES, dtype=torch.int32),
        )

    def hold_text(self, prompts: list[torch.Tensor]) -> None:
        """Store the prompts, so that a tree may copy from them."""
        batch, room = self.output.shape
        width = max(map(len, prompts)) + room
        if self.text is None or self.text.tokens.shape[1] < width:
            self.text = Text.allocate(batch, bucket(width), room, self.output.device)
            # Captured steps are bound to the old tensors.
            self.captured.clear()
        self.text.begin(prompts)

    def cut(self, row: int, count: int) -> None:
        """End a row after its first `count` new tokens."""
        self.count[row] = count
        self.finished[row] = True

    def per_row(self) -> tuple[torch.Tensor, ...]:
        """Return what belongs to single rows, one of whose sizes is B, except keys and values."""
        own = (self.root, self.hidden, self.output, self.count, self.finished, self.log, self.check, self.seeds)
        return (*own, self.cache.lengths)

    def _running(self) -> tuple[torch.Tensor, ...]:
        """Return all that steps change, except keys and values."""
        return (*(tensor for tensor in self.per_row() if tensor is not self.seeds), self.step)

    def clear(self) -> None:
        """Return to the state before a prefill. Keys and values stay: rows past the lengths are never read."""
        for tensor in self._running():
            tensor.zero_()

    def snapshot(self) -> tuple[torch.Tensor, ...]:
        """Copy what steps change. They write keys and values only past the lengths, so these need no copy."""
        return tuple(tensor.clone() for tensor in self._running())

    def restore(self, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Go back to a snapshot."""
        for tensor, kept in zip(self._running(), snapshot, strict=True):
            tensor.copy_(kept)

    def continue_from(self, other: DecodeState) -> None:
        """Continue the generation of a state with a smaller cache."""
        rows = other.cache.capacity
        self.cache.kv[..., :rows, :].copy_(other.cache.kv)
        self.seeds.copy_(other.seeds)
        if other.text is not None:
            self.text, other.text = other.text, None
            self.captured.clear()
            other.captured.clear()
        self.restore(other._running())


def append_tokens(text: torch.Tensor, length: int, new: torch.Tensor) -> torch.Tensor:
    """Return a text whose first `length` tokens are followed by new ones.

    If there is no room for them, the text's storage is doubled: few texts reach their maximum length.

    Args:
        text: int64 [at least length]; changed in place if it has room for the new tokens.
        length: tokens so far.
        new: int64 [n].
    """
    end = length + len(new)
    if end > len(text):
        text = torch.cat([text, text.new_zeros(max(end, 2 * len(text)) - len(text))])
    text[length:end] = new
    return text
