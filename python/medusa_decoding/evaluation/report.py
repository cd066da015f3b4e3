"""Add up measurements by category and over all prompts, for programs (JSON) and for people (tables)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval

if TYPE_CHECKING:
    from medusa_decoding.training.loop.accuracy import HeadAccuracy

MEDUSA, PLAIN, TRANSFORMERS = "medusa", "plain", "transformers"
BASELINES = {PLAIN: "our plain loop", TRANSFORMERS: "transformers' generate"}


@dataclass
class Measured:
    """One text, written by every way of decoding.

    Attributes:
        tokens: new tokens by way, over all rounds.
        seconds: by way, over all rounds.
        accepted: tokens that each step of Medusa's first round accepted below the root.
        departs: for each baseline whose text must be the same, the first new token in which Medusa's text differs, or
            None.
        accuracy: of the heads on the plain loop's text; None without heads.
    """

    prompt: int
    category: str
    where: str
    turn: int
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    departs: dict[str, int | None] = field(default_factory=dict)
    accuracy: HeadAccuracy | None = None


@dataclass(frozen=True)
class Figures:
    """Figures of several prompts; ratios are of sums, intervals over prompts (see `interval.WORDS`).

    Attributes:
        prompts: how many.
        texts: their turns that were answered.
        new_tokens: of Medusa, in one round.
        steps: of Medusa, in one round (the prefill is not a step).
        tokens_per_step: accepted tokens per step; None without a step.
        accepted_histogram: for each number of accepted draft tokens, how many steps accepted that many.
        tokens_per_second: by way, prefill included.
        speedup: Medusa's tokens per second over each baseline's.
        identical: texts of Medusa equal to each baseline's, if they must be.
        head_accuracy: on the model's own text; None without heads.
    """

    prompts: int
    texts: int
    new_tokens: int
    steps: int
    tokens_per_step: Interval | None
    accepted_histogram: dict[int, int]
    tokens_per_second: dict[str, float]
    speedup: dict[str, Interval | None]
    identical: dict[str, int]
    head_accuracy: HeadAccuracy | None

    @classmethod
    def of(cls, measured: Sequence[Measured], rounds: int) -> Figures:
        """Add up texts, at least one; those of one prompt stay together in the intervals."""
        prompts: dict[int, list[Measured]] = {}
        for one in measured:
            prompts.setdefault(one.prompt, []).append(one)
        accepted = [length for one in measured for length in one.accepted]
        steps = [
            (sum(1 + n for m in texts for n in m.accepted), sum(len(m.accepted) for m in texts))
            for texts in prompts.values()
        ]
        work = {
            way: [(sum(m.tokens[way] for m in texts), sum(m.seconds[way] for m in texts)) for texts in prompts.values()]
            for way in (MEDUSA, *BASELINES)
            if way in measured[0].seconds
        }
        return cls(
            prompts=len(prompts),
            texts=len(measured),
            new_tokens=sum(one.tokens[MEDUSA] for one in measured) // rounds,
            steps=len(accepted),
            tokens_per_step=interval.ratio(steps),
            accepted_histogram=dict(sorted(Counter(accepted).items())),
            tokens_per_second={
                way: sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)
                for way, pairs in work.items()
            },
            speedup={
                way: interval.ratio_of_rates([(*a, *b) for a, b in zip(work[MEDUSA], pairs, strict=True)])
                for way, pairs in work.items()
                if way != MEDUSA
            },
            identical={way: sum(one.departs[way] is None for one in measured) for way in measured[0].departs},
            head_accuracy=_added(measured),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values; null if there was nothing to divide by."""
        accuracy = self.head_accuracy
        return asdict(self) | {
            "accepted_histogram": {str(length): count for length, count in self.accepted_histogram.items()},
            "head_accuracy": None if accuracy is None else {"top_n": accuracy.cumulative} | accuracy.to_json(),
        }


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        overall: figures of all prompts.
        categories: figures of each category, in the prompts' order.
        settings: how it was measured.
        versions: of the libraries.
        different: texts of Medusa that differ from a baseline's: where, turn, baseline, the first new token (from 0).
        left_out: turns that left no room in the model's context: where, turn, prompt_tokens.
    """

    overall: Figures
    categories: dict[str, Figures]
    settings: dict[str, Any]
    versions: dict[str, str]
    different: list[dict[str, Any]]
    left_out: list[dict[str, Any]]

    @classmethod
    def of(cls, measured: Sequence[Measured], *, rounds: int, **others: Any) -> Evaluation:
        """Add up texts, at least one."""
        categories = dict.fromkeys(one.category for one in measured)
        return cls(
            overall=Figures.of(measured, rounds),
            categories={
                name: Figures.of([one for one in measured if one.category == name], rounds) for name in categories
            },
            different=[
                {"where": one.where, "turn": one.turn, "baseline": way, "token": place}
                for one in measured
                for way, place in one.departs.items()
                if place is not None
            ],
            **others,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `medusa eval --json` prints them."""
        return {
            "overall": self.overall.to_json(),
            "categories": {name: figures.to_json() for name, figures in self.categories.items()},
            "intervals": interval.WORDS,
        } | {name: getattr(self, name) for name in ("settings", "versions", "different", "left_out")}


