"""The paper's figure 7 and table 1's row: speculative decoding with a draft model, by the number of drafted tokens.

Drafting is transformers' assisted generation (`assistant_model=`) with a constant number of tokens and no confidence
threshold, so that every round drafts all of them. It runs on transformers' loop: its ratio to transformers' plain
`generate` says what drafting gives there, its ratio to our plain loop also has the difference of the loops in it.
"estimate" is what drafting would give on a loop like ours: tokens per step as counted, over the time of gamma plain
steps of the draft model and one step of the base model that verifies a chain of gamma tokens, both measured in this
package's loop. It leaves out everything else that such a loop would need.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.ablations import measuring, setup, table_3, writing
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation import interval
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree

GAMMAS = (1, 2, 3, 4, 5, 6, 8)
MEDUSA = "medusa"
PAPER = {"vicuna-7b": (1.47, 2.83), "vicuna-13b": (1.56, 2.83), "vicuna-33b": (1.60, 2.35)}
"""Table 1: speedup of speculative decoding and of Medusa."""


def gammas(text: str) -> list[int]:
    """Parse different numbers of drafted tokens of at least 1, separated by commas, into ascending order."""
    return sorted({_arguments.at_least_one(part) for part in text.split(",")})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    setup.add_arguments(parser, limit=40)
    parser.add_argument(
        "--draft",
        required=True,
        metavar="MODEL",
        help="folder or hub id of a draft model with the same tokenizer; `draft` makes one for the demo model",
    )
    parser.add_argument(
        "--gamma", type=gammas, default=list(GAMMAS), metavar="G,G", help="drafted tokens (default: 1,2,3,4,5,6,8)"
    )


def run(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load both models and measure."""
    bench = setup.load(args)
    with bench.model:
        draft = load_draft(args.draft, bench)
        described = dict(bench.described)
        described["draft"] = {
            "model": Path(args.draft).name,
            "parameters": sum(p.numel() for p in draft.parameters()),
            "layers": draft.config.num_hidden_layers,
            "hidden": draft.config.hidden_size,
        }
        made = Path(args.draft) / "draft.json"
        if made.is_file():
            described["draft"]["made"] = json.loads(made.read_text(encoding="utf-8"))
        return described, measure(bench, draft, args.gamma)


def load_draft(name: str, bench: setup.Bench) -> Any:
    """Load a draft model for the base model.

    Raises:
        ValueError: it is not there, or has another vocabulary.
    """
    backbone = bench.model.backbone
    draft = pretrained.load_model(name, argument="--draft", dtype=backbone.dtype).to(backbone.device).eval()
    if draft.config.vocab_size != backbone.vocab_size:
        raise ValueError(f"--draft: expected a vocabulary of {backbone.vocab_size}, got {draft.config.vocab_size}")
    return draft


def assisted(bench: setup.Bench, draft: Any, gamma: int) -> measuring.Way:
    """Return transformers' assisted generation that drafts `gamma` tokens per round."""
    plain = measuring.transformers(bench, assistant_model=draft)

    def way(asked: setup.Asked) -> measuring.Written:
        draft.generation_config.num_assistant_tokens = gamma
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        return plain(asked)

    return way


def measure(bench: setup.Bench, draft: Any, drafted: Sequence[int]) -> dict[str, Any]:
    """Measure drafting, both plain loops and Medusa with the tuned tree."""
    accuracies = setup.count_heads(bench)
    tree, weighed = table_3.tuned_tree(bench, bench.model, accuracies)
    seconds = lean_seconds(bench, draft, drafted)
    names = {gamma: f"drafting {gamma}" for gamma in drafted}
    ways = {
        measuring.PLAIN: measuring.ours(bench, Tree([])),
        measuring.TRANSFORMERS: measuring.transformers(bench),
        MEDUSA: measuring.ours(bench, tree),
    } | {name: assisted(bench, draft, gamma) for gamma, name in names.items()}
    same = {name: measuring.PLAIN for name in ways if name != measuring.PLAIN}
    found = measuring.compare(bench, ways, same, before_block=bench.model.free)
    base = found[measuring.TRANSFORMERS]
    rows = []
    for gamma, name in names.items():
        steps = found[name].tokens_per_step()
        estimate = None if steps is None else steps.value * seconds["plain"] / seconds["chains"][gamma]
        rows.append(
            {"gamma": gamma}
            | found[name].figures()
            | {"over_transformers": over(found[name], base), "estimate": round(estimate or 0.0, 4)}
        )
    return {
        measuring.PLAIN: found[measuring.PLAIN].figures(),
        measuring.TRANSFORMERS: base.figures(),
        MEDUSA: found[MEDUSA].figures()
        | {"nodes": tree.num_nodes, "over_transformers": over(found[MEDUSA], base), "tuning": weighed},
        "drafting": rows,
        "step_milliseconds": {
            "plain": round(1e3 * seconds["plain"], 4),
            "draft": round(1e3 * seconds["draft"], 4),
            "round": {str(gamma): round(1e3 * value, 4) for gamma, value in seconds["chains"].items()},
        },
        "paper": {name: {"drafting": a, "medusa": b} for name, (a, b) in PAPER.items()},
    }


