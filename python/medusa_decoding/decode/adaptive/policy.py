"""Policy: which tree the next step verifies; one tree always, or the one that pays at this moment.

A policy sees what steps took and committed. It does not know tokens, models or caches, and no text depends on it.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from medusa_decoding.decode.adaptive.acceptance import AcceptanceModel, TreeSet
from medusa_decoding.decode.adaptive.step_times import Profile, StepTimes
from medusa_decoding.decode.policy import Policy, StepResult
from medusa_decoding.trees.tree import Tree

LOSS_SHARE = 0.01
"""Share of the time that steps with trees may lose against plain decoding."""
ADVANCE = 2.5
"""Plain steps that they may also lose once, so that trees can be tried from the first step on."""
SAVINGS = 2.0
"""Plain steps of earlier gains that a generation may lose as well."""
PROBE_SHARE = 0.005
"""Share of the time that probes may lose while plain decoding seems the fastest."""
PATIENCE = 3
"""How often that share is halved at most, once for each probe in a row that did not pay."""
PLAIN_MARGIN = 1.01
"""How much faster than plain decoding a tree must seem."""
LEAST_COST = 0.1
"""Plain steps that a tree is charged at least, so that noise in the times makes none look free."""
MOST_RISK, MOST_COST = 1.0, 3.0
"""Caps of the risk and the charge of a step whose size may have been timed by outliers only (plain steps)."""
CHECK_FIRST, CHECK_LAST = 4, 64
"""Steps after which another size is timed again: first, and at most; one more after each check."""
CHECK_RATE = 0.7
"""Part of the best rate that another tree must seem to reach to be timed again."""
PATIENCE_TO_MAKE = 2.0
"""A tree's step is compiled or captured once the tree could have saved this many times what that takes."""


