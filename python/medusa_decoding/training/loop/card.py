"""The model card of trained heads: a README.md with Hugging Face's front matter, and a plot.

Equal facts give equal files. matplotlib is imported only when a card is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from medusa_decoding.checks import import_library
from medusa_decoding.files import whole_file, write_text
from medusa_decoding.training.config import Config, SourceConfig
from medusa_decoding.training.data.records import Report
from medusa_decoding.training.data.sources import HUB_NAME, SUFFIXES
from medusa_decoding.training.loop.accuracy import FIGURE_NODES, HeadAccuracy
from medusa_decoding.training.loop.estimate import duration

TREE_SIZES = (4, 8, 16, 32, 64)
CARD, PLOT = "README.md", "accuracy.png"


@dataclass(frozen=True)
class CardFacts:
    """The content of a card.

    Attributes:
        reports: of the training data, and of `data.held_out`.
        records: to train on, and held out.
        tokens: of training data, learnt or not.
        losses: (step, training loss), in order; steps count over all stages, as `steps` does.
        best_step: the step that the heads are of, if it was chosen by held-out data; None: the last.
        generated: for each data file that a model has written, by path: the settings of that (`record_file.asked_of`).
        trained_model: folder of the trained backbone, or of its adapter, which the heads need; None if it was frozen.
    """

    config: Config
    reports: tuple[Report, Report | None]
    records: tuple[int, int]
    tokens: int
    accuracy: HeadAccuracy | None
    losses: Sequence[tuple[int, float]]
    steps: int
    seconds: float
    best_step: int | None
    made_with: Mapping[str, str]
    generated: Mapping[str, Mapping[str, Any]]
    trained_model: str | None


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write README.md and accuracy.png into a folder, each completely or not at all."""
    _plot(facts, folder / PLOT)
    write_text(folder / CARD, card_text(facts))


def card_text(facts: CardFacts) -> str:
    """Return the card as Markdown."""
    config = facts.config
    model, revision = escaped(config.model.name), ""
    if config.model.revision is not None:
        revision = f" (revision {escaped(config.model.revision)})"
    use = "Use them with that model only."
    if facts.trained_model is not None:
        use = f"The model was trained too: use them with the trained one, `{facts.trained_model}`, only."
    # Names of local files are left out of the header: the hub would refuse them.
    data = dict.fromkeys(one.path for one in (*config.data.train, *config.data.held_out) if _on_hub(one.path))
    header = ModelCardData(
        library_name="medusa-kernels",
        base_model=config.model.name if _on_hub(config.model.name) else None,
        tags=["medusa", "speculative-decoding", config.method],
        datasets=list(data) or None,
    )
    longest = max(map(len, re.findall("`+", config.to_yaml())), default=0)
    fence = "`" * max(3, longest + 1)
    sections = [
        f"---\n{header.to_yaml()}\n---",
        f"# Medusa heads for {escaped(_shown_name(config.model.name))}",
        f"{config.heads.num_heads} heads that draft further tokens of {model}{revision}, trained with the method "
        f"{config.method} of the [Medusa paper](https://arxiv.org/abs/2401.10774). {use}",
        f"![Accuracy of each head, and loss over steps]({PLOT})",
        *_accuracy(facts.accuracy),
        *_data(facts),
        *_training(facts),
        "## Settings",
        f"<details>\n<summary>All settings</summary>\n\n{fence}yaml\n{config.to_yaml()}{fence}\n\n</details>",
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def escaped(value: object) -> str:
    """Return a value as Markdown that shows it literally, in a line or a table cell."""
    text = " ".join(str(value).split()).replace("&", "&amp;")
    return re.sub(r"([\\`*_{}\[\]<>|#~$!])", r"\\\1", text)


def _on_hub(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name)) and not name.endswith(SUFFIXES) and not Path(name).expanduser().exists()


def _shown_name(name: str) -> str:
    return name if _on_hub(name) else Path(name).name or name


