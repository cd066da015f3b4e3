"""The model card of trained heads: a README.md with Hugging Face's front matter, and a plot.

Equal facts give equal files. matplotlib is imported only when a card is written.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from medusa_decoding.checks import import_library
from medusa_decoding.files import whole_file, write_text
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config, SourceConfig
from medusa_decoding.training.data.records import Report
from medusa_decoding.training.data.sources import HUB_NAME, SUFFIXES
from medusa_decoding.training.loop.accuracy import FIGURE_NODES, HeadAccuracy

TREE_SIZES = (4, 8, 16, 32, 64)
CURVE_POINTS = 9
CARD, PLOT = "README.md", "accuracy.png"
# Settings of every run, which other sections of the card show.
_STATED = ("method", "model.name", "data.train", "output.folder")


@dataclass(frozen=True)
class CardFacts:
    """The content of a card.

    Attributes:
        accuracy: of the heads, as they are stored, on the held-out data's text; its totals are 0 without such data.
        losses: (step, training loss), in order; steps count over all stages, as `steps` does.
        held_out_report: of reading `data.held_out`, or None without it.
        best_step: the step that the heads are of, if it was chosen by held-out data; None: the last.
        tokens: of training data, learnt or not, or None if unknown.
        generated: for each data file that a model has written, by path: the settings of that (`record_file.asked_of`).
        trained_model: folder of the trained backbone, or of its adapter, which the heads need; None if it was frozen.
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
    best_step: int | None = None
    tokens: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str | None = None
    generated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trained_model: str | None = None


def check_plotting() -> None:
    """Raise `ModuleNotFoundError` if matplotlib is not installed: `write_card` needs it after training."""
    import_library("matplotlib", PLOT)