class Adaptive(Policy):
    """Choose the tree that gives the most tokens per second at each step; plain decoding is one of the choices.

    One object serves one model's generations, one after the other: `begin` before each. `AcceptanceModel` predicts the
    tokens of a step, `StepTimes` its duration (a hopeful estimate); the highest quotient wins.

    Bounded loss: an account holds what steps with trees have lost against plain decoding, in plain steps. A tree is
    only taken if the account stays below `ADVANCE` and `LOSS_SHARE` of the generation's time so far (prefill included)
    even if the step gives nothing but its root. What a generation has taken of the advance is missing in the next ones,
    until the time pays it back; gains are carried over, up to `SAVINGS`. So useless heads cost at most the advance,
    once, and that share of the time, if steps take what was expected. The first steps of a size may take longer: one
    is charged at most `MOST_COST`. Steps are charged what their size is believed to take now, not what each took, so
    that other programs which slow single steps down do not use the account up. A batch has come as far as its slowest
    running row, because its end waits for that row.

    Exploration: while plain decoding seems the fastest, nothing is learnt about the heads. Whenever `PROBE_SHARE` of
    the time since the last probe pays for it, one step is made with the tree that risks least for the tokens that good
    heads would give; probes that do not pay make the next ones rarer. While trees are used, the other sizes are timed
    now and then, plain decoding included.

    Compiled and captured steps: each tree's step is made for each cache size, which takes as long as many steps do (on
    an H200 a capture took about 100 plain steps of a model with 135M parameters). So a tree whose step is not made yet
    waits until it could have saved `PATIENCE_TO_MAKE` times that cost, over all generations; meanwhile the best tree
    whose step is made is taken. Only such trees are timed again, and a probe must have earned the cost as well. In a
    cache of another size, where no step is made yet, the step of the tree that was best before is made first.

    The choices depend on the observations alone, so processes that observe the same choose the same.

    Args:
        tree_set: the trees to choose from.
        times: step times of this model on this device.
        independent: whether each sequence of a batch ends by itself, as in a server: the batch has then come as far as
            its sequences have on average.
    """

    timed = True

    def __init__(self, tree_set: TreeSet, times: StepTimes, independent: bool = False) -> None:
        self.trees = tree_set.trees
        self.times = times
        self.acceptance = AcceptanceModel(tree_set)
        self.independent = independent
        self._nodes = [tree.num_nodes for tree in self.trees]
        self._index = {id(tree): index for index, tree in enumerate(self.trees)}
        self._good_heads = [tokens - 1.0 for tokens in self.acceptance.tokens]
        self._lost = self._elapsed = self._probe_credit = self._forgone = 0.0
        self._vain_probes = 0
        self._profile: Profile | None = None
        self.begin()

    def begin(self, prefill_seconds: float = 0.0, *, batch: int = 1, rows: int = 0) -> None:
        """Start a generation; see `Policy`."""
        overdrawn = self._lost - LOSS_SHARE * self._elapsed
        self._opening = self._lost = max(overdrawn, min(self._lost, 0.0), -SAVINGS)
        self._taken, self._earned, self._elapsed = [0] * len(self.trees), [0.0] * batch, 0.0
        self._unseen: deque[tuple[int, float, bool]] = deque()  # index, plain steps at risk, whether it is a probe
        self._batch = batch
        self.acceptance.begin()
        self.grown(rows)
        self._elapsed = prefill_seconds / self._plain if self._plain else 0.0

    def resized(self, batch: int) -> None:
        """Go on with another number of sequences, after all steps were observed or have failed; see `Policy`."""
        self._unseen.clear()
        self._opening = self._lost = max(self._lost, -SAVINGS)
        self._taken, self._earned = [0] * len(self.trees), [0.0] * batch
        self._batch = batch
        self.grown(self._rows)

    def grown(self, rows: int) -> None:
        """Go on in a cache of `rows` rows; see `Policy`."""
        self._rows = rows
        profile = self.times.profile(self._batch, rows)
        if profile is not self._profile:
            self._profile, self._since_check = profile, 0
        self._refresh(profile)

    @property
    def rate(self) -> float:
        """How many tokens the best tree is expected to make in a plain step's time."""
        return max((rate for rate, timed in zip(self._rates, self._timed, strict=False) if timed), default=1.0)

    def choose(self, made: Callable[[Tree], bool] | None = None, matched: Sequence[int] = ()) -> Tree:
        """Return the tree of the next step; see `Policy`."""
        self._made = made if made is not None and self._making else None
        index, probe = self._pick() if self._plain else (0, False)
        self._unseen.append((index, self._risk[index], probe))
        return self.trees[index]

    def _pick(self) -> tuple[int, bool]:
        """Return the index of the next step's tree, and whether it is a probe."""
        at_risk = sum(risk for _, risk, _ in self._unseen)
        allowed = ADVANCE + LOSS_SHARE * self._elapsed - self._lost - at_risk
        if self._probe_credit < self._least_risk and not self._promising:
            # As below, in less time: of a small model's plain steps, choosing would take several per cent.
            if self._least_risk > allowed:
                self._probe_credit = min(self._probe_credit, 0.0)
            return 0, False
        # Nothing else is tried before a probe, or the first step of a size, was observed.
        waiting = any(probe or not self._timed[index] for index, _, probe in self._unseen)
        # It may take much longer than is hoped, so sizes are tried from the smallest one up.
        untimed = self._timed.index(False) if not (waiting or all(self._timed)) else 0
        tried = [known or index == untimed for index, known in enumerate(self._timed)]
        affordable = [index for index, risk in enumerate(self._risk) if risk <= allowed and tried[index]]
        rates = self._rates
        best = self._worth_making(max(affordable, key=rates.__getitem__, default=0), affordable)
        if best:
            profile = self._profile
            assert profile is not None
            self._since_check += 1
            if self._since_check < min(CHECK_FIRST + profile.checks, CHECK_LAST):
                return best, False
            self._since_check, profile.checks = 0, profile.checks + 1
            others = [
                index for index in affordable
                if (not index or rates[index] > CHECK_RATE * rates[best]) and self._is_made(index)
            ]  # fmt: skip
            return others[profile.checks % len(others)] if others else best, False
        probe = max(affordable[1:], key=lambda index: self._good_heads[index] / self._risk[index], default=0)
        price = self._risk[probe] + (0.0 if self._is_made(probe) else self._making)
        self._probe_credit = min(self._probe_credit, 1.5 * price)
        if waiting or self._probe_credit < price:
            return 0, False
        return probe, bool(probe)

    def _is_made(self, index: int) -> bool:
        return self._made is None or self._made(self.trees[index])

    def _worth_making(self, best: int, affordable: Sequence[int]) -> int:
        """Return the best tree if its step is made or should be now, else the best whose step is made."""
        if self._is_made(best):
            return best
        made = [index for index in {0, *affordable} if self._is_made(index)]
        if made:  # else any other step would have to be made as well
            other = max(made, key=self._rates.__getitem__)
            self._forgone += self._charges[other] * (1.0 - self._rates[other] / self._rates[best])
            if self._forgone < PATIENCE_TO_MAKE * self._making:
                return other
        self._forgone = 0.0
        return best

    def observe(self, step: StepResult) -> None:
        """Learn from a step; see `Policy`."""
        tree, seconds, committed = step.tree, step.seconds, step.committed
        index = self._index.get(id(tree))
        if not self._unseen or self._unseen[0][0] != index:
            wanted = self.trees[self._unseen[0][0]] if self._unseen else "none"
            raise ValueError(f"tree: expected the one chosen for the oldest unobserved step ({wanted}), got {tree}")
        probe = self._unseen.popleft()[2]
        if not committed:
            return
        profile = self._profile
        assert profile is not None
        if step.made and seconds is not None:
            self.times.making = min(self.times.making or seconds, seconds)
            self._refresh(profile)
        elif seconds is not None and profile.observe(tree.num_nodes, seconds):
            self._refresh(profile)
        cost = self._charges[index]
        self._elapsed += cost
        self._probe_credit += PROBE_SHARE * cost / 2 ** min(self._vain_probes, PATIENCE)
        if self.acceptance.observe(index, committed):
            self._compare()
        if index:
            self._charge(index, committed)
            gain = sum(committed) / len(committed) - cost
            self._vain_probes = self._vain_probes + 1 if probe and gain < 0 else 0
            self._probe_credit += gain if probe else -self._probe_credit

    def _charge(self, index: int, committed: Sequence[int]) -> None:
        """Book a step with a tree: its cost, less the plain steps to where the slowest row is now."""
        if len(self._earned) != len(committed):
            # Some rows have ended, it is not known which: the others are compared from here on.
            self._opening, self._taken, self._earned = self._lost, [0] * len(self.trees), [0.0] * len(committed)
        self._taken[index] += 1
        self._earned = [earned + count for earned, count in zip(self._earned, committed, strict=True)]
        self._settle()

    def _settle(self) -> None:
        """Compute what is lost, at the current charges. A loss beyond what is allowed was a surprise, and forgiven."""
        earned = statistics.fmean(self._earned) if self.independent else min(self._earned)
        self._lost = self._opening + sum(map(operator.mul, self._taken, self._charges)) - earned
        allowed = ADVANCE + MOST_RISK + LOSS_SHARE * self._elapsed
        if self._lost > allowed:
            self._opening = self._lost = allowed
            self._taken, self._earned = [0] * len(self.trees), [0.0] * len(self._earned)

    def _refresh(self, profile: Profile) -> None:
        """Read the current step times, as multiples of a plain step."""
        estimates, timed = profile.estimates(self._nodes), profile.known()
        self._plain = plain = estimates[0][0] if estimates else 0.0
        self._making = self.times.making / plain if plain else 0.0
        self._timed = [nodes in timed for nodes in self._nodes]
        self._costs, self._risk, self._charges = [1.0 / PLAIN_MARGIN], [0.0], [1.0]
        for nodes, (hopeful, careful) in zip(self._nodes[1:], estimates[1:], strict=False):
            likely = max(careful / plain, 1.0 + LEAST_COST)
            unsettled = 0 < profile.samples(nodes) < profile.settled
            self._costs.append(max(hopeful / plain, 1.0 + LEAST_COST / 2))
            self._charges.append(min(likely, MOST_COST) if unsettled else likely)
            self._risk.append(min(likely - 1.0, MOST_RISK) if unsettled else likely - 1.0)
        self._least_risk = min(self._risk[1:], default=math.inf)
        self._settle()
        self._compare()

    def _compare(self) -> None:
        """Compute the trees' tokens per plain step's time, and whether any beats plain decoding."""
        # Until a plain step was timed, only its own cost is known.
        self._rates = [tokens / cost for tokens, cost in zip(self.acceptance.tokens, self._costs, strict=False)]
        self._promising = max(self._rates) > self._rates[0]