def _accuracy(accuracy: HeadAccuracy | None) -> list[str]:
    if accuracy is None:
        return ["## Accuracy", "Not measured: there was no held-out data."]
    rows = [
        [f"head {k}", *(f"{100 * share:.1f}" for share in shares), total]
        for k, (shares, total) in enumerate(zip(accuracy.cumulative, accuracy.total.tolist(), strict=True), start=1)
    ]
    expected = [(size, f"{accuracy.expected_tokens(size):.2f}") for size in TREE_SIZES if size <= accuracy.most_nodes]
    return [
        "## Accuracy",
        "Percent of held-out tokens among each head's top n candidates. Head k drafts the token k places after the "
        "model's own next one.",
        _table(["", *(f"top-{n}" for n in range(1, accuracy.hits.shape[1] + 1)), "tokens"], rows),
        "Expected tokens per step of the best tree of a number of nodes (root included), by section 2.3.3 of the "
        "paper. This treats the heads as independent of each other, and the accuracies are those on the data's text, "
        "not on the text that the model itself writes: `medusa eval` measures that, and the real tokens per step.",
        _table(["nodes", "expected tokens per step"], expected),
    ]


def _data(facts: CardFacts) -> list[str]:
    config = facts.config
    sources = {"training": config.data.train, "held out": config.data.held_out}
    rows = [[name, *_source(source)] for name, part in sources.items() for source in part]
    split = "Held-out data has separate sources."
    if not config.data.held_out:
        split = (
            f"{100 * config.held_out_share:g} % of prompts are held out, by a hash of the prompt alone "
            f"(seed {config.data.split_seed}), so that equal prompts are on one side."
        )
    found = [
        "## Data",
        _table(["", "source", "format", "split", "revision"], rows),
        f"{facts.records[0]} records to train on, {facts.records[1]} held out. {split} {facts.tokens:,} tokens of "
        "training data.",
        *(_generated(path, settings) for path, settings in facts.generated.items()),
    ]
    for prefix, report in zip(("", "Held-out data: "), facts.reports, strict=True):
        if report is not None:
            found.append(f"{prefix}{report.read} records read, {report.bad.total()} of them left out.")
            found += [_table(["reason", "records"], report.bad.most_common())]
            found += [_table(["noted", "times"], report.notes.most_common())]
    return found


def _source(source: SourceConfig) -> list[str]:
    name = source.path if source.subset is None else f"{source.path} ({source.subset})"
    return [name, source.format, *([source.split, source.revision or "newest"] if _on_hub(source.path) else ["", ""])]


def _generated(path: str, settings: Mapping[str, Any]) -> str:
    seeds = ", ".join(escaped(source["path"]) for source in settings["data"]["train"])
    asked = {name: value for name, value in settings["generation"].items() if value is not None}
    used = asked | (settings.get("decoding") or {})
    names = ("do_sample", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "turns", "seed")
    stated = ", ".join(f"{escaped(name)} {used[name]}" for name in names if name in used)
    model = escaped(_shown_name(settings["model"]["name"]))
    return f"{escaped(path)} contains answers of {model} itself to the prompts of {seeds} ({stated})."


def _training(facts: CardFacts) -> list[str]:
    made = ", ".join(f"{escaped(name)} {escaped(version)}" for name, version in facts.made_with.items())
    found = ["## Training", f"{facts.steps} steps in {duration(facts.seconds)}, with {made}."]
    if facts.best_step is not None:
        found.append(
            f"The heads are those of step {facts.best_step}: of all that were measured on held-out data, they have the "
            f"most expected tokens per step with {FIGURE_NODES} nodes. Their accuracies are of the same data, so "
            "slightly better than on other data."
        )
    if facts.losses:
        (first, before), (last, after) = facts.losses[0], facts.losses[-1]
        found.append(f"Training loss {before:.4g} at step {first}, {after:.4g} at step {last}.")
    return found


def _table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table, or nothing if it has no rows."""
    lines = [header, ["---"] * len(header), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) if rows else ""


def _plot(facts: CardFacts, path: Path) -> None:
    # pyplot would change the state of the process, and might open a display.
    figures = import_library("matplotlib.figure", PLOT)
    figure = figures.Figure(figsize=(10, 4), layout="constrained")
    heads, loss = figure.subplots(1, 2)
    for k, row in enumerate([] if facts.accuracy is None else facts.accuracy.cumulative, start=1):
        heads.plot(range(1, len(row) + 1), [100 * share for share in row], marker="o", label=f"head {k}")
        heads.legend()
    heads.set(title="Held-out accuracy", xlabel="top n candidates", ylabel="% of tokens among them", ylim=(0, 100))
    if facts.losses:
        loss.plot(*zip(*facts.losses, strict=True))
    loss.set(title="Training loss", xlabel="step", ylabel="nats")
    for panel in (heads, loss):
        panel.grid(alpha=0.3)
    with whole_file(path) as scratch:
        figure.savefig(scratch, format="png", dpi=100, metadata={"Software": None})