def write_card(folder: str | Path, facts: CardFacts) -> Path:
    """Write README.md and accuracy.png into an existing folder, each completely or not at all; return the card's path.

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
    revision = "" if config.model.revision is None else f" (revision {escaped(config.model.revision)})"
    if facts.trained_model is None:
        use = "Use them with that model only."
    else:
        use = f"The model was trained too: use them with the trained one, `{facts.trained_model}`, only."
    made = {**facts.versions, "machine": facts.machine}
    sections = [
        _front_matter(config),
        f"# Medusa heads for {escaped(_shown_name(config.model.name))}",
        f"{config.heads.num_heads} heads that draft further tokens of {escaped(config.model.name)}{revision}, trained "
        f"with the method {config.method} of the [Medusa paper](https://arxiv.org/abs/2401.10774). {use}",
        f"![Accuracy of each head, and loss over steps]({PLOT})",
        *_accuracy(facts),
        *_data(facts),
        *_training(facts),
        *_settings(config),
        "## Made with",
        _table(["", "version"], [(name, version) for name, version in made.items() if version is not None]),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def escaped(value: object) -> str:
    """Return a value as Markdown that shows it literally, in a line or a table cell."""
    text = " ".join(str(value).split()).replace("&", "&amp;")
    return re.sub(r"([\\`*_{}\[\]<>|#~$!])", r"\\\1", text)


def _front_matter(config: Config) -> str:
    # Names of local files are left out: the hub would refuse them.
    values: dict[str, Any] = {"library_name": "medusa-kernels"}
    if _on_hub(config.model.name):
        values["base_model"] = config.model.name
    values["tags"] = ["medusa", "speculative-decoding", config.method]
    datasets = [source.path for source in (*config.data.train, *config.data.held_out) if _on_hub(source.path)]
    if datasets:
        values["datasets"] = list(dict.fromkeys(datasets))
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)}---"


def _on_hub(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name)) and not name.endswith(SUFFIXES) and not Path(name).expanduser().exists()


def _shown_name(name: str) -> str:
    return name if _on_hub(name) else Path(name).name or name


def _accuracy(facts: CardFacts) -> list[str]:
    accuracy = facts.accuracy
    if not int(accuracy.total.sum()):
        return ["## Accuracy", "Not measured: there was no held-out data."]
    rows = [
        [f"head {k}", *(f"{100 * share:.1f}" for share in shares), total]
        for k, (shares, total) in enumerate(zip(accuracy.cumulative, accuracy.total.tolist(), strict=True), start=1)
    ]
    possible = accuracy.most_nodes
    expected = [
        [size if size <= possible else f"{size} (the heads fill {possible})", f"{accuracy.expected_tokens(size):.2f}"]
        for size in TREE_SIZES
    ]
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
    if config.data.held_out:
        split = "Held-out data has separate sources."
    else:
        split = (
            f"{100 * config.held_out_share:g} % of prompts are held out, by a hash of the prompt alone "
            f"(seed {config.data.split_seed}), so that equal prompts are on one side."
        )
    counts = f"{facts.train_records} records to train on, {facts.held_out_records} held out. {split}"
    if facts.tokens is not None:
        counts += f" {facts.tokens:,} tokens of training data."
    found = ["## Data", _table(["", "source", "format", "split", "revision"], rows), counts]
    found += [_generated(path, settings) for path, settings in facts.generated.items()]
    for prefix, report in (("", facts.report), ("Held-out data: ", facts.held_out_report)):
        if report is not None:
            bad = report.bad.total()
            end = ", because of:" if bad else "."
            found.append(f"{prefix}{report.read} records read, {bad} of them left out{end}")
            for header, reasons in ((["reason", "records"], report.bad), (["noted", "times"], report.notes)):
                by_count = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
                found.append(_table(header, by_count))
    return found


def _source(source: SourceConfig) -> list[str]:
    name = source.path if source.subset is None else f"{source.path} ({source.subset})"
    hub = _on_hub(source.path)
    return [name, source.format, source.split if hub else "", (source.revision or "newest") if hub else ""]


def _generated(path: str, settings: Mapping[str, Any]) -> str:
    how, data = settings["generation"], settings["data"]
    seeds = ", ".join(escaped(source["path"]) for source in data["train"])
    used = settings.get("decoding")
    if used is None:  # files without it are older
        used = how | {"do_sample": how["temperature"] != 0}
    drawn = "greedy"
    if used.get("do_sample"):
        drawn = f"drawn at temperature {1.0 if used.get('temperature') is None else used['temperature']:g}"
        for name, words, all_tokens in (("top_p", "top-p", 1), ("top_k", "top-k", 0), ("min_p", "min-p", 0)):
            if used.get(name) not in (None, all_tokens):
                drawn += f", {words} {used[name]:g}"
    if how["temperature"] is None:
        drawn += " (its generation config)"
    return (
        f"{escaped(path)} contains answers of {escaped(_shown_name(settings['model']['name']))} itself to the prompts "
        f"of {seeds}: {drawn}, at most {how['max_new_tokens']} tokens per answer, at most {how['turns']} "
        f"turns, seed {how['seed']}."
    )


def _training(facts: CardFacts) -> list[str]:
    found = ["## Training", f"{facts.steps} steps in {_duration(facts.seconds)}."]
    if facts.best_step is not None:
        found.append(
            f"The heads are those of step {facts.best_step}: of all that were measured on held-out data, they have the "
            f"most expected tokens per step with {FIGURE_NODES} nodes. Their accuracies are of the same data, so "
            "slightly better than on other data."
        )
    finite = [(loss, step) for step, loss in facts.losses if math.isfinite(loss)]
    if finite:
        lowest, at = min(finite)
        found.append(
            f"Training loss {_number(facts.losses[0][1])} at step {facts.losses[0][0]}, "
            f"{_number(facts.losses[-1][1])} at step {facts.losses[-1][0]}, lowest {_number(lowest)} at step {at}."
        )
    if facts.losses:
        count = min(len(facts.losses), CURVE_POINTS)  # at even distances, including the first and the last
        points = [facts.losses[place * (len(facts.losses) - 1) // max(1, count - 1)] for place in range(count)]
        found.append(_table(["step", "training loss"], [[step, _number(loss)] for step, loss in points]))
    return found


def _settings(config: Config) -> list[str]:
    needed = {
        "method": config.method,
        "model": {"name": config.model.name},
        "data": {"train": dataclasses.asdict(config.data)["train"]},
        "output": {"folder": config.output.folder},
    }
    defaults = config_schema.flat(Config.of(needed)).values()
    meanings = {key: meaning for key, _, _, meaning, _ in config_schema.describe(Config)}
    rows = [
        [key, _setting(value), _setting(default), meanings[key]]
        for (key, value), default in zip(config_schema.flat(config).items(), defaults, strict=True)
        if key not in _STATED and value != default
    ]
    longest = max(map(len, re.findall("`+", config.to_yaml())), default=0)
    fence = "`" * max(3, longest + 1)
    return [
        "## Settings",
        f"Those that differ from the defaults of {config.method}:" if rows else f"The defaults of {config.method}.",
        _table(["setting", "value", "default", "meaning"], rows),
        f"<details>\n<summary>All settings</summary>\n\n{fence}yaml\n{config.to_yaml()}{fence}\n\n</details>",
    ]


def _setting(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(entry.path if isinstance(entry, SourceConfig) else str(entry) for entry in value) or "none"
    return config_schema.value_text(value)


def _table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table, or nothing if it has no rows."""
    lines = [header, ["---"] * len(header), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) if rows else ""


def _number(value: float) -> str:
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _plot(facts: CardFacts, path: Path) -> None:
    # pyplot would change the state of the process, and might open a display.
    figures = import_library("matplotlib.figure", PLOT)
    figure = figures.Figure(figsize=(10, 4), layout="constrained")
    heads, loss = figure.subplots(1, 2)
    accuracy = facts.accuracy
    if int(accuracy.total.sum()):
        for k, row in enumerate(accuracy.cumulative, start=1):
            heads.plot(range(1, len(row) + 1), [100 * share for share in row], marker="o", label=f"head {k}")
        heads.legend()
    else:
        heads.text(0.5, 0.5, "no held-out data", ha="center", transform=heads.transAxes)
    heads.set(title="Held-out accuracy", xlabel="top n candidates", ylabel="% of tokens among them", ylim=(0, 100))
    heads.set_xticks(range(1, accuracy.hits.shape[1] + 1))
    if facts.losses:
        loss.plot(*zip(*facts.losses, strict=True))
    loss.set(title="Training loss", xlabel="step", ylabel="nats")
    for panel in (heads, loss):
        panel.grid(alpha=0.3)
    with whole_file(path) as scratch:
        figure.savefig(scratch, format="png", dpi=100, metadata={"Software": None})
