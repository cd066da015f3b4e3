"""Copying: verifies tokens copied from the text where they seem to pay, and another policy's tree elsewhere."""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Callable, Sequence

from medusa_decoding.decode.adaptive.policy import ADVANCE, LOSS_SHARE, MOST_RISK, SAVINGS, Adaptive
from medusa_decoding.decode.adaptive.step_times import Profile, StepTimes
from medusa_decoding.decode.lookup import Copied
from medusa_decoding.decode.policy import FixedTree, Policy, StepResult
from medusa_decoding.trees.tree import Tree

LENGTHS = (2, 4, 8, 16)
"""Tokens of the copies to choose from."""
MARGIN = 1.05
"""How many times as many tokens per second a copy must promise as the other policy's trees."""


class CopyModel:
    """How likely a copy's tokens are right, by how many tokens of the text's end stand earlier in it.

    Every step teaches: what a copy would have drafted is compared with the tokens that came, whatever was verified.

    Attributes:
        tokens: expected tokens of a step, the root's included, by matching tokens and by the length of the copy.
    """

    EXPECTED = ((0.25, 0.55, 0.63, 0.70), (0.50, 0.60, 0.67, 0.72), (0.58, 0.66, 0.70, 0.73), (0.80, 0.85, 0.88, 0.91))
    """Before anything was observed: the share of right tokens at places 1, 2, 3 and later, after right ones only, for
    1, 2, 3 and 4 matching tokens (answers of SmolLM2-135M-Instruct, greedy and at temperature 0.7)."""
    PRIOR, MEMORY = 8.0, 32.0
    """How many observations that is worth, and after how many later ones an observation is mostly forgotten."""

    def __init__(self) -> None:
        self._right = [[self.PRIOR * share for share in row] for row in self.EXPECTED]
        self._tried = [[self.PRIOR] * len(row) for row in self.EXPECTED]
        self.tokens = [[1.0] * (LENGTHS[-1] + 1), *map(self._expected, range(len(self.EXPECTED)))]

    def observe(self, copied: Copied) -> None:
        """Learn from a row's step."""
        if not copied.matched:
            return
        row, keep = copied.matched - 1, 1.0 - 1.0 / self.MEMORY
        right, tried = self._right[row], self._tried[row]
        for place in range(min(copied.right + 1, copied.new)):
            at = min(place, len(tried) - 1)
            right[at] = keep * right[at] + (place < copied.right)
            tried[at] = keep * tried[at] + 1.0
        self.tokens[copied.matched] = self._expected(row)

    def _expected(self, row: int) -> list[float]:
        shares = [right / tried for right, tried in zip(self._right[row], self._tried[row], strict=True)]
        chances = itertools.accumulate(shares + shares[-1:] * (LENGTHS[-1] - len(shares)), operator.mul)
        return [*itertools.accumulate(chances, initial=1.0)]


class Copying(Policy):
    """Verify what followed an earlier occurrence of the text's end, if that promises more tokens per second.

    One object serves one model's generations, one after the other, as `Adaptive` does. Before a step the host knows how
    many tokens of each text's end stand earlier in it, and the `CopyModel` how far copies were right after so many. The
    step's tree is then the copy whose expected tokens per time are `MARGIN` times those of the other policy, or that
    policy's choice.

    Bounded loss: an account starts with `ADVANCE` plain steps, gets `LOSS_SHARE` of every step's time, and pays what
    copies lose or gains what they save, up to `SAVINGS` more. A copy is only verified if the account could pay for a
    step that gives nothing but its root. Lengths are tried from the shortest up; a first step that takes much longer
    than was hoped costs the account no more than `MOST_RISK` beyond what it had.

    Args:
        others: chooses the tree of all other steps.
    """

    timed = True

    def __init__(self, others: Adaptive | FixedTree) -> None:
        self.others, self.model = others, CopyModel()
        self._copies = {length: Tree([]).with_lookup(length) for length in LENGTHS}
        self._sizes = [1, *(tree.num_nodes for tree in self._copies.values())]
        self.trees = (*others.trees, *self._copies.values())
        self._times, self._account = StepTimes(), ADVANCE
        self._profile: Profile | None = None

    def begin(self, prefill_seconds: float = 0.0, *, batch: int = 1, rows: int = 0) -> None:
        """Start a generation; see `Policy`."""
        self.others.begin(prefill_seconds, batch=batch, rows=rows)
        self._batch = batch
        self._rows_are(rows)

    def resized(self, batch: int) -> None:
        """Go on with another number of sequences; see `Policy`."""
        self.others.resized(batch)
        self._batch = batch
        self._rows_are(self._rows)

    def grown(self, rows: int) -> None:
        """Go on in a cache of `rows` rows; see `Policy`."""
        self.others.grown(rows)
        self._rows_are(rows)

    def _rows_are(self, rows: int) -> None:
        self._rows, self._profile = rows, self._times.profile(self._batch, rows)
        self._refresh()

    def _refresh(self) -> None:
        """Read the step times, as multiples of a plain step: hopeful and careful ones of each length."""
        assert self._profile is not None
        estimates = self._profile.estimates(self._sizes)
        self._plain = estimates[0][0] if estimates else 0.0
        self._costs = {
            length: (hopeful / self._plain, careful / self._plain)
            for length, (hopeful, careful) in zip(LENGTHS, estimates[1:], strict=False)
        }
        known = self._profile.known()
        self._timed = {length: tree.num_nodes in known for length, tree in self._copies.items()}

    def choose(self, made: Callable[[Tree], bool] | None = None, matched: Sequence[int] = ()) -> Tree:
        """Return the tree of the next step; see `Policy`."""
        best, most = 0, MARGIN * self.others.rate
        if any(matched):
            for length, (hopeful, _) in self._costs.items():
                rate = sum(self.model.tokens[found][length] for found in matched) / (len(matched) * hopeful)
                if rate > most:
                    best, most = length, rate
        # A length that was never timed may take much longer than is hoped, and longer ones even more.
        best = min(best, next((length for length in self._costs if not self._timed[length]), best))
        return self._copies[best] if best and self._affordable(best) else self.others.choose(made, matched)

    def _affordable(self, length: int) -> bool:
        return self._costs[length][1] - 1.0 <= self._account

    def observe(self, step: StepResult) -> None:
        """Learn from a step; see `Policy`."""
        tree, seconds, committed = step.tree, step.seconds, step.committed
        for row in step.copied:
            self.model.observe(row)
        ours = self._copies.get(tree.lookup) is tree
        if not ours:
            self.others.observe(step)
        if not committed or seconds is None:
            return
        assert self._profile is not None
        nodes, cost = (tree.num_nodes, 1.0) if ours or not isinstance(self.others, FixedTree) else (1, self.others.cost)
        if (ours or nodes == 1) and self._profile.observe(nodes, seconds / cost):
            self._refresh()
        if self._plain:
            cost = self._costs[tree.lookup][1] if ours else 1.0
            gain = statistics.fmean(committed) - cost if ours else 0.0
            self._account = max(min(self._account + LOSS_SHARE * cost + gain, ADVANCE + SAVINGS), -MOST_RISK)
