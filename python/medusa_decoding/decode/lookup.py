"""Look up: draft tokens copied from the text itself, for spare tree nodes.

If text repeats (code being edited, a document being summarised), the tokens that followed an earlier occurrence of the
last tokens are good drafts. The idea is transformers' prompt lookup decoding; here it is one branch of the tree. A GPU
finds it within the step (`look_up`), because the host reads tokens one step late. On a CPU the host has them, and
follows the text itself (`Repeats`), so that it knows before a step how much of the text's end is a repetition.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

LONGEST_MATCH = 4
"""The most tokens at the end of the text that are compared."""


@dataclass(eq=False)
class Text:
    """Prompts and new tokens of a batch, at addresses that a captured step can read.

    Attributes:
        tokens: int64 [B, S], a row's prompt, then its new tokens as far as they have been copied.
        places: int64 [B, W], the column of each new token.
        prompts: int64 [B], tokens of each prompt.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    prompts: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, width: int, output: int, device: torch.device) -> Text:
        """Allocate rows of `width` tokens, `output` of them new ones."""
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        return cls(zeros(batch, width), zeros(batch, output), zeros(batch))

    def begin(self, prompts: list[torch.Tensor]) -> None:
        """Store the prompts, int64 [T_b] each."""
        self.tokens.zero_()
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = prompt
        self.prompts.copy_(torch.tensor([len(prompt) for prompt in prompts]))
        columns = self.prompts[:, None] + torch.arange(self.places.shape[1], device=self.places.device)
        # Tokens that do not fit go to the last column.
        self.places.copy_(columns.clamp(max=self.tokens.shape[1] - 1))


def look_up(text: Text, output: torch.Tensor, count: torch.Tensor, length: int) -> torch.Tensor:
    """Return what followed an earlier occurrence of the text's end.

    The longest match of up to `LONGEST_MATCH` tokens counts, the latest among equally long ones. A copy that reaches
    the text's end continues with itself, as in text that repeats.

    Args:
        text: of the batch; brought up to date.
        output: int64 [B, W], new tokens.
        count: int32 [B], how many there are, at least 1.
        length: how many tokens to copy.

    Returns:
        int64 [B, length]; any tokens of the text if nothing matches.
    """
    tokens = text.tokens.scatter_(1, text.places, output)
    end = (text.prompts + count - 1)[:, None]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    matched = (places < end).expand_as(tokens)
    matches = torch.zeros_like(tokens)
    for back in range(LONGEST_MATCH):
        last = tokens.gather(1, (end - back).clamp(min=0))
        # Column i of the shifted text is token i - back.
        shifted = tokens.roll(back, 1)
        matched = matched & (shifted == last) & (places >= back) & (end >= back)
        matches = matches + matched
    found = torch.where(places < end, matches * tokens.shape[1] + places, -1).argmax(1, keepdim=True)
    period = (end - found).clamp(min=1)
    steps = torch.arange(length, device=tokens.device)
    return tokens.gather(1, (found + 1 + steps % period).clamp(max=tokens.shape[1] - 1))


class Copied(NamedTuple):
    """What a copy would have drafted in a step, whether or not the step's tree had one.

    Attributes:
        matched: tokens at the text's end that stood earlier in it too, at most `LONGEST_MATCH`; 0: nothing to copy.
        right: how many of the new tokens it begins with.
        new: the step's new tokens.
    """

    matched: int
    right: int
    new: int


class Repeats:
    """One row's text on the host, and where its end stands earlier in it; finds what `look_up` finds.

    Attributes:
        tokens: the text so far.
        matched: how many tokens at its end stand earlier in it too, at most `LONGEST_MATCH`.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.matched = self._next = 0
        self._after: dict[tuple[int, ...], int] = {}  # the place after the latest occurrence that something follows
        self._ends: list[tuple[int, ...]] = []  # the last token, the last two, up to the last LONGEST_MATCH
        self.extend(tokens)

    def copy(self, length: int) -> list[int]:
        """Return the `length` tokens that followed the end's earlier occurrence; any tokens if there is none."""
        period = len(self.tokens) - self._next
        return [self.tokens[self._next + step % period] for step in range(length)]

    def extend(self, new: Sequence[int]) -> Copied:
        """Append a step's new tokens; return what a copy would have made of them."""
        copy = self.copy(len(new)) if self.matched else []
        right = sum(itertools.takewhile(bool, map(operator.eq, copy, new)))
        found = Copied(self.matched, right, len(new))
        for token in new:
            for end in self._ends:
                self._after[end] = len(self.tokens)
            self.tokens.append(token)
            self._ends = [(token,), *[(*end, token) for end in self._ends[: LONGEST_MATCH - 1]]]
        self.matched = 0
        for end in self._ends:  # a text that ends with a known end of n tokens ends with a known one of fewer, too
            if end not in self._after:
                break
            self.matched, self._next = len(end), self._after[end]
        return found
