"""A whole run from its configuration: checks, data, model, heads, training, results.

The output folder gets `heads` (with their model card), `model` or `adapter` if the backbone was trained, the log,
checkpoints and the trackers' files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from medusa_decoding.checkpoints import export, hub, write_heads
from medusa_decoding.checkpoints.pretrained import stated_sizes
from medusa_decoding.files import read_json_object, whole_folder, write_json
from medusa_decoding.provenance import fingerprint as weights_fingerprint
from medusa_decoding.provenance import versions
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config
from medusa_decoding.training.data.answer_states import AnswerStates
from medusa_decoding.training.distill.record_file import asked_of, saved_states
from medusa_decoding.training.loop import card
from medusa_decoding.training.loop.accuracy import Measured
from medusa_decoding.training.loop.backbone import DTYPES, TrainingBackbone, load_tokenizer
from medusa_decoding.training.loop.heads import describe_map, make_heads, new_heads
from medusa_decoding.training.loop.log import LOG, Watcher, read_log, tracked
from medusa_decoding.training.loop.meter import Meter
from medusa_decoding.training.loop.preflight import check, hold
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.rows import Rows, load_rows
from medusa_decoding.training.loop.schedules import stages
from medusa_decoding.training.loop.states import StateCache, fingerprint
from medusa_decoding.training.loop.trainer import Trainer

Announce = Callable[[str], None]
Weights = Mapping[str, torch.Tensor]
MEASURED = "measured.json"


@dataclass(frozen=True)
class Result:
    """The output folder of a run, the folder of its heads for `MedusaModel.from_pretrained`, and its figures.

    `base_model` is the model as named, or the folder of the trained one or of its adapter. `measured` is None without
    held-out data. `steps` were made in the whole run on `records` training records, and `seconds` were spent in them.
    `heads_step` is the step that the heads are of: the best on held-out data, or the last one without it and if the
    backbone was trained.
    """

    folder: Path
    heads: Path
    base_model: str
    measured: Measured | None
    steps: int
    seconds: float
    heads_step: int
    records: int


def train(
    config: Config,
    *,
    resume: bool = False,
    watchers: Sequence[Watcher] = (),
    announce: Announce = lambda words: None,
    part: int = 1,
) -> Result:
    """Train heads as a configuration says.

    Args:
        config: of the run.
        resume: continue from the newest checkpoint in the output folder, which must be of the same configuration.
        watchers: receive each line of the log (main process only).
        announce: receives messages for people before and after the steps (main process only).
        part: train on one of so many training records.

    Raises:
        ValueError: settings, data or a checkpoint that do not fit; nothing has been trained then.
        FloatingPointError: a loss that is not finite; names the step and the last good checkpoint.
        OSError: a file could not be written.
    """
    processes = Processes.join(config.optimisation.sharding)
    with hold(config, processes):
        return _train(config, processes, resume, watchers, announce if processes.main else lambda words: None, part)


def _train(
    config: Config,
    processes: Processes,
    resume: bool,
    watchers: Sequence[Watcher],
    announce: Announce,
    part: int,
) -> Result:
    folder = Path(config.output.folder)
    start = check(config, processes, resume)
    if start is None and resume:
        announce(f"no checkpoint in {folder}: begins again")
    torch.manual_seed(config.optimisation.seed)
    tokenizer = load_tokenizer(config.model)
    vocabulary = stated_sizes(config.model.name, config.model.revision).get("vocab_size")
    rows = load_rows(config, tokenizer, vocabulary, part)
    announce(
        f"{rows.records[0]} records in {len(rows.train)} rows ({rows.train.fill:.0%} filled), "
        f"{rows.records[1]} held out"
    )
    announce(str(rows.report))
    stages(config, len(rows.train))  # refuses a stage that is too short before anything is loaded
    for warning in config.warnings():
        announce(warning)
    if config.output.push_to_hub is not None:
        announce(f"after the run, the heads are uploaded to {config.output.push_to_hub}")
    device = processes.device
    if processes.sharded:  # only the main process reads the weights, into the host's memory
        device = torch.device("cpu" if processes.main else "meta")
    backbone = processes.each(lambda: TrainingBackbone.load(config, device))
    heads = processes.each(lambda: make_heads(config, backbone, tokenizer, rows.frequencies))
    if processes.main and heads.token_map is not None:
        announce(describe_map(heads.token_map, heads.vocab_size, rows))
    states = _states(config, backbone, heads.input_size, rows, processes)
    trainer = Trainer(config, backbone, heads, rows.train, rows.held_out, processes, states, list(watchers))

    def begin() -> None:
        if processes.main:
            folder.mkdir(parents=True, exist_ok=True)
            if start is None:
                (folder / LOG).unlink(missing_ok=True)  # of a run that stopped before its first checkpoint
            (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")

    processes.each(begin)
    if start is not None:
        trainer.resume(start)
        announce(f"continues from {start}")
    if processes.main:  # the others write no log
        trainer.meter = Meter(config, trainer.states, rows.learnt, processes, trainer.at)
    announce(f"{trainer.steps} steps: " + ", ".join(f"{stage.steps} {stage.name}" for stage in trainer.stages))
    names = config.output.trackers if processes.main else ()
    values = {key: config_schema.value_text(value) for key, value in config_schema.flat(config).items()}
    with tracked(names, folder, values, trainer.at.done) as trackers:
        trainer.watchers += trackers
        measured = trainer.run()
    base = write_results(trainer, rows, measured)
    if trainer.stopped:
        announce(f"ended after step {trainer.at.done}: the last {config.optimisation.patience} evaluations were worse")
    if trainer.best is not None:
        announce(f"the heads are those of step {trainer.best.step}, the best on held-out data")
    announce(f"heads in {folder / 'heads'}, their base model is {base}")
    if processes.main:
        _push(config, announce)
    step = trainer.at.done if trainer.best is None else trainer.best.step
    return Result(folder, folder / "heads", base, measured, trainer.at.done, trainer.at.seconds, step, rows.records[0])


def _push(config: Config, announce: Announce) -> None:
    """Upload the heads as the settings ask for, with the card for the hub; an error has the command that repeats it."""
    name, private, base = config.output.push_to_hub, config.output.push_private, config.model.name
    if name is None:
        return
    folder = Path(config.output.folder)
    try:
        done = export(folder / "heads", folder / "hub", "hub", base_model=base, overwrite=True, repo_id=name)
        url = hub.push(done.folder, name, private=private)
    except (OSError, ValueError) as error:
        words = ["medusa", "export", "--model", str(folder / "heads"), "--out", str(folder / "hub"), "--format", "hub"]
        words += ["--base-model", base, "--overwrite", "--push", name, "--yes"]
        words += ["--private"] if private else []
        raise OSError(f"the heads are in {folder / 'heads'}, but not uploaded: {error}. {shlex.join(words)}") from error
    kind = "private" if private else "public if it is new"
    announce(f"uploaded {', '.join(hub.files_to_push(done.folder))} to {name} ({kind}): {url}")
    for note in done.notes:
        announce(note)


def _states(
    config: Config, backbone: TrainingBackbone, size: int, rows: Rows, processes: Processes
) -> StateCache | None:
    if config.data.cache_hidden is None:
        return None
    model = config.model
    facts = {name: getattr(model, name) for name in ("name", "revision", "quantization", "attention")}
    if backbone.feature_layers:
        facts["feature_layers"] = backbone.feature_layers
    facts["weights"] = weights_fingerprint(backbone.causal)
    shape = len(rows.train), config.data.length, size
    key = fingerprint(rows.train, facts)
    folder = Path(config.data.cache_hidden)
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        # On a disk that nodes share, one would see another's mark of a row before its states.
        folder /= f"node-{os.environ['GROUP_RANK']}"
    cache = StateCache(folder, key, shape, DTYPES[model.dtype], processes)

    def fill() -> None:
        paths = [Path(source.path).expanduser() for source in config.data.train]
        files = [saved_states(path, facts["weights"], backbone.feature_layers) for path in paths]
        known = [AnswerStates(file, shape[2], DTYPES[model.dtype]) for file in files if file is not None]
        if known:
            cache.fill(rows.train, known)

    processes.in_turn(fill)
    return cache


def write_results(trainer: Trainer, rows: Rows, measured: Measured | None) -> str:
    """Write what was trained into the output folder; all processes must call it.

    An error names the checkpoint that `--resume` writes it from.

    Returns:
        The base model that the heads' checkpoint names: the model as configured, or the folder of the trained one or of
        its adapter.
    """
    config, processes = trainer.config, trainer.processes
    weights = trainer.trained()

    def write() -> str:
        base = _base_name(config)
        if processes.main:
            with _named_errors(trainer):
                if config.trains_backbone:
                    base = _write_backbone(trainer, _part(weights, "model."))
                _write_heads(trainer, _part(weights, "heads."), base, rows, measured)
        return base

    return processes.each(write)


@contextlib.contextmanager
def _named_errors(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors and torch have their own errors for a full disk and for memory
        raise OSError(
            f"{trainer.folder}: what was trained could not be written ({error}); --resume writes it from "
            f"{trainer.checkpoints.newest()}"
        ) from error


def _part(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _base_name(config: Config) -> str:
    path = Path(config.model.name).expanduser()
    return str(path.resolve()) if path.exists() else config.model.name


def _write_backbone(trainer: Trainer, weights: dict[str, torch.Tensor]) -> str:
    """Write the trained model, or its adapter; return its place relative to the heads."""
    config, backbone, folder = trainer.config, trainer.backbone, trainer.folder
    tokenizer, causal, dtype = load_tokenizer(config.model), backbone.causal, DTYPES[config.model.dtype]
    merge = config.output.merge and config.model.quantization == "none" and not trainer.processes.sharded
    name = "model" if merge or backbone.lora is None else "adapter"
    for pattern in (f".{name}.*.tmp", f".{name}.*.old"):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)  # of a run that was killed
    with whole_folder(folder / name, replace=True) as staging:
        if name == "adapter":
            for settings in backbone.lora.peft_config.values():
                settings.base_model_name_or_path, settings.revision = _base_name(config), config.model.revision
            backbone.lora.save_pretrained(staging, state_dict=weights, save_embedding_layers=False)
            causal.config.save_pretrained(staging)  # has the vocabulary's size
        elif backbone.lora is not None:
            backbone.lora.merge_and_unload().to(dtype).save_pretrained(staging)
        else:
            causal.save_pretrained(staging, state_dict={key: value.to(dtype) for key, value in weights.items()})
            # The model itself is in float32.
            values = read_json_object(staging / "config.json")
            write_json(staging / "config.json", values | {"dtype": config.model.dtype}, indent=2)
        tokenizer.save_pretrained(staging)
    return f"../{name}"


def _write_heads(trainer: Trainer, weights: Weights, base: str, rows: Rows, measured: Measured | None) -> None:
    config, folder, trained = trainer.config, trainer.folder / "heads", trainer.heads
    dtype = DTYPES[config.model.dtype]
    sizes = trained.hidden_size, trained.vocab_size
    heads = new_heads(config.heads, *sizes, trained.token_map, dtype, all_parents=trained.all_parents)
    heads.load_state_dict({**heads.state_dict(), **weights})  # with a token_map, which is no weight
    # A trained backbone is a folder of this run and has no revision.
    revision = None if config.trains_backbone else config.model.revision
    write_heads(heads.eval(), folder, base_model=base, base_revision=revision)
    if measured is not None:
        write_json(folder / MEASURED, measured.to_json())
    card.write_card(folder, _facts(trainer, base, rows, measured))


def _facts(trainer: Trainer, base: str, rows: Rows, measured: Measured | None) -> card.CardFacts:
    config, processes = trainer.config, trainer.processes
    on_gpu = processes.device.type == "cuda"
    machine = torch.cuda.get_device_name(processes.device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    written_by_model = {source.path: asked_of(Path(source.path).expanduser()) for source in config.data.train}
    return card.CardFacts(
        config=config,
        reports=(rows.report, rows.held_out_report),
        records=rows.records,
        tokens=len(rows.train) * config.data.length,
        accuracy=None if measured is None else measured.accuracy,
        losses=[(line["step"], line["loss"]) for line in read_log(trainer.folder) if "loss" in line],
        steps=trainer.at.done,
        seconds=trainer.at.seconds,
        best_step=None if trainer.best is None else trainer.best.step,
        made_with=versions("torch", "transformers") | {"on": f"{processes.size} x {machine}"},
        generated={path: settings for path, settings in written_by_model.items() if settings is not None},
        trained_model=base if config.trains_backbone else None,
    )
