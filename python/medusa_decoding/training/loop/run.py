"""A whole run from its configuration: checks, data, model, heads, training, results.

The output folder gets `heads` (with their model card), `model` or `adapter` if the backbone was trained, the log,
checkpoints and TensorBoard's files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from medusa_decoding.checkpoints.pretrained import stated_sizes
from medusa_decoding.provenance import fingerprint as weights_fingerprint
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop.accuracy import Measured
from medusa_decoding.training.loop.backbone import DTYPES, TrainingBackbone, load_tokenizer
from medusa_decoding.training.loop.heads import make_heads
from medusa_decoding.training.loop.log import LOG, Watcher, tensorboard
from medusa_decoding.training.loop.preflight import check, hold
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.rows import Rows, load_rows
from medusa_decoding.training.loop.schedules import stages
from medusa_decoding.training.loop.states import StateCache, fingerprint
from medusa_decoding.training.loop.trainer import Trainer
from medusa_decoding.training.loop.writing import write_results

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        folder: the output folder.
        heads: folder of the heads, for `MedusaModel.from_pretrained`.
        base_model: of the heads: the model as named, or the folder of the trained one or of its adapter.
        measured: on held-out data, None without it.
        steps: of the whole run.
        seconds: spent in steps.
    """

    folder: Path
    heads: Path
    base_model: str
    measured: Measured | None
    steps: int
    seconds: float


def train(
    config: Config,
    *,
    resume: bool = False,
    watchers: Sequence[Watcher] = (),
    announce: Announce = lambda words: None,
) -> Result:
    """Train heads as a configuration says.

    Args:
        config: of the run.
        resume: continue from the newest checkpoint in the output folder, which must be of the same configuration.
        watchers: receive each line of the log (main process only).
        announce: receives messages for people before and after the steps (main process only).

    Raises:
        ValueError: settings, data or a checkpoint that do not fit; nothing has been trained then.
        FloatingPointError: a loss that is not finite; names the step and the last good checkpoint.
        OSError: a file could not be written.
    """
    processes = Processes.join(config.optimisation.sharding)
    with hold(config, processes):
        return _train(config, processes, resume, watchers, announce if processes.main else lambda words: None)


def _train(
    config: Config, processes: Processes, resume: bool, watchers: Sequence[Watcher], announce: Announce
) -> Result:
    folder = Path(config.output.folder)
    start = check(config, processes, resume)
    if start is None and resume:
        announce(f"no checkpoint in {folder}: begins anew")
    torch.manual_seed(config.optimisation.seed)
    tokenizer = load_tokenizer(config.model)
    rows = load_rows(config, tokenizer, stated_sizes(config.model.name, config.model.revision).get("vocab_size"))
    announce(
        f"{rows.records[0]} records in {len(rows.train)} rows ({rows.train.fill:.0%} filled), "
        f"{rows.records[1]} held out"
    )
    announce(str(rows.report))
    stages(config, len(rows.train))  # refuses a stage that is too short before anything is loaded
    for warning in config.warnings():
        announce(warning)
    device = processes.device
    if processes.sharded:  # only the main process reads the weights, into the host's memory
        device = torch.device("cpu" if processes.main else "meta")
    backbone = processes.each(lambda: TrainingBackbone.load(config, device))
    heads = processes.each(lambda: make_heads(config, backbone, tokenizer, rows.frequencies))
    states = _states(config, backbone, rows, processes)
    # Each process draws its own dropout. Everything that they share has been drawn.
    torch.manual_seed(config.optimisation.seed + processes.rank)
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
        announce(f"goes on from {start}")
    if config.output.tensorboard and processes.main:
        trainer.watchers.append(tensorboard(folder, trainer.at.done))
    announce(f"{trainer.steps} steps: " + ", ".join(f"{stage.steps} {stage.name}" for stage in trainer.stages))
    base, measured = write_results(trainer, rows, trainer.run())
    announce(f"heads in {folder / 'heads'}, their base model is {base}")
    return Result(folder, folder / "heads", base, measured, trainer.at.done, trainer.at.seconds)


def _states(config: Config, backbone: TrainingBackbone, rows: Rows, processes: Processes) -> StateCache | None:
    if config.data.cache_hidden is None:
        return None
    model = config.model
    facts = {
        "name": model.name,
        "revision": model.revision,
        "quantization": model.quantization,
        "attention": model.attention,
        "weights": weights_fingerprint(backbone.causal),
    }
    shape = len(rows.train), config.data.length, int(backbone.causal.config.hidden_size)
    key = fingerprint(rows.train, facts)
    return StateCache(Path(config.data.cache_hidden), key, shape, DTYPES[model.dtype], processes)
