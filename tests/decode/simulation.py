"""Made-up devices and heads for policies: a clock that only counts, random numbers from fixed seeds.

For each head, the rank at which it is right is drawn, and the path through the tree follows from that: no formula
is shared with what is tested. Times are in plain steps, so a generation of n tokens takes n - 1 of them plainly (the
prefill gives the first).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medusa_decoding import Tree
from medusa_decoding.decode.policy import Policy, StepResult
from medusa_decoding.trees.published import ACCURACIES

Heads = Sequence[Sequence[float]]
GOOD: Heads = ACCURACIES["vicuna-7b-v1.3"]
BETTER: Heads = [
    [0.76, 0.095, 0.035, 0.022],
    [0.55, 0.12, 0.06, 0.036],
    [0.39, 0.11, 0.07, 0.05],
    [0.3, 0.11, 0.07, 0.05],
]
USELESS: Heads = [[0.0005] * 5] * 5  # about chance with 2,048 tokens

GPU = {1: 1.0, 2: 1.05, 4: 1.06, 8: 1.07, 16: 1.09, 32: 1.13, 64: 1.2}
CPU = {1: 1.0, 2: 1.35, 4: 1.5, 8: 1.7, 16: 2.0, 32: 3.0, 64: 5.0}
AWFUL = {1: 1.0} | dict.fromkeys((2, 4, 8, 16, 32, 64), 3.0)
DEVICES = {"gpu": GPU, "cpu": CPU, "awful": AWFUL}


def preempted(seed: int, rate: float, phases: float = 1.0) -> Callable[[int, int, float], float]:
    """Return step times as measured where other programs have the cores now and then, for `Simulation.disturbed`.

    A plain step takes 0.3 ms, and `rate` is the chance that it loses its core, for 4 to 20 ms; longer steps lose it
    more often. In phases of some 100 steps all steps take `phases` times as long.
    """
    draws, phase = random.Random(seed), [1.0]

    def disturb(step: int, nodes: int, seconds: float) -> float:
        if draws.random() < 0.01:
            phase[0] = 1.0 + phases - phase[0]
        lost = draws.uniform(13.0, 66.0) if draws.random() < 1.0 - (1.0 - rate) ** seconds else 0.0
        return seconds * phase[0] * math.exp(0.05 * draws.gauss(0, 1)) + lost

    return disturb


PATHS: dict[int, tuple[Tree, set[tuple[int, ...]]]] = {}  # of each tree met; the tree itself keeps its id its own


def commit(tree: Tree, heads: Heads, draws: random.Random) -> int:
    """Count the tokens of one step: the root, and the path along the ranks at which each head is right."""
    if id(tree) not in PATHS:
        PATHS[id(tree)] = (tree, set(map(tuple, tree.choices)))
    paths, path = PATHS[id(tree)][1], ()
    while len(path) < tree.depth:
        left, right = draws.random(), None
        for rank, accuracy in enumerate(heads[len(path)]):
            if left < accuracy:
                right = rank
                break
            left -= accuracy
        if (*path, right) not in paths:
            break
        path = (*path, right)
    return len(path) + 1


@dataclass
class Simulation:
    """A device that decodes.

    Attributes:
        times: the time of a step in plain steps, by number of nodes.
        late: how many steps are chosen before a step is observed.
        noise: of what is observed, in the logarithm; the time that counts has none.
        disturbed: (step of the generation, nodes, seconds) to the seconds that are observed.
        making: the time of capturing a step before it runs for the first time; 0 if steps need not be.
        made: nodes of the steps that were captured.
        chosen: nodes of each step of the last generation.
    """

    times: dict[int, float]
    seed: int = 0
    late: int = 0
    noise: float = 0.0
    disturbed: Callable[[int, int, float], float | None] = lambda step, nodes, seconds: seconds
    making: float = 0.0
    made: set[int] = field(default_factory=set)
    chosen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)

    def generate(
        self, policy: Policy, rows: Sequence[Callable[[int], Heads]], tokens: int, prefill: float = 0.0
    ) -> float:
        """Return the time taken, in plain steps; `rows` gives the heads' accuracies by position."""
        policy.begin(prefill, batch=len(rows), rows=1024)
        counts, clock, unseen = [1] * len(rows), 0.0, []
        self.chosen = []
        while min(counts) < tokens:
            tree = policy.choose((lambda tree: tree.num_nodes in self.made) if self.making else None)
            new_tokens = []
            for row, heads in enumerate(rows):
                if counts[row] < tokens:
                    new = min(commit(tree, heads(counts[row]), self.draws), tokens - counts[row])
                    counts[row] += new
                    new_tokens.append(new)
            nodes = tree.num_nodes
            seconds = self.times[nodes] * math.exp(self.noise * self.draws.gauss(0, 1))
            making = 0.0 if nodes in self.made else self.making
            self.made.add(nodes)
            observed = self.disturbed(len(self.chosen), nodes, seconds)
            unseen.append((tree, None if observed is None else observed + making, new_tokens, making > 0))
            clock += self.times[nodes] + making
            self.chosen.append(nodes)
            while len(unseen) > self.late:
                policy.observe(StepResult(*unseen.pop(0)))
        for result in unseen:  # what is never observed is a step that was launched in vain, after the last one
            policy.observe(StepResult(*result))
        return clock

    def serve(
        self, policy: Policy, clients: int, heads: Heads, time_of: Callable[[int, int], float], tokens: int
    ) -> float:
        """Return the tokens per plain step of one row that `clients` get who ask again as soon as they are answered.

        Answers take 10 to 160 tokens; `time_of` is the time of a step by rows and nodes.
        """
        left: list[int] = []
        clock = made = 0.0
        self.chosen = []
        while made < tokens:
            before = len(left)
            left += [self.draws.randint(10, 160) for _ in range(clients - before)]
            if not self.chosen:
                policy.begin(batch=clients, rows=1024)
            if before < clients:
                policy.resized(clients)
            tree = policy.choose()
            seconds = time_of(clients, tree.num_nodes)
            new = [min(commit(tree, heads, self.draws), rest) for rest in left]
            left = [rest - count for rest, count in zip(left, new, strict=True) if rest > count]
            policy.observe(StepResult(tree, seconds * math.exp(self.noise * self.draws.gauss(0, 1)), new))
            self.chosen.append(tree.num_nodes)
            clock, made = clock + seconds, made + sum(new)
        return made / clock
