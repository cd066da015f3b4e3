"""The model card of trained heads: a README.md with Hugging Face's front matter, and a plot.

It states data, settings, the course of the loss and what the heads reach on held-out data. It is made from what the
trainer tells it and nothing else, so that equal facts give equal files. matplotlib is imported when a card is written,
never before. This module does not know how anything was trained or measured.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from medusa_decoding.files import whole_file, write_text
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config, SourceConfig
from medusa_decoding.training.data.records import Report
from medusa_decoding.training.loop.accuracy import HeadAccuracy

TREE_SIZES = (4, 8, 16, 32, 64)
CURVE_POINTS = 9
CARD, PLOT = "README.md", "accuracy.png"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = (".json", ".jsonl", ".gz", ".parquet", ".txt")
# Every run states these; what is said of data and model is said elsewhere in the card.
_STATED = ("method", "model.name", "data.train", "output.folder")


@dataclass(frozen=True)
class CardFacts:
    """What a card says.

    Attributes:
        config: of the run.
        report: what came of the training data's records.
        train_records, held_out_records: sound records on each side of the split.
        accuracy: of the heads, as they are stored, on the held-out data's text; its totals are 0 where there is none.
        losses: (step, training loss), in order; steps count over all stages.
        steps: optimiser steps of all stages.
        seconds: that training took.
        held_out_report: of held-out data of its own (`data.held_out`), or None.
        held_out_losses: (step, loss on held-out data), in order.
        tokens: of training data, learnt or not, or None where nobody counted.
        versions: library to version.
        commit: of this package's checkout, or None.
        command: that started the run, or None.
        machine: it ran on, or None.
        generated: what training data that a model has written was asked for with (`generated.asked_of`), by its path.
        trained_model: folder of the backbone that was trained along, or of its adapter, which the heads need then; None
            where the backbone was frozen.
    """

    config: Config
    report: Report
    train_records: int
    held_out_records: int
    accuracy: HeadAccuracy
    losses: Sequence[tuple[int, float]]
    steps: int
    seconds: float
    held_out_report: Report | None = None
    held_out_losses: Sequence[tuple[int, float]] = ()
    tokens: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str | None = None
    machine: str | None = None
    generated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trained_model: str | None = None


def check_plotting() -> None:
    """Raise where `write_card` would, for a trainer to call before it begins.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"matplotlib: expected the library for {PLOT} (pip install 'medusa-kernels[train]'), got none"
        ) from error


def write_card(folder: str | Path, facts: CardFacts) -> Path:
    """Write README.md and accuracy.png into a folder; each appears whole or not at all.

    Args:
        folder: of the trained heads; it exists.
        facts: what to say.

    Returns:
        The card's path.

    Raises:
        ValueError: no such folder.
        ModuleNotFoundError: matplotlib is not installed; nothing is written then.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder: expected one that exists, got {folder}")
    check_plotting()
    text = card_text(facts)
    _plot(facts, folder / PLOT)
    write_text(folder / CARD, text)
    return folder / CARD


def card_text(facts: CardFacts) -> str:
    """Return the card as Markdown."""
    config = facts.config
    sections = [
        _front_matter(config),
        f"# Medusa heads for {escaped(_shown_name(config.model.name))}",
        f"{config.heads.num_heads} heads that guess further tokens of {escaped(config.model.name)}{_revision(config)}, "
        f"trained with the method {config.method} of the [Medusa paper](https://arxiv.org/abs/2401.10774). "
        + (
            "They are of use with that model only."
            if facts.trained_model is None
            else f"The model was trained along; they are of use with what it has become, `{facts.trained_model}`, only."
        ),
        f"![Accuracy of each head, and loss over steps]({PLOT})",
        *_accuracy(facts),
        *_data(facts),
        *_training(facts),
        *_settings(config),
        *_origin(facts),
    ]
    return "\n\n".join(sections) + "\n"


def escaped(value: object) -> str:
    """Return a value as Markdown that shows it literally, in a line or in a table's cell."""
    text = " ".join(str(value).split()).replace("&", "&amp;")
    return re.sub(r"([\\`*_{}\[\]<>|#~$!])", r"\\\1", text)


