"""The results of a run: heads with their model card and held-out figures, and the trained model or its adapter."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from medusa_decoding.checkpoints import write_heads
from medusa_decoding.files import read_json_object, whole_folder, write_json
from medusa_decoding.provenance import versions
from medusa_decoding.training.config import Config
from medusa_decoding.training.distill.record_file import asked_of
from medusa_decoding.training.loop import card
from medusa_decoding.training.loop.accuracy import HeadAccuracy, Measured
from medusa_decoding.training.loop.backbone import DTYPES, load_tokenizer
from medusa_decoding.training.loop.heads import copy_weights, new_heads
from medusa_decoding.training.loop.log import read_log
from medusa_decoding.training.loop.rows import Rows
from medusa_decoding.training.loop.trainer import Trainer

MEASURED = "measured.json"
Weights = Mapping[str, torch.Tensor]


def write_results(trainer: Trainer, rows: Rows, measured: Measured | None) -> tuple[str, Measured | None]:
    """Write what was trained into the output folder; all processes must call it.

    Returns:
        The base model that the heads' checkpoint names: the model as configured, or the folder of the trained one or of
        its adapter. And the held-out figures, measured again if heads are stored in 8 bits.

    Raises:
        OSError: it could not be written; names the checkpoint that `--resume` writes it from.
    """
    config, processes = trainer.config, trainer.processes
    weights = trainer.trained()
    with _named_errors(trainer):
        if measured is not None and trainer.held_out is not None and config.heads.storage != "float":
            # The figures must be those of the written heads.
            processes.each(lambda: trainer.store(config.heads.storage))
            measured = trainer.measure(trainer.held_out)

    def write() -> str:
        base = _base_name(config)
        if processes.main:
            with _named_errors(trainer):
                if config.trains_backbone:
                    base = _write_backbone(trainer, _part(weights, "model."))
                _write_heads(trainer, _part(weights, "heads."), base, rows, measured)
        return base

    return processes.each(write), measured


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
    return str(path.resolve()) if path.is_dir() else config.model.name


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
    heads = new_heads(config.heads, trained.hidden_size, trained.vocab_size, trained.token_map, dtype)
    copy_weights(heads, weights)
    if config.heads.storage != "float":
        heads = heads.quantized(config.heads.storage)
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
        report=rows.report,
        train_records=rows.records[0],
        held_out_records=rows.records[1],
        accuracy=HeadAccuracy.empty(trainer.heads.num_heads) if measured is None else measured.accuracy,
        losses=[(line["step"], line["loss"]) for line in read_log(trainer.folder) if "loss" in line],
        steps=trainer.at.done,
        seconds=trainer.at.seconds,
        held_out_report=rows.held_out_report,
        tokens=len(rows.train) * config.data.length,
        versions=versions("torch", "transformers"),
        machine=machine if processes.size == 1 else f"{processes.size} x {machine}",
        generated={path: settings for path, settings in written_by_model.items() if settings is not None},
        trained_model=base if config.trains_backbone else None,
    )
