"""Policy: which tree the next step verifies; one tree always, or the one that pays at this moment.

A policy sees what steps took and committed. It does not know tokens, models or caches, and no text depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from medusa_decoding.decode.adaptive.acceptance import AcceptanceModel, TreeSet
from medusa_decoding.decode.adaptive.step_times import TRUSTED, StepTimes
from medusa_decoding.trees.tree import Tree

LOSS_SHARE = 0.02
"""Share of a generation's time that steps with trees may lose against plain decoding."""
HORIZON = 64
"""Plain steps that a generation is taken to last at least, so that trees can be tried from its first step on."""
GAIN_SHARE, SAVINGS = 0.1, 30
"""Share of a generation's gains that the next ones may lose besides, at most `LOSS_SHARE` of so many plain steps."""
PROBE_SHARE = 0.01
"""Share of the time that probes may lose while plain decoding is believed to be the best."""
PLAIN_MARGIN = 1.01
UNTRIED_MARGIN = 1.03
"""How much faster than plain decoding a tree has to be believed to be, and a size never timed here than the best."""
LEAST_COST = 0.1
"""Part of a plain step that a tree is charged at least, so that noise in the times makes none look free."""
REACH = 4
"""How many times larger than the largest known size a size that was never timed may be."""
CHECK_FIRST, CHECK_LAST = 4, 256
"""Steps with trees behind which one plain step is timed again; doubled from check to check."""


