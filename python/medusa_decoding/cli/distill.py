"""Run `medusa distill`: see `cli.parsers.distill` for its arguments."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_decoding.cli.train import read_config, train
from medusa_decoding.progress import Progress
from medusa_decoding.training.config import Config, SourceConfig

if TYPE_CHECKING:
    from medusa_decoding.model import MedusaModel
    from medusa_decoding.training.distill import distill
    from medusa_decoding.training.distill.shards import Shards
    from medusa_decoding.training.loop.processes import Processes

FILE = Path("generated") / "records.jsonl"


def run(args: argparse.Namespace) -> int:
    """Generate, then train."""
    config = read_config(args)
    _check_answers(config)
    if args.limit is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, limit=args.limit))
    if not args.only_data:
        _check_trainable(config, args.resume)
    from medusa_decoding.training.loop.preflight import hold
    from medusa_decoding.training.loop.processes import Processes

    processes = Processes.join("none" if args.only_data else config.optimisation.sharding)
    with hold(config, processes):
        return _run(args, config, processes)


def _run(args: argparse.Namespace, config: Config, processes: Processes) -> int:
    """Generate in `processes`, and then train in them."""
    from medusa_decoding.training.distill.record_file import finished
    from medusa_decoding.training.distill.shards import Shards
    from medusa_decoding.training.loop.preflight import check

    shards = Shards(processes.rank, processes.size)
    file = Path(config.output.folder) / FILE
    shards.check_folder(file.parent)
    asked = _asked(config)
    figures = None
    if args.resume:  # only the main process needs to see the output folder
        figures = processes.by_main(lambda: finished(file, asked))
    if figures is None:
        if not args.only_data:
            check(on_own_data(config, file), processes, args.resume)
            _check_held_out(config)
        figures = _generate(args, config, file, asked, shards)
    elif not args.json and shards.rank == 0:
        print(f"{figures['records']} records are in {file}, all that were asked for", file=sys.stderr)
    summary: dict[str, Any] = {"records": str(file), "generation": figures}
    if not args.only_data:
        try:
            summary["training"] = train(on_own_data(config, file), args.resume, quiet=args.json)
        except KeyboardInterrupt:
            print("medusa: --resume continues from the last checkpoint", file=sys.stderr)
            raise
    if args.json and shards.rank == 0:
        print(json.dumps(summary))
    return 0


def on_own_data(config: Config, file: Path) -> Config:
    """Return a configuration that trains on generated records instead of the seeds."""
    data = dataclasses.replace(config.data, train=(SourceConfig(str(file)),), answers=None, limit=None)
    return dataclasses.replace(config, data=data)


def _check_answers(config: Config) -> None:
    """Raise `ValueError` unless the answers asked for are those of the model as it is deployed."""
    if config.data.answers == "given":
        raise ValueError(
            "data.answers: expected own or null with `medusa distill` (the model writes the answers; `medusa train` "
            "learns those of the data), got given"
        )
    served = config.generation.endpoint is not None
    if config.model.quantization != "none" and not config.generation.quantized and not served:
        raise ValueError(
            "model.quantization: expected none (heads learn what the model answers as it is deployed; "
            "generation.quantized: true says that it is deployed quantised in this way), got "
            f"{config.model.quantization}"
        )


def _check_trainable(config: Config, resume: bool) -> None:
    if config.method == "medusa-2":
        raise ValueError(
            "method: expected self-distillation or medusa-1 (the paper: learning its own text makes the model worse, "
            "section 2.3.2), or --only-data, got medusa-2"
        )
    heads = Path(config.output.folder) / "heads"
    if heads.exists() and not resume:
        raise ValueError(f"output.folder: expected one without trained heads, or --only-data, got {heads}")


def _check_held_out(config: Config) -> None:
    """Raise `ValueError` if training, after all answers are written, could not read `data.held_out`."""
    from medusa_decoding.training.data.records import NO_ANSWER, Report, read_records

    data, found = config.data, Report()
    for _ in read_records(data.held_out, found, system=data.system):
        pass
    if found.bad[NO_ANSWER] > data.max_bad_share * found.read:
        raise ValueError(
            f"data.held_out: expected records with answers, got {found.bad[NO_ANSWER]} prompts alone (the model "
            "answers data.train only; without data.held_out, a share of these answers is held out)"
        )
    if data.held_out:
        found.check(data.max_bad_share)


def _asked(config: Config) -> dict[str, Any]:
    """Return the settings that records depend on."""
    values = dataclasses.asdict(config)
    data = values["data"]
    wanted = ("train", "limit", "template", "template_arguments", "system", "turns", "length", "overlong")
    return {
        "model": values["model"],
        "generation": values["generation"],
        "heads": config.heads.initial,
        "data": {name: data[name] for name in wanted},
    }


def _generate(
    args: argparse.Namespace, config: Config, file: Path, asked: dict[str, Any], shards: Shards
) -> dict[str, Any]:
    import torch

    from medusa_decoding.training.data.encoding import ChatEncoder
    from medusa_decoding.training.data.records import Report, read_records
    from medusa_decoding.training.distill import distill
    from medusa_decoding.training.distill.endpoint import Endpoint
    from medusa_decoding.training.loop.backbone import load_tokenizer

    data, found = config.data, Report()
    seeds = list(read_records(data.train, found, system=data.system, limit=data.limit, seeds=True))
    found.check(data.max_bad_share)
    quiet = args.json or shards.rank > 0
    if not quiet:
        print(f"{len(seeds)} seeds; {found}", *config.warnings(), sep="\n", file=sys.stderr)
    tokenizer, served = load_tokenizer(config.model), config.generation.endpoint is not None
    if data.cache_hidden is not None and not quiet and (served or shards.size > 1):
        of = "a server" if served else "several processes"
        print(f"data.cache_hidden: answers of {of} have no hidden states; training computes them", file=sys.stderr)
    model = Endpoint.connect(config) if served else load(config)
    bar = ProgressBar(len(range(shards.rank, len(seeds), shards.size)))
    try:
        # What training would cut off is not generated.
        length = None if data.overlong == "split" else data.length
        report = distill.generate_records(
            distill.Distillation(model, ChatEncoder.of(tokenizer, data), config.generation, length),
            seeds,
            file,
            resume=args.resume,
            asked=asked,
            save_states=data.cache_hidden is not None,
            shards=shards,
            progress=None if quiet else bar,
        )
    except KeyboardInterrupt:
        print(f"medusa: what was generated is in {file}; --resume continues from there", file=sys.stderr)
        raise
    finally:
        bar.close()
        if not isinstance(model, Endpoint):
            model.undo()
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not quiet:
        print(f"{report}\nin {file}", file=sys.stderr)
    if report.records == 0:
        raise ValueError(f"data.train: the model can answer none of the records; {report}")
    return report.as_json()


def load(config: Config) -> MedusaModel:
    """Load the model that will be trained, without an adapter, and the heads to generate with, if any."""
    import torch

    from medusa_decoding.checkpoints import read_heads
    from medusa_decoding.checkpoints.pretrained import stated_sizes
    from medusa_decoding.model import MedusaModel
    from medusa_decoding.training.loop.backbone import TrainingBackbone

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    name = config.generation.heads or config.heads.initial
    checkpoint = None
    if name is not None:  # before the model, which takes longer to load
        checkpoint = read_heads(
            name, vocab_size=stated_sizes(config.model.name, config.model.revision).get("vocab_size")
        )
    base = TrainingBackbone.load(config, device, frozen=True).causal
    if checkpoint is not None:
        return MedusaModel.from_checkpoint(base, checkpoint)
    model = MedusaModel(base)
    model.backbone.feature_layers = config.heads.feature_layers  # of the states that are saved
    return model


class ProgressBar:
    """Shows a report as a progress bar over seeds."""

    def __init__(self, seeds: int) -> None:
        self._seeds = seeds
        self._bar: Progress | None = None

    def __call__(self, report: distill.GenerationReport) -> None:
        """Show a report; the first one has what earlier runs answered, which says nothing about the pace."""
        if self._bar is None:
            self._bar = Progress(self._seeds, "seed", initial=report.answered)
        self._bar.update(max(0, report.answered + report.left_out.total() - self._bar.n))
        per_step = "" if report.tokens_per_step is None else f", {report.tokens_per_step:.2f} per step"
        if report.tokens_per_second is not None:
            self._bar.set_postfix_str(f"{report.tokens_per_second:.0f} tokens/s{per_step}")

    def close(self) -> None:
        """Leave the bar on the screen."""
        if self._bar is not None:
            self._bar.close()
