"""Streaming: show a generation's tokens to stopping criteria and a streamer, one by one as in plain decoding.

A row ends after the token at which a criterion stops, also within an accepted path. A streamer that has a method
`end_step` is also told where steps end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from medusa_decoding.decode.runtime.progress import RowReader
from medusa_decoding.decode.state import append_tokens

Observer = Callable[[Sequence[RowReader]], list[int]]
"""Is shown the rows after each step; cuts some of them, and returns which. See `StreamObserver`."""
Scores = Callable[[int, int], tuple[torch.Tensor, ...] | None]


def end_step(streamer: Any) -> None:
    """Call a streamer's method `end_step`, if it has one, after the prefill, which put one token, and after each step.

    The last token of a step is the model's own; those before it in the step are accepted draft tokens. A last step that
    EOS, a stopping criterion or the budget cuts short is counted alike (see `MedusaOutput.accept_lengths`).
    """
    method = getattr(streamer, "end_step", None)
    if callable(method):
        method()


class StreamObserver:
    """Shows new tokens to criteria, and one by one to a streamer (batch of 1) or None, as transformers does.

    Args:
        prompts: int64 [T_b] per row, on the device on which criteria expect them.
        scores: (row, count) to the scores that criteria get: a tuple of [1, V] for each new token, or None.
        agree: makes several processes end a row at the same token, although criteria may look at the clock.
    """

    def __init__(
        self,
        prompts: Sequence[torch.Tensor],
        criteria: Sequence[Any],
        streamer: Any,
        scores: Scores,
        agree: Callable[[int], int],
    ) -> None:
        self.criteria, self.streamer, self.scores, self.agree = list(criteria), streamer, scores, agree
        self._lengths = [len(prompt) for prompt in prompts]
        self._texts = list(prompts)

    def __call__(self, rows: Sequence[RowReader]) -> list[int]:
        """Show what is new; cut each row that a criterion ends, and return which these are."""
        cut = []
        for place, row in enumerate(rows):
            if not row.new:
                continue
            stop = self.agree(self._stop(place, row)) if self.criteria else -1
            if stop >= 0:
                row.cut(stop)
                cut.append(place)
            if self.streamer is not None:
                for token in row.new:
                    self.streamer.put(torch.tensor([token]))
                end_step(self.streamer)
        return cut

    def _stop(self, place: int, row: RowReader) -> int:
        """Return after how many new tokens a criterion ends a row in this process; -1 if none does."""
        prompt, first = self._lengths[place], row.count - len(row.new)
        text = self._texts[place] = append_tokens(self._texts[place], prompt + first, torch.tensor(row.new))
        for count in range(first + 1, row.count + 1):
            prefix, scores = text[None, : prompt + count], self.scores(place, count)
            # Every criterion is asked, as in transformers: one of them may count.
            if any([bool(torch.as_tensor(criterion(prefix, scores)).all()) for criterion in self.criteria]):
                return count
        return -1
