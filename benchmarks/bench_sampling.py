"""One step's draw of tokens from given logits, by settings: at all nodes at once, and by processors at every depth.

    python -m benchmarks.bench_sampling --budget 60

The choice alone is timed, its noise included, with the logits of all nodes made already: what sampling adds to a step
after lm_head, except for a temperature alone, which the op `tree_verify` applies where logits are not stored. It is
captured as within a step; with a processor that needs the text, the host follows the path between two captured graphs,
and the record says that it was not captured. The peers run the processors at every depth: ours, as before there was
`draw_tokens`, and transformers' own objects, whose top-p sorts the vocabulary. On a CPU nothing draws at once, so that
our two ways are one. Bytes: the logits of the nodes on one path, once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.generation import logits_process as lp

from benchmarks import gpu, suite
from medusa_decoding import Tree
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.selection import sampling
from medusa_decoding.decode.selection.processors import LogitsProcessors
from medusa_decoding.decode.selection.sampling import Sampling
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.decode.verify import Nodes, TokenSelector

OP = "sampling"
LENGTH = 64
"""Tokens of text that processors look at."""

SETTINGS: dict[str, Callable[[], list[Any]]] = {
    "temperature": lambda: [lp.TemperatureLogitsWarper(0.8)],
    "top_p": lambda: [lp.TemperatureLogitsWarper(0.8), lp.TopPLogitsWarper(0.9)],
    "top_k": lambda: [lp.TemperatureLogitsWarper(0.8), lp.TopKLogitsWarper(50)],
    "top_k, top_p": lambda: [lp.TemperatureLogitsWarper(0.6), lp.TopKLogitsWarper(20), lp.TopPLogitsWarper(0.95)],
    "repetition, top_p": lambda: [lp.RepetitionPenaltyLogitsProcessor(1.1), lp.TopPLogitsWarper(0.9)],
}


@dataclass(frozen=True)
class Case(suite.Case):
    """Settings, and the step that draws by them."""

    settings: str
    vocabulary: int
    nodes: int
    batch: int = 1

    @property
    def tree(self) -> Tree:
        """A chain of four, with siblings up to the number of nodes: five tokens are drawn if all drafts are right."""
        chain = [[0] * depth for depth in range(1, 5)]
        return Tree([*chain, *([rank] for rank in range(1, self.nodes - len(chain)))])

    def bytes(self, element: int) -> int:
        """Count what one path's draws read at least."""
        return self.batch * (self.tree.depth + 1) * self.vocabulary * element


def cases() -> Iterator[Case]:
    """All cases, the most telling first."""
    for vocabulary, settings in itertools.product((128_256, 32_000), SETTINGS):
        yield Case(settings, vocabulary, 64)
    yield Case("top_p", 128_256, 16, batch=4)


class Given(nn.Module):
    """In the place of lm_head: the logits are there already."""

    def forward(self, logits: Tensor) -> Tensor:
        """Return the logits."""
        return logits


@dataclass
class State:
    """What a choice reads of a generation's state (see `DecodeState`)."""

    check: Tensor
    seeds: Tensor
    count: Tensor
    finished: Tensor
    step: Tensor


@dataclass
class Inputs:
    """One step after its lm_head."""

    nodes: Nodes
    state: State
    limits: Limits


def inputs(case: Case, run: suite.Run, sets: int) -> list[Inputs]:
    """Draw logits. The nodes of the chain carry the very tokens that are drawn, so that the whole path is walked."""
    tree, rows = TreeTensors.from_tree(case.tree, run.device), torch.arange(case.batch, device=run.device)
    found = []
    for _ in range(sets):
        shape = case.batch, case.tree.num_nodes, case.vocabulary
        logits = 3 * torch.randn(shape, device=run.device, dtype=torch.float32).to(run.dtype)
        state = State(
            torch.zeros(case.batch, device=run.device),
            torch.randint(2**62, (case.batch,), device=run.device),
            torch.zeros(case.batch, dtype=torch.int32, device=run.device),
            torch.zeros(case.batch, dtype=torch.bool, device=run.device),
            torch.zeros(1, dtype=torch.int64, device=run.device),
        )
        limits = Limits([8] * case.batch, [0] * case.batch, [], device=run.device)
        tokens = torch.full((case.batch, case.tree.num_nodes), -1, device=run.device)
        x = Inputs(Nodes(logits, tokens, tree), state, limits)
        node = 0
        for depth in range(case.tree.depth):
            drawn = chosen(case, run, theirs)(x)[rows, node]
            node = case.tree.choices.index([0] * (depth + 1)) + 1
            tokens[:, node] = drawn
        found.append(x)
    return found


def ours(case: Case, device: torch.device) -> TokenSelector:
    """Return our choice for a case's settings."""
    processors = SETTINGS[case.settings]()
    if not any(isinstance(processor, lp.RepetitionPenaltyLogitsProcessor) for processor in processors):
        return Sampling(processors)
    text = torch.arange(LENGTH, device=device)
    return LogitsProcessors([text] * case.batch, [processors] * case.batch, [8] * case.batch, [], sample=True)


def each_depth(case: Case, device: torch.device) -> TokenSelector:
    """Return our choice by processors at every depth."""
    with mock.patch.object(sampling, "DRAW_AT_ONCE", False):
        return ours(case, device)


def theirs(case: Case, device: torch.device) -> TokenSelector:
    """Return the same choice with transformers' own objects."""
    choice: Any = each_depth(case, device)
    for own in [row.processors for row in choice.rows] if isinstance(choice, LogitsProcessors) else [choice.processors]:
        own[:] = SETTINGS[case.settings]()
    return choice  # type: ignore[no-any-return]


def chosen(
    case: Case, run: suite.Run, make: Callable[[Case, torch.device], TokenSelector]
) -> Callable[[Inputs], Tensor]:
    """Return the call that a way makes on one copy of the inputs."""
    device, projection = run.device, Given()
    choice = make(case, device)

    def call(x: Inputs) -> Tensor:
        noise = choice.noise(x.state, case.tree.depth + 1, case.vocabulary)  # type: ignore[arg-type]
        for row in choice.rows if isinstance(choice, LogitsProcessors) else ():
            row.length = LENGTH  # it remembers what it has drawn
        return choice(replace(x.nodes, noise=noise), projection, x.state, x.limits)  # type: ignore[arg-type]

    return call


WAYS = {suite.OURS: ours, "processors at each depth": each_depth, "transformers' processors": theirs}


def measure(case: Case, run: suite.Run) -> None:
    """Measure our choice, then the same by processors at each depth."""
    size = case.bytes(run.dtype.itemsize)
    ways = {name: chosen(case, run, make) for name, make in WAYS.items()}
    copies = [
        suite.Copy({name: functools.partial(way, x) for name, way in ways.items()}, functools.partial(difference, x))
        for x in inputs(case, run, min(4, max(2, gpu.sets_needed(size, run.device))))
    ]
    run.compare(case, copies, 0.0, bytes=size)


def difference(x: Inputs, one: suite.Way, other: suite.Way) -> float:
    """Return how many tokens differ along the path, at whose nodes there are tokens; others' tokens do not matter."""
    reached = x.nodes.tokens >= 0
    reached[:, 0] = True
    return float((one() != other())[reached].sum())


SMALL = Case("top_p", 128_256, 16)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=60)
