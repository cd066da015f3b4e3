"""Checks before a run: refuses whatever must fail later, before data is read or a model is loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from medusa_decoding.checkpoints import hub, pretrained
from medusa_decoding.checks import import_library
from medusa_decoding.files import only_writer
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop import card, estimate
from medusa_decoding.training.loop.backbone import NAME, check_adaptable
from medusa_decoding.training.loop.heads import given_heads
from medusa_decoding.training.loop.log import check_trackers
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.saving import STATE, Checkpoints, damaged, read_state
from medusa_decoding.training.loop.schedules import make_optimiser, parameter_groups

_CHANGEABLE = [
    *("optimisation.sharding", "optimisation.micro_batch_size", "data.cache_hidden"),
    *(f"output.{name}" for name in ("folder", "checkpoint_steps", "keep_checkpoints", "log_steps", "trackers")),
    *("output.merge", "output.push_to_hub", "output.push_private"),
]
"""Settings that a resumed run can change, next to those of `medusa distill`."""

_PLACES = ("model.name", "data.train", "data.held_out", "data.cache_hidden", "output.folder")
"""Settings that may differ between the processes of a run: each node has its own disks."""


@contextlib.contextmanager
def hold(config: Config, processes: Processes) -> Iterator[None]:
    """Hold the output folder inside the block, so that no other run writes there; the main process does it for all.

    If another run holds it, every process raises the same message.
    """
    with contextlib.ExitStack() as stack:

        def enter() -> None:
            _check_folder(Path(config.output.folder))
            stack.enter_context(only_writer("output.folder", config.output.folder, inside=True))

        processes.by_main(enter)
        yield


def check(config: Config, processes: Processes, resume: bool = False) -> Path | None:
    """Refuse a run that is known to fail.

    Returns:
        The checkpoint that the run resumes from, None for a new run.
    """
    processes.same({key: value for key, value in config_schema.flat(config).items() if key not in _PLACES})
    start = processes.by_main(lambda: _start(config, resume))
    import_library("matplotlib", card.PLOT)
    model = pretrained.load_config(config.model.name, config.model.revision, argument=NAME)
    check_adaptable(config, model)
    vocabulary, trimmed = int(model.vocab_size), config.heads.token_map_size
    if trimmed is not None and trimmed > vocabulary:
        raise ValueError(f"heads.token_map_size: expected at most the {vocabulary} tokens there are, got {trimmed}")
    layers, read = int(model.num_hidden_layers), config.heads.feature_layers
    if max(read, default=0) >= layers:
        raise ValueError(f"heads.feature_layers: expected numbers below the model's {layers} layers, got {list(read)}")
    if config.heads.initial is not None:
        given_heads(config, int(model.hidden_size), vocabulary)
    heads = estimate.meta_heads(config, int(model.hidden_size), vocabulary)
    make_optimiser(parameter_groups(heads, config=config), config)  # heads may be too large for it
    if processes.sharded:
        for broken, expected in (
            (config.data.cache_hidden is not None, "data.cache_hidden: expected null"),
            (config.model.quantization != "none", "model.quantization: expected none"),
            (getattr(model, "quantization_config", None), "model.name: expected a model that is not quantised"),
            (config.optimisation.optimizer != "adamw", "optimisation.optimizer: expected adamw"),
        ):
            if broken:
                raise ValueError(f"{expected} with divided weights, got another")
    processes.by_main(lambda: _check_services(config))
    return start


def _check_services(config: Config) -> None:
    check_trackers(config.output.trackers)
    if config.output.push_to_hub is not None:
        _check_push(config, config.output.push_to_hub)


def _check_push(config: Config, repo_id: str) -> None:
    hub.check_repository("output.push_to_hub", repo_id)
    if Path(config.model.name).expanduser().exists():
        raise ValueError(
            "model.name: expected a model on the hub with output.push_to_hub (or leave that out, and name one with "
            f"`medusa export --format hub --base-model`), got {config.model.name}"
        )
    hub.check_repository("model.name", config.model.name)
    hub.check_push(repo_id, private=config.output.push_private)


def _check_folder(folder: Path) -> None:
    place = folder.absolute()
    there = next((path for path in (place, *place.parents) if path.exists()), place)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output.folder: expected one that is there or can be made, got {folder}")


def _start(config: Config, resume: bool) -> Path | None:
    folder = Path(config.output.folder)
    _check_folder(folder)
    newest = Checkpoints(folder / "checkpoints", 1).newest()
    if newest is None:
        for name in ("heads", "model", "adapter"):
            if (folder / name).exists():
                raise ValueError(f"output.folder: expected a new one, got {folder}, in which there is {name}")
        return None
    if not resume:
        raise ValueError(
            f"output.folder: expected a new one (or --resume to go on from {newest.name}), got {folder} with a run"
        )
    state = read_state(newest)
    try:
        before = Config.of(config_schema.parse_yaml(str(state.get("config"))))
    except ValueError as error:
        raise damaged(newest, f"{STATE}: config: {error}") from error
    had = config_schema.flat(before)
    for key, value in config_schema.flat(config).items():
        if key not in _CHANGEABLE and not key.startswith("generation.") and had[key] != value:
            raise ValueError(f"{key}: expected what the run in {folder} was begun with, got another; start a new one")
    return newest