class Adaptive:
    """The tree that commits most tokens a second, plain decoding included, as far as known at each step.

    One such object serves one model's generations, one after the other: `begin` before each. What a step commits is the
    belief's business, what it takes the step times'; predicted tokens over predicted seconds is what is maximised (in a
    batch, tokens of all running rows).

    Never slower: two accounts, in seconds, hold what steps with trees lose, that is their time less what plain steps
    would have taken to come as far. A batch is as far as its slowest running row, on which its end waits.

    - The generation's. A tree is only taken if, should it commit nothing but its root, all losses less all gains of the
      generation stay below `LOSS_SHARE` of its time so far (prefill included), or of `HORIZON` plain steps where that
      is longer. What a short generation overdrew goes over to the next one. So with useless heads a generation of 64
      tokens or more, and any sequence of shorter ones, loses that share at most once the sizes are timed; of a size
      never timed, the first step may cost more than was expected. Where speculation gained before, `GAIN_SHARE` of
      the gains is saved for bad beginnings: a useless text behind good ones may lose up to `SAVINGS` steps' share more.
    - The probes'. While plain decoding is believed to be the best, nothing is learnt about the heads. Then a probe is
      taken, one step with the tree that risks least for the tokens that good heads would give, whenever `PROBE_SHARE`
      of the time since the last one pays for it. A probe that gained pays for the next at once.

    Times are checked as well: while trees are used, a plain step is taken now and then. The size that is tried first is
    at most `REACH` nodes, each later one at most `REACH` times the largest known. A step whose `seconds` are None (it
    was compiled or captured) is booked with what it is believed to take: making steps is no loss, and is not bounded.

    Args:
        tree_set: what to choose from.
        times: step times of this model on this device.
        belief: about the tree_set's trees.

    Raises:
        ValueError: a belief about another tree_set.
    """

    timed = True

    def __init__(self, tree_set: TreeSet, times: StepTimes, belief: AcceptanceModel) -> None:
        if belief.tree_set is not tree_set:
            raise ValueError("belief: expected one about the tree_set given, got one about another")
        self.trees = tree_set.trees
        self.times = times
        self.belief = belief
        self._nodes = [tree.num_nodes for tree in tree_set.trees]
        self._good = [tokens - 1.0 for tokens in AcceptanceModel(tree_set).tokens]
        self._index = {id(tree): index for index, tree in enumerate(tree_set.trees)}
        self._lost = self._start = self._elapsed = self._probes = 0.0
        self._plain: float | None = None
        self._since_plain = 0
        self.begin()

    def begin(self, prefill_seconds: float = 0.0, *, batch: int = 1, rows: int = 0) -> None:
        """Start a generation; see `Policy`."""
        self._lost = self._start = self._carried_over()
        self._before, self._spent = self._lost, 0.0
        self._earned: list[float] = []
        self._elapsed = prefill_seconds
        self._batch = batch
        self._chosen: deque[tuple[int, float, bool]] = deque()  # index, seconds at risk, whether it is a probe
        self._reserved = 0.0
        self.belief.begin()
        self.grown(rows)

    def _carried_over(self) -> float:
        """Return the loss that the next generation starts with: what was overdrawn, or less than nothing of gains."""
        change = self._lost - self._start
        balance = self._start + (change if change > 0 else GAIN_SHARE * change)
        if balance > 0:
            return max(0.0, balance - LOSS_SHARE * self._elapsed)
        return max(balance, -SAVINGS * LOSS_SHARE * (self._plain or 0.0))

    def grown(self, rows: int) -> None:
        """Go on in a cache of `rows` rows; see `Policy`."""
        self._profile = self.times.profile(self._batch, rows)
        self._met: set[int] = set()
        self._refresh()

    def choose(self) -> Tree:
        """Return the tree of the next step."""
        index, probe = self._pick()
        risk = 0.0
        if index:
            risk = self._risk[index]
            self._reserved += risk
            self._since_plain += 1
        else:
            self._since_plain = 0
        self._chosen.append((index, risk, probe))
        return self.trees[index]

    def observe(self, tree: Tree, seconds: float | None, committed: Sequence[int]) -> None:
        """Learn from a step; see `Policy`.

        Raises:
            ValueError: a tree that was not chosen next.
        """
        index = self._index.get(id(tree))
        if not self._chosen or self._chosen[0][0] != index:
            wanted = self.trees[self._chosen[0][0]] if self._chosen else "none"
            raise ValueError(f"tree: expected the one chosen for the oldest unobserved step ({wanted}), got {tree}")
        _, risk, probe = self._chosen.popleft()
        self._reserved = self._reserved - risk if self._chosen else 0.0
        if not committed:
            return
        nodes = self._nodes[index]
        charge = self._seconds[index] or seconds or 0.0
        if seconds is not None:
            if probe or self._profile.samples(nodes) < TRUSTED:
                # A step that takes much longer than believed was disturbed; were it the rule, the belief would follow.
                charge = min(seconds, 3.0 * max(charge, self._seconds[0] or 0.0))
            self._profile.add(nodes, seconds, index not in self._met)
        self._met.add(index)
        self._elapsed += charge
        self._probes += PROBE_SHARE * charge
        if index:
            plain = self._seconds[0] or 0.0
            charge = max(charge, (1.0 + LEAST_COST) * plain)
            self._charge(charge, plain, committed)
            mean = sum(committed) / len(committed)
            self._probes = self._probes - charge + plain * mean if probe else 0.0
            self.belief.observe(index, committed)
        behind = self._profile.version - self._version
        if behind and (behind >= REFRESHED_EVERY or self._profile.samples(nodes) <= SETTLED):
            self._refresh()

    def _charge(self, seconds: float, plain: float, committed: Sequence[int]) -> None:
        """Book a step with a tree: its time, less what plain steps take to where the slowest row is now."""
        earned = self._earned
        if len(earned) != len(committed):
            # Rows have ended, nobody says which: those that go on are compared from here on.
            self._before, self._spent = self._lost, 0.0
            self._earned = earned = [0.0] * len(committed)
        self._spent += seconds
        for row, count in enumerate(committed):
            earned[row] += plain * count
        self._lost = self._before + self._spent - min(earned)

    def _pick(self) -> tuple[int, bool]:
        """Return the index of the next step's tree, and whether it is a probe."""
        plain = self._seconds[0]
        if plain is None:
            return 0, False
        allowed = LOSS_SHARE * max(self._elapsed, HORIZON * plain) - self._lost - self._reserved
        tokens, best, best_rate = self.belief.tokens, 0, PLAIN_MARGIN / plain
        for index in self._ready if self._chosen and self._first_under_way() else self._candidates:
            if self._risk[index] <= allowed:
                rate = tokens[index] / self._margined[index]
                if rate > best_rate:
                    best, best_rate = index, rate
        if best:
            due = min(CHECK_FIRST << self._profile.checks, CHECK_LAST)
            if self._since_plain < due:
                return best, False
            self._profile.checks += 1
            return 0, False
        probe = self._probe
        if not probe:
            return 0, False
        risk = self._risk[probe]
        self._probes = min(self._probes, 1.5 * risk)
        if self._probes < risk or allowed < risk or self._first_under_way():
            return 0, False
        return probe, True

    def _first_under_way(self) -> bool:
        """Whether a step with a tree never timed is under way: before it is seen, nothing else is staked on it."""
        return any(index and index not in self._ready for index, _, _ in self._chosen)

    def _refresh(self) -> None:
        """Take over the step times as they are believed now."""
        profile = self._profile
        self._version = profile.version
        known = profile.known()
        self._seconds = [profile.seconds(nodes, known) for nodes in self._nodes]
        self._candidates: list[int] = []
        self._ready: list[int] = []  # those of them that were timed
        self._risk: list[float] = [0.0] * len(self.trees)
        self._margined: list[float] = [0.0] * len(self.trees)
        self._probe = 0
        self._plain = plain = self._seconds[0]
        if plain is None:
            return
        if profile.samples(1) <= SETTLED:
            # A plain step is part of each step with a tree: one that seems to take longer was disturbed.
            plain = self._seconds[0] = min([plain, *(time for nodes, time in known.items() if nodes > 1)])
        reach, best_score = REACH * max(known), 0.0
        for index, nodes in enumerate(self._nodes[1:], start=1):
            seconds = self._seconds[index]
            if seconds is None or nodes > reach:
                break
            risk = max((profile.at_risk(nodes, known) or seconds) - plain, LEAST_COST * plain)
            self._risk[index] = risk
            # Nor is a step with a tree ever faster than a plain one.
            self._margined[index] = max(seconds, plain) * (1.0 if nodes in known else UNTRIED_MARGIN)
            if nodes in known:
                self._ready.append(index)
            self._candidates.append(index)
            score = self._good[index] / risk
            if score > best_score:
                self._probe, best_score = index, score


REFRESHED_EVERY = 16
SETTLED = 4
"""Times are taken over at every sample of a size that has at most so many, else at every sixteenth."""
