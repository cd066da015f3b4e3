"""Run `medusa train`: see `cli.parsers.train` for its arguments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medusa_decoding.checkpoints.tuning_paths import check_writable
from medusa_decoding.cli import _arguments, ended_by_interrupts
from medusa_decoding.files import write_text
from medusa_decoding.progress import Progress
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config, table


def read_config(args: argparse.Namespace) -> Config:
    """Return the configuration that `add_config`'s arguments name; a `ValueError` names what is wrong."""
    if args.config is None:
        raise ValueError("--config is needed; `medusa train --init MODEL DATA` writes such a file")
    values: Any = config_schema.read_yaml(args.config)
    for setting in args.set:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--set: expected KEY=VALUE, got {setting!r}")
        _put(values, key.split("."), config_schema.parse_yaml(text), key)
    config = Config.of(values)
    with ended_by_interrupts():  # wrong settings have been refused before the seconds that this takes
        importlib.import_module("transformers.modeling_utils")
    return config


def _put(values: Any, path: list[str], value: Any, key: str) -> None:
    for name in path[:-1]:
        if not isinstance(values, dict) or not isinstance(values.setdefault(name, {}), dict):
            raise ValueError(f"--set: expected a key of the settings, got {key!r}")
        values = values[name]
    values[path[-1]] = value


def run(args: argparse.Namespace) -> int:
    """Train."""
    if args.settings:
        print(table(), end="")
        return 0
    if args.init is not None:
        return _init(args)
    for name in ("out", "device", "recipe"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} needs --init")
    config = read_config(args)
    if args.check:
        return _check(config, args.resume, args.on)
    if args.on is not None:
        raise ValueError("--on needs --check")
    if args.curve:
        return _curve(config, args.resume, quiet=args.json)
    result = train(config, args.resume, quiet=args.json)
    if args.json:
        print(json.dumps(result))
    return 0


def _curve(config: Config, resume: bool, quiet: bool) -> int:
    from medusa_decoding.training.loop.curve import curve, describe

    with _progress(quiet) as options:
        found = curve(config, resume=resume, **options)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found) if quiet else describe(found))
    return 0


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[dict[str, Any]]:
    """Show a progress bar and messages unless `quiet`; yields the arguments of training that do so."""
    bar = LogBar()
    try:
        yield {"watchers": [], "announce": lambda words: None} if quiet else {"watchers": [bar], "announce": _say}
    finally:
        bar.close()


def train(config: Config, resume: bool, quiet: bool) -> dict[str, Any]:
    """Train with a progress bar unless `quiet`; return the result as plain values."""
    from medusa_decoding.training.loop import run as training_run

    with _progress(quiet) as options:
        result = training_run.train(config, resume=resume, **options)
    return {
        "heads": str(result.heads),
        "base_model": result.base_model,
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "heads_step": result.heads_step,
        "held_out": None if result.measured is None else result.measured.to_json(),
    }


def _init(args: argparse.Namespace) -> int:
    """Write a first config, and print what was decided and why."""
    for name in ("config", "set", "resume", "check", "curve", "json"):
        if getattr(args, name):
            raise ValueError(
                f"--init: expected no --{name} with it, got one; edit the file that --init writes, then run it"
            )
    import torch

    from medusa_decoding.training.first_config import first_config, model_name
    from medusa_decoding.training.loop.preflight import check

    model, data = args.init
    out = Path(f"{model_name(model)}.yaml") if args.out is None else args.out
    check_writable("--out", out)
    if out.exists():
        raise ValueError(f"--out: expected a new file, got {out}; remove it, or name another one")
    args.device = args.device or "auto"
    _arguments.resolve_device(args)
    found = first_config(model, data, torch.device(args.device), args.recipe or "own-answers")
    hidden = "CUDA_VISIBLE_DEVICES= " if args.device == "cpu" and torch.cuda.is_available() else ""
    commands = [f"{hidden}medusa train --config {shlex.quote(str(out))}{option}" for option in (" --check", "")]
    if found.distills:
        commands = [f"{hidden}medusa distill --config {shlex.quote(str(out))}"]
    check(found.config, _processes(found.config))
    write_text(out, found.to_yaml(commands))
    print("\n".join(found.facts))
    print()
    for choice in found.choices:
        print(f"{f'{choice.key}: {_shown(choice.value)}':44}  {choice.why}".rstrip())
    print(f"\nin {out}. Next:", *(f"  {command}" for command in commands), sep="\n")
    return 0


