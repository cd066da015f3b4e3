"""Ways of decoding run in turn on every prompt within one process, their texts compared, their figures added up.

Each prompt is written by every way before the next one is, in an order shuffled anew, so that a drift of the machine's
speed meets all alike. What must be the plain text is compared at once: the first text that is not ends the run.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from benchmarks import harness
from benchmarks.ablations.setup import Asked, Bench
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.evaluation.run import departure, own_attention
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree

PLAIN, TRANSFORMERS = "plain", "transformers"
BLOCK = 12
"""Ways a block where steps are captured: a model keeps the graphs of 16 trees."""


class OtherTextError(RuntimeError):
    """A way of decoding that is to write another way's text wrote something else."""


@dataclass(frozen=True)
class Written:
    """One text.

    Attributes:
        text: new tokens.
        seconds: prefill included.
        committed: tokens that steps committed; our prefill, which gives the first token, is not a step.
        steps: forward passes of the model after the prefill.
    """

    text: list[int]
    seconds: float
    committed: int
    steps: int


Way = Callable[[Asked], Written]


@dataclass
class Found:
    """Texts of one way, in the prompts' order, each with the baseline's text of the same block of ways."""

    written: list[Written] = field(default_factory=list)
    plain: list[Written] = field(default_factory=list)
    same: int | None = None

    def tokens_per_step(self) -> Interval | None:
        """Return committed tokens per step, the paper's acceleration rate."""
        return interval.ratio([(one.committed, one.steps) for one in self.written])

    def speedup(self) -> Interval | None:
        """Return tokens per second over the baseline's."""
        pairs = zip(self.written, self.plain, strict=True)
        return interval.ratio_of_rates([(len(a.text), a.seconds, len(b.text), b.seconds) for a, b in pairs])

    def figures(self) -> dict[str, Any]:
        """Return figures as JSON has them; intervals are `interval.WORDS`."""
        pairs = list(zip(self.written, self.plain, strict=True))
        return {
            "tokens_per_step": rounded(self.tokens_per_step()),
            "tokens_per_second": _round(sum(len(a.text) for a, _ in pairs) / sum(a.seconds for a, _ in pairs)),
            "speedup": rounded(self.speedup()),
            "median_speedup_of_prompts": _round(
                statistics.median((len(a.text) / a.seconds) / (len(b.text) / b.seconds) for a, b in pairs)
            ),
        } | ({} if self.same is None else {"same_text": self.same, "texts": len(pairs)})


def ours(
    bench: Bench,
    tree: Tree | Literal["auto"],
    model: MedusaModel | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **generation: Any,
) -> Way:
    """Return this package's loop with a tree (a `Tree` or "auto"), on the bench's model by default.

    Where tokens are drawn, each prompt has a seed of its own, the same with every tree.
    """
    decoder = model or bench.model

    def way(asked: Asked) -> Written:
        drawn = {"seed": bench.seed + asked.number} if generation.get("do_sample") else {}
        start = clock()
        output = decoder.generate(
            asked.ids, max_new_tokens=bench.new_tokens, tree=tree, **bench.ends, **generation, **drawn
        )
        assert isinstance(output, MedusaOutput)
        text = output.sequences[0, asked.ids.shape[1] :].tolist()
        seconds = clock() - start
        accepted = output.accept_lengths[0]
        return Written(text, seconds, sum(accepted) + len(accepted), len(accepted))

    return way


def transformers(bench: Bench, **settings: Any) -> Way:
    """Return transformers' greedy `generate` with the model's own attention modules and these settings.

    Its steps are calls of the model, and its tokens all of the text: with an assistant, the prefill verifies drafts.
    """

    def way(asked: Asked) -> Written:
        generation: dict[str, Any] = dict(bench.ends)
        generation["eos_token_id"] = generation["eos_token_id"] or None
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        with own_attention(bench.model) as base:
            prompt = asked.ids.to(base.device)
            hook = base.register_forward_pre_hook(count)
            try:
                start = time.perf_counter()
                out = base.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=bench.new_tokens,
                    do_sample=False,
                    return_dict_in_generate=False,
                    **settings,
                    **generation,
                )
                text = out[0, prompt.shape[1] :].tolist()
                seconds = time.perf_counter() - start
            finally:
                hook.remove()
        return Written(text, seconds, len(text), calls)

    return way