def _front_matter(config: Config) -> str:
    """What the hub reads. Names that are no hub's (local files) would be refused there, and are left out."""
    values: dict[str, Any] = {"library_name": "medusa-kernels"}
    if _on_hub(config.model.name):
        values["base_model"] = config.model.name
    values["tags"] = ["medusa", "speculative-decoding", config.method]
    datasets = [source.path for source in (*config.data.train, *config.data.held_out) if _on_hub(source.path)]
    if datasets:
        values["datasets"] = list(dict.fromkeys(datasets))
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)}---"


def _on_hub(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and not name.endswith(_FILES) and not Path(name).expanduser().exists()


def _shown_name(name: str) -> str:
    return name if _on_hub(name) else Path(name).name or name


def _revision(config: Config) -> str:
    return "" if config.model.revision is None else f" (revision {escaped(config.model.revision)})"


def _accuracy(facts: CardFacts) -> list[str]:
    accuracy, storage = facts.accuracy, facts.config.heads.storage
    if not int(accuracy.total.sum()):
        return ["## Accuracy", "Not measured: there was no held-out data."]
    ranks = accuracy.hits.shape[1]
    rows = [
        [f"head {k}", *(f"{100 * share:.1f}" for share in shares), total]
        for k, (shares, total) in enumerate(zip(accuracy.cumulative, accuracy.total.tolist(), strict=True), start=1)
    ]
    possible = sum(ranks**depth for depth in range(len(rows) + 1))
    expected = [
        [size if size <= possible else f"{size} (the heads fill {possible})", f"{accuracy.expected_tokens(size):.2f}"]
        for size in TREE_SIZES
    ]
    return [
        "## Accuracy",
        "Percent of held-out tokens among each head's n likeliest candidates. Head k drafts the token k places beyond "
        "the model's own next one."
        + ("" if storage == "float" else f" Measured with the projections as they are stored, in {storage}."),
        _table(["", *(f"top-{n}" for n in range(1, ranks + 1)), "tokens"], rows),
        "Expected tokens a step of the best tree of so many nodes (root included) by section 2.3.3 of the paper. It "
        "takes the heads as independent of each other, and the accuracies are those on the data's text, not on the "
        "text that the model itself writes: `medusa eval` measures that, and the tokens a step themselves.",
        _table(["nodes", "expected tokens a step"], expected),
    ]


def _data(facts: CardFacts) -> list[str]:
    config = facts.config
    rows = [["training", *_source(source)] for source in config.data.train]
    rows += [["held out", *_source(source)] for source in config.data.held_out]
    if config.data.held_out:
        split = "Held-out data has sources of its own."
    else:
        split = (
            f"{100 * config.held_out_share:g} % of prompts are held out, by a hash of the prompt alone "
            f"(seed {config.data.split_seed}), so that equal prompts are on one side."
        )
    counts = f"{facts.train_records} records to train on, {facts.held_out_records} held out. {split}"
    if facts.tokens is not None:
        counts += f" {facts.tokens:,} tokens of training data."
    found = ["## Data", _table(["", "source", "format", "split", "revision"], rows), counts]
    found += [_written(path, settings) for path, settings in facts.generated.items()]
    for what, report in (("", facts.report), ("Held-out data: ", facts.held_out_report)):
        if report is not None:
            found += _came_of(what, report)
    return found


def _source(source: SourceConfig) -> list[str]:
    name = source.path if source.subset is None else f"{source.path} ({source.subset})"
    hub = _on_hub(source.path)
    return [name, source.format, source.split if hub else "", (source.revision or "newest") if hub else ""]


def _written(path: str, settings: Mapping[str, Any]) -> str:
    how, data = settings["generation"], settings["data"]
    seeds = ", ".join(escaped(source["path"]) for source in data["train"])
    drawn = f"drawn at temperature {how['temperature']:g}" if how["temperature"] else "greedy"
    nucleus = f", top-p {how['top_p']:g}" if how["temperature"] and how["top_p"] < 1 else ""
    return (
        f"{escaped(path)} was written by {escaped(_shown_name(settings['model']['name']))} itself behind the prompts "
        f"of {seeds}: {drawn}{nucleus}, at most {how['max_new_tokens']} tokens an answer, at most {how['turns']} "
        f"turns, seed {how['seed']}."
    )


def _came_of(what: str, report: Report) -> list[str]:
    bad = report.bad.total()
    rows = [[reason, count] for reason, count in _most_first(report.bad)]
    found = [f"{what}{report.read} records read, {bad} of them left out" + (", because of:" if bad else ".")]
    if rows:
        found.append(_table(["reason", "records"], rows))
    if report.notes:
        found.append(_table(["noted", "times"], [[note, count] for note, count in _most_first(report.notes)]))
    return found


def _most_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _training(facts: CardFacts) -> list[str]:
    found = ["## Training", f"{facts.steps} steps in {_duration(facts.seconds)}."]
    finite = [(loss, step) for step, loss in facts.losses if math.isfinite(loss)]
    if finite:
        lowest, at = min(finite)
        found.append(
            f"Training loss {_number(facts.losses[0][1])} at step {facts.losses[0][0]}, "
            f"{_number(facts.losses[-1][1])} at step {facts.losses[-1][0]}, lowest {_number(lowest)} at step {at}."
        )
    for name, curve in (("training loss", facts.losses), ("held-out loss", facts.held_out_losses)):
        if curve:
            rows = [[step, _number(loss)] for step, loss in _spread(curve, CURVE_POINTS)]
            found.append(_table(["step", name], rows))
    return found


def _spread(curve: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """Return up to `count` points of a curve, the first and the last of them, at even distances."""
    if len(curve) <= count:
        return list(curve)
    return [curve[place * (len(curve) - 1) // (count - 1)] for place in range(count)]


def _settings(config: Config) -> list[str]:
    defaults, values = _flat(_defaults(config)), _flat(config)
    meanings = {key: meaning for key, _, _, meaning, _ in config_schema.describe(Config)}
    rows = [
        [key, _setting(value), _setting(defaults[key]), meanings[key]]
        for key, value in values.items()
        if key not in _STATED and value != defaults[key]
    ]
    fence = _fence(config.to_yaml())
    return [
        "## Settings",
        f"Those that differ from the defaults of {config.method}:" if rows else f"The defaults of {config.method}.",
        *([_table(["setting", "value", "default", "meaning"], rows)] if rows else []),
        f"<details>\n<summary>All settings</summary>\n\n{fence}yaml\n{config.to_yaml()}{fence}\n\n</details>",
    ]


def _defaults(config: Config) -> Config:
    """Return the method's own settings for the same model, data and folder."""
    stated = dataclasses.asdict(config)
    return Config.of(
        {
            "method": config.method,
            "model": {"name": config.model.name},
            "data": {"train": stated["data"]["train"]},
            "output": {"folder": config.output.folder},
        }
    )


def _flat(settings: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(settings):
        name, value = f"{path}{entry.name}", getattr(settings, entry.name)
        found |= _flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


def _setting(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(entry.path if isinstance(entry, SourceConfig) else str(entry) for entry in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _origin(facts: CardFacts) -> list[str]:
    rows = [[name, version] for name, version in facts.versions.items()]
    rows += [
        [name, value] for name, value in (("commit", facts.commit), ("machine", facts.machine)) if value is not None
    ]
    found = ["## Made with"]
    if rows:
        found.append(_table(["", "version"], rows))
    if facts.command is not None:
        fence = _fence(facts.command)
        found.append(f"{fence}\n{facts.command}\n{fence}")
    return found


def _fence(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)


def _table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _plot(facts: CardFacts, path: Path) -> None:
    """Draw top-1 to top-10 of each head, and losses over steps."""
    # Figures without pyplot: no state of the process and no display is touched.
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(10, 4), layout="constrained")
    heads, loss = figure.subplots(1, 2)
    accuracy = facts.accuracy
    if int(accuracy.total.sum()):
        for k, row in enumerate(accuracy.cumulative, start=1):
            heads.plot(range(1, len(row) + 1), [100 * share for share in row], marker="o", label=f"head {k}")
        heads.legend()
    else:
        heads.text(0.5, 0.5, "no held-out data", ha="center", transform=heads.transAxes)
    heads.set(
        title="Held-out accuracy", xlabel="n likeliest candidates", ylabel="% of tokens among them", ylim=(0, 100)
    )
    heads.set_xticks(range(1, accuracy.hits.shape[1] + 1))
    for name, curve in (("training", facts.losses), ("held out", facts.held_out_losses)):
        if curve:
            loss.plot(*zip(*curve, strict=True), label=name)
    if facts.losses or facts.held_out_losses:
        loss.legend()
    loss.set(title="Loss", xlabel="step", ylabel="nats")
    for panel in (heads, loss):
        panel.grid(alpha=0.3)
    with whole_file(path) as scratch:
        figure.savefig(scratch, format="png", dpi=100, metadata={"Software": None})