def _shown(value: Any) -> str:
    return ", ".join(entry["path"] for entry in value) if isinstance(value, list) else config_schema.value_text(value)


def _check(config: Config, resume: bool, on: str | None) -> int:
    from medusa_decoding.training.loop import estimate, machines
    from medusa_decoding.training.loop.backbone import load_tokenizer
    from medusa_decoding.training.loop.heads import choose_tokens, describe_map
    from medusa_decoding.training.loop.preflight import check
    from medusa_decoding.training.loop.rows import load_rows
    from medusa_decoding.training.loop.schedules import stages

    machine = None if on is None else machines.parse(on)
    if machine is not None and config.model.dtype == "float32":
        raise ValueError("--on: expected model.dtype bfloat16 (its peaks are those of 16 bits), got float32")
    processes = _processes(config)
    check(config, processes, resume)
    shapes, tokenizer = estimate.shapes_of(config), load_tokenizer(config.model)
    rows = load_rows(config, tokenizer, shapes.vocabulary)
    say: Any = print if processes.main else lambda *_, **__: None
    sizes = rows.sizes(config.data.length)
    say(rows.report)
    say(f"{rows.records[0]} records in {sizes['rows']} rows of {config.data.length} ({rows.train.fill:.0%} filled)")
    say(f"{rows.records[1]} held out, in {0 if rows.held_out is None else len(rows.held_out)} rows")
    say(f"{sizes['tokens']:,} tokens, {sizes['learnt_tokens']:,} of them learnt")
    say("per example: {median_tokens:,} (median), {p95_tokens:,} (95 %), {most_tokens:,} (most)".format(**sizes))
    token_map = choose_tokens(config.heads, tokenizer, rows.frequencies)
    if token_map is not None and config.heads.initial is None:  # given heads have their own
        say(describe_map(token_map, shapes.vocabulary, rows))
    for stage in stages(config, len(rows.train)):
        say(f"{stage.steps} steps of {config.optimisation.batch_size} rows: {stage.name}")
    count, gpu = (processes.size, None) if machine is None else machine
    say(*estimate.describe_memory(config, shapes, gpu or processes.device, count if processes.sharded else 1), sep="\n")
    if gpu is None:
        pace = estimate.pace(config, shapes, rows, tokenizer, processes)
    else:
        pace = estimate.pace_at(gpu.rate, config, shapes, rows.learnt)
    say(estimate.describe_time(config, rows, pace, count, gpu))
    if config.data.cache_hidden is not None:
        say(estimate.describe_states(config, shapes, rows, pace))
    say(*estimate.describe_readers(config, shapes), sep="\n")
    for warning in config.warnings():
        say(warning)
    return 0


def _processes(config: Config) -> Any:
    """Return the processes that a run is checked for. One process may check weights that will be sharded."""
    from medusa_decoding.training.loop.processes import Processes

    if config.optimisation.sharding == "full" and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return dataclasses.replace(Processes.join("none"), sharded=True)
    return Processes.join(config.optimisation.sharding)


def _say(words: str) -> None:
    print(words, file=sys.stderr)


class LogBar:
    """Shows a run's log as a progress bar."""

    bar: Progress | None = None

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Show a line of the log."""
        if "of" not in line:
            _say(
                f"step {line['step']}, held out: model {line['model_loss']:.3f} nats, top-1 {line['model_top1']:.3f}; "
                f"heads' top-1 {_shares(line['head_top1'])}"
            )
            return
        if self.bar is None or line["step"] < self.bar.n:  # of another run, which ended early
            self.close()
            # Steps before the bar was there say nothing about the pace.
            self.bar = Progress(line["of"], "step", initial=line["step"])
        memory = line["peak_memory"] / 2**30
        words = f"{line['stage']}, loss {line['loss']:.3f}, top-1 {_shares(line['head_top1'])}"
        words += f", {line['tokens_per_second']:,.0f} tokens/s, {memory:.1f} GiB, MFU {line['mfu']:.0%}"
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update(line["step"] - self.bar.n)
        if line["step"] == line["of"]:
            self.close()

    def close(self) -> None:
        """Leave the bar on the screen."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _shares(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