def as_text(evaluation: Evaluation) -> str:
    """Return tables for a person."""
    overall = evaluation.overall
    rows = [_header(overall)]
    if len(evaluation.categories) > 1:
        rows += [_row(name, figures) for name, figures in evaluation.categories.items()]
    rows.append(_row("all", overall))
    lines = [in_columns(rows, str.ljust), ""]
    rates = ", ".join(f"{way} {rate:.1f}" for way, rate in overall.tokens_per_second.items())
    lines += [
        f"tokens/s, prefill included: {rates}",
        f"intervals: {interval.WORDS}; speedups: ratios of total tokens over total time, in turn in one process",
    ]
    if overall.steps:
        lines += ["", "accepted draft tokens per step:"]
        for length, count in overall.accepted_histogram.items():
            share = count / overall.steps
            lines.append(f"  {length}  {'#' * round(40 * share):40} {share:6.1%}")
    if overall.head_accuracy is not None:
        lines += [
            "",
            "heads on the model's own text, % of tokens in the top n:",
            _heads(overall.head_accuracy),
        ]
    if evaluation.left_out:
        first = evaluation.left_out[0]
        lines += [
            "",
            f"turns left out because they leave no room in the model's context: {len(evaluation.left_out)}, the first "
            f"is {first['where']}, turn {first['turn']}",
        ]
    settings = ", ".join(f"{name} {value}" for name, value in evaluation.settings.items())
    versions = ", ".join(f"{name} {version}" for name, version in evaluation.versions.items())
    return "\n".join([*lines, "", settings, versions])


def _added(measured: Sequence[Measured]) -> HeadAccuracy | None:
    found = [copy.deepcopy(one.accuracy) for one in measured if one.accuracy is not None]
    for one in found[1:]:
        found[0].add(one.hits, one.total)
    return found[0] if found else None


def _header(figures: Figures) -> list[str]:
    speedups = [f"x {BASELINES[way]}" for way in figures.speedup]
    return ["", "prompts", "texts", "tokens per step", *speedups, *(f"same as {way}" for way in figures.identical)]


def _row(name: str, figures: Figures) -> list[str]:
    return [
        name,
        str(figures.prompts),
        str(figures.texts),
        *(interval.as_text(one, 2, "-") for one in (figures.tokens_per_step, *figures.speedup.values())),
        *(f"{count}/{figures.texts}" for count in figures.identical.values()),
    ]


def _heads(accuracy: HeadAccuracy) -> str:
    ranks = accuracy.hits.shape[1]
    rows = [["", *(f"top-{n}" for n in range(1, ranks + 1)), "tokens"]]
    for k, (row, total) in enumerate(zip(accuracy.cumulative, accuracy.total.tolist(), strict=True), start=1):
        rows.append([f"head {k}", *(f"{100 * value:.1f}" for value in row), str(total)])
    return in_columns(rows, str.ljust)


def in_columns(rows: list[list[str]], align_first: Callable[[str, int], str] = str.rjust) -> str:
    """Return a table whose columns are aligned to the right, the first one as `align_first` does."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [align_first, *[str.rjust] * (len(widths) - 1)]
    lines = [[align(cell, n) for align, cell, n in zip(aligned, row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(cells).rstrip() for cells in lines)
