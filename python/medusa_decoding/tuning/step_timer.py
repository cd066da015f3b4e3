"""Time real steps of the decode loop on this device for each tree size.

For one batch size and prefix length, random tokens are prefilled once. Blocks of steps then start from that state, each
block with one tree, in an order shuffled in every round: no size always follows the same other one, and a disturbance
of the machine affects all of them. The first steps of a block are not counted, because a generation stays with one tree
and finds its weights (packed per size if steps are compiled) in the caches. On a GPU steps are launched ahead as in the
loop, and a step's duration is the time between the ends of two steps.

The text is meaningless, so accepted tokens are not counted. This module does not know which tree is best.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from medusa_decoding.checks import check_count
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.runtime.progress import Watch
from medusa_decoding.decode.runtime.runner import HEADROOM
from medusa_decoding.decode.runtime.steps import KEPT_STEPS, resolve_backend
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree

UNCOUNTED, COUNTED = 1, 3
"""Steps at the start of a block whose durations are dropped, and steps after them whose durations are kept."""
NEW_TOKENS = 256
"""New tokens that the cache has room for: the default length of a generation."""


@dataclass(frozen=True)
class Latency:
    """Durations of steps with a tree of one size.

    Attributes:
        batch: rows of the batch.
        prefix: tokens of each row before the step.
        rows: rows of the cache.
        nodes: of the tree, root included; 1 for a plain step.
        seconds: of each counted step, in the order they ran.
    """

    batch: int
    prefix: int
    rows: int
    nodes: int
    seconds: tuple[float, ...]

    @property
    def typical(self) -> float:
        """The mean of the middle half of the durations.

        Rare outliers do not change it, as with the median. If a machine alternates between two speeds (a neighbour on
        the same core), the median is one of the two by chance; this mean is in between, like a whole generation.
        """
        ordered = sorted(self.seconds)
        cut = len(ordered) // 4
        return statistics.fmean(ordered[cut : len(ordered) - cut])

    @property
    def rounds(self) -> list[float]:
        """The median duration of each round (block of `COUNTED` steps)."""
        return [statistics.median(self.seconds[at : at + COUNTED]) for at in range(0, len(self.seconds), COUNTED)]

    @property
    def median(self) -> float:
        """The median duration."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and upper quartiles of the durations."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def time_steps(
    model: MedusaModel,
    trees: Sequence[Tree],
    *,
    batch: int = 1,
    prefix: int = 128,
    repeats: int = 7,
    on_block: Callable[[], object] = lambda: None,
) -> list[Latency]:
    """Time a model's steps with each tree, on the backend that its generations use.

    Args:
        model: the model; it is not changed.
        trees: different trees; `Tree([])` is the plain step.
        batch: rows of the batch.
        prefix: tokens per row before the steps.
        repeats: counted blocks per tree, of `COUNTED` durations each.
        on_block: called after each block, for a progress bar. There are `repeats` + 1 per tree: the first warms up.

    Returns:
        One entry per tree, in the order given.

    Raises:
        ValueError: bad arguments, a tree that the heads cannot fill, a prefix that leaves no room in the model's
            context, a tensor parallel model; before any work.
        MemoryError: keys and values do not fit.
        FloatingPointError: the model's output is not finite.
    """
    _check(model, trees, batch, prefix, repeats)
    backbone = model.backbone
    backend = resolve_backend(model.backend, backbone.device)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(backbone.vocab_size, (prefix,), generator=generator).to(backbone.device) for _ in range(batch)
    ]
    locked = backbone.lock.held(backbone.device)
    with locked, torch.inference_mode(False), torch.no_grad(), model.current_device():
        step_of, pool = model._steps.prepare(backend), model._steps.pool
        sizes = Sizes.for_trees([prefix] * batch, NEW_TOKENS, trees)
        state = pool.acquire(sizes, pool.first_capacity(sizes, HEADROOM))
        try:
            # No token ends a row, and no block reaches the budget.
            limits = Limits([NEW_TOKENS] * batch, [0] * batch, [], device=backbone.device)
            selector = Greedy()
            watch = Watch(state, timed=True)
            prefill(backbone, prompts, state, selector, limits)
            watch.record(state)
            _read(watch)
            before = state.snapshot()

            def block(tree: Tree) -> list[float]:
                state.restore(before)
                step, seconds = step_of(tree), []
                for _ in range(UNCOUNTED + COUNTED):
                    step(state, selector, limits)
                    watch.record(state)
                    if watch.pending > watch.late:
                        seconds.append(_read(watch))
                while watch.pending:
                    seconds.append(_read(watch))
                on_block()
                return seconds[UNCOUNTED:]

            found, capacity = interleaved(block, trees, repeats), state.cache.capacity
        finally:
            pool.release(state)
    return [
        Latency(batch, prefix, capacity, tree.num_nodes, tuple(seconds))
        for tree, seconds in zip(trees, found, strict=True)
    ]


def interleaved(block: Callable[[Tree], Sequence[float]], trees: Sequence[Tree], repeats: int) -> list[list[float]]:
    """Run one block of steps per tree and round, in shuffled order; return each tree's durations, in order of `trees`.

    `block` returns the durations to count. A first round, which compiles and captures, is not counted.
    """
    for tree in trees:
        block(tree)
    shuffler, order = random.Random(0), list(range(len(trees)))
    found: list[list[float]] = [[] for _ in trees]
    for _ in range(repeats):
        shuffler.shuffle(order)
        for place in order:
            found[place] += block(trees[place])
    return found


def longest_prefix(model: MedusaModel, trees: Sequence[Tree]) -> int:
    """Return the longest prefix after which blocks fit in the model's context; below 1 if there is none."""
    return model.backbone.context_limit - (UNCOUNTED + COUNTED) * (1 + max(tree.depth for tree in trees)) - 1


def _read(watch: Watch) -> float:
    progress = watch.read()
    if any(progress.broken):
        raise FloatingPointError("model: expected finite logits, got NaN or infinity while steps were timed")
    assert progress.seconds is not None
    return progress.seconds


def _check(model: MedusaModel, trees: Sequence[Tree], batch: int, prefix: int, repeats: int) -> None:
    for name, value in (("batch", batch), ("prefix", prefix), ("repeats", repeats)):
        check_count(name, value)
    if not 1 <= len(set(trees)) == len(trees) <= KEPT_STEPS:
        sizes = [tree.num_nodes for tree in trees]
        raise ValueError(f"trees: expected 1 to {KEPT_STEPS} different ones, got {len(sizes)} of {sizes} nodes")
    for tree in trees:
        model.check_tree(tree)
    if model.backbone.peers.size > 1:
        raise ValueError(f"model: expected one in one process, got one over {model.backbone.peers.size}")
    most = longest_prefix(model, trees)
    if prefix > most:
        raise ValueError(
            f"prefix: expected at most {most} (the model's context holds {model.backbone.context_limit} tokens), got "
            f"{prefix}"
        )
    model._check_decodable()