def timed(written: Sequence[Written]) -> list[tuple[int, float]]:
    """Return tokens and seconds of each text."""
    return [(len(one.text), one.seconds) for one in written]


def answer(ways: Mapping[str, Way], asked: Sequence[Asked], rounds: int = 1) -> dict[str, list[Written]]:
    """Write every prompt by every way in turn, some times over; return the texts of each way."""
    shuffler, found = random.Random(0), {name: [] for name in ways}  # type: ignore[var-annotated]
    for one in [*asked] * rounds:
        for name, written in harness.in_turn(ways, one, shuffler).items():
            found[name].append(written)
    return found


def compare(
    bench: Bench,
    ways: Mapping[str, Way],
    same: Mapping[str, str] | None = None,
    *,
    baseline: str = PLAIN,
    before_block: Callable[[], object] | None = None,
) -> dict[str, Found]:
    """Write every prompt by every way.

    Args:
        bench: model and prompts.
        ways: by name; the baseline, and whatever others are compared with, before the rest.
        same: names of ways to the names of those whose text they must write, in float32 token for token. In other
            types texts may part where two tokens are nearly as likely: it is only counted how many are the same.
        baseline: what speeds are ratios to; it runs in every block.
        before_block: called before each block of captured steps; frees the last block's.

    Raises:
        OtherTextError: a text that must be another way's and is not.
    """
    same = same or {}
    found = {name: Found(same=0 if name in same else None) for name in ways}
    blocks = list(_blocks([name for name in ways if name != baseline], BLOCK if bench.captured else len(ways)))
    shuffler = random.Random(0)
    total = sum((len(block) + 1) * len(bench.asked) for block in blocks)
    with tqdm(total=total, unit="text", disable=None) as bar:
        for number, block in enumerate(blocks):
            if before_block is not None and bench.captured:
                before_block()
            group = [baseline, *block]
            for name in group:
                ways[name](bench.asked[0])  # not timed
            for asked in bench.asked:
                if bench.captured:
                    for name in group:
                        ways[name](asked)  # a cache of another size gets its own graphs
                written = harness.in_turn({name: ways[name] for name in group}, asked, shuffler)
                bar.update(len(group))
                for name in group:
                    if name != baseline or number == 0:
                        found[name].written.append(written[name])
                        found[name].plain.append(written[baseline])
                for name in group:
                    if name in same:
                        reference = found[same[name]].written[asked.number]
                        found[name].same = (found[name].same or 0) + _agree(
                            written[name], reference, f"{name}: expected the text of {same[name]}", asked, bench.exact
                        )
    return found


def _agree(written: Written, reference: Written, words: str, asked: Asked, exact: bool) -> bool:
    place = departure(written.text, reference.text)
    if place is not None and exact:
        raise OtherTextError(f"{words} on prompt {asked.number}, got another from new token {place} on")
    return place is None


def _blocks(names: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, max(1, len(names)), max(1, size)):
        yield names[start : start + size]


def rounded(found: Interval | dict[str, float | None] | None) -> dict[str, float | None] | None:
    """Return an interval as JSON has it, with four decimals."""
    if found is None:
        return None
    values = asdict(found) if isinstance(found, Interval) else found
    return {name: None if value is None else _round(value) for name, value in values.items()}


_round = functools.partial(round, ndigits=4)
dense_name, sparse_name, dynamic_name = "dense {}".format, "optimised {}".format, "dynamic {}".format


def optimised(bench: Bench, accuracies: Sequence[Sequence[float]], nodes: int) -> Way:
    """Return our loop with the best tree of a size, heads taken as independent (Medusa paper, section 2.3.3)."""
    return ours(bench, Tree.optimal(accuracies, nodes))