def over(found: measuring.Found, base: measuring.Found) -> dict[str, float | None] | None:
    """Return tokens per second over those of another way, prompts paired."""
    pairs = zip(found.written, base.written, strict=True)
    return measuring.rounded(
        interval.ratio_of_rates([(len(a.text), a.seconds, len(b.text), b.seconds) for a, b in pairs])
    )


def lean_seconds(bench: setup.Bench, draft: Any, drafted: Sequence[int]) -> dict[str, Any]:
    """Measure plain steps of both models and what a round of drafting takes: gamma of the draft's, one that verifies.

    On the tuning prompts. A chain of gamma tokens is verified as one that is copied from the text (`Tree(lookup=)`):
    that takes no heads, and finding what to copy takes little.
    """
    chains = {0: Tree([])} | {gamma: Tree([], lookup=gamma) for gamma in drafted}
    spent = {gamma: [0.0, 0] for gamma in (*chains, "draft")}

    def add(key: Any, model: MedusaModel, tree: Tree, ids: Any) -> None:
        output = model.generate(ids, max_new_tokens=bench.new_tokens, tree=tree, metrics=True, **bench.ends)
        assert isinstance(output, MedusaOutput)
        assert output.metrics is not None
        spent[key][0] += output.metrics.decode_seconds
        spent[key][1] += output.metrics.steps

    with MedusaModel(draft, backend=bench.model.backend) as alone:
        for asked in bench.tuning:
            for counted in (False, True):  # graphs are captured the first time
                if bench.captured or counted or asked is bench.tuning[0]:
                    before = {key: list(value) for key, value in spent.items()}
                    for gamma, tree in chains.items():
                        add(gamma, bench.model, tree, asked.ids)
                    add("draft", alone, chains[0], asked.ids)
                    if not counted:
                        spent = before
    seconds = {key: total / max(1, steps) for key, (total, steps) in spent.items()}
    rounds = {gamma: gamma * seconds["draft"] + seconds[gamma] for gamma in drafted}
    return {"plain": seconds[0], "draft": seconds["draft"], "chains": rounds}


def draw(plt: Any, record: dict[str, Any]) -> Any:
    """Draw tokens per second and tokens per step against the number of drafted tokens."""
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    rows = record["drafting"]
    drafted = [row["gamma"] for row in rows]
    plain = record[measuring.PLAIN]["tokens_per_second"]
    colours = writing.COLOURS
    panels[0].plot(drafted, [row["tokens_per_second"] for row in rows], "o-", color=colours[0], label="assisted")
    panels[0].plot(
        drafted, [plain * row["estimate"] for row in rows], "o:", color=colours[5],
        label="drafting on a loop like ours (estimate)",
    )  # fmt: skip
    for name, words, colour in (
        (MEDUSA, f"Medusa, {record[MEDUSA]['nodes']} nodes", colours[1]),
        (measuring.PLAIN, "our plain loop", colours[2]),
        (measuring.TRANSFORMERS, "transformers, plain", "0.5"),
    ):
        panels[0].axhline(record[name]["tokens_per_second"], color=colour, linestyle="--", linewidth=1, label=words)
    panels[0].set_ylabel("tokens per second")
    values, errors = writing.spread(rows, "tokens_per_step")
    panels[1].errorbar(drafted, values, errors, fmt="o-", color=colours[0], capsize=2, elinewidth=0.7)
    panels[1].axhline(record[MEDUSA]["tokens_per_step"]["value"], color=colours[1], linestyle="--", linewidth=1)
    panels[1].set_ylabel("tokens per step")
    for panel in panels:
        panel.set_xticks(drafted)
        panel.set_xlabel("drafted tokens a round (gamma)")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    return figure


def as_text(record: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    lines = [["way", "tokens per step", "tokens/s", "times our plain loop", "times transformers", "estimate"]]
    named = [("transformers", record[measuring.TRANSFORMERS]), (MEDUSA, record[MEDUSA])]
    named += [(f"drafting {row['gamma']}", row) for row in record["drafting"]]
    for name, row in named:
        estimate = f"{row['estimate']:.2f}" if "estimate" in row else ""
        told = [writing.as_text(row.get(key)) for key in ("tokens_per_step", "speedup", "over_transformers")]
        lines.append([name, told[0], f"{row['tokens_per_second']:.0f}", *told[1:], estimate])
    return harness.markdown(lines)
