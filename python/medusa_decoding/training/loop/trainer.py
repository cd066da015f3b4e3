"""The training loop: stages of steps, each the gradient of one global batch (Medusa paper, sections 2.2 and B).

The order of rows depends on the seed alone, and every mean is over a whole step's targets, so that neither the number
of processes nor the size of micro-batches changes what is minimised. A run stopped anywhere goes on from its last
checkpoint with the same numbers. This module does not know where rows, models or heads come from.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_decoding.files import parse_json, write_text
from medusa_decoding.heads import MedusaHeads, Storage
from medusa_decoding.training.config import Config
from medusa_decoding.training.data.packing import PackedDataset, collate
from medusa_decoding.training.data.targets import IGNORE
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.training.loop.backbone import DTYPES, TrainingBackbone
from medusa_decoding.training.loop.objective import HIDDEN, Normalisers, Objective
from medusa_decoding.training.loop.processes import Processes, fill, own, whole
from medusa_decoding.training.loop.saving import (
    STATE,
    Checkpoints,
    check_optimiser,
    check_weights,
    damaged,
    read_state,
    restore_random,
)
from medusa_decoding.training.loop.schedules import Stage, lambda_0, learning_rates, parameter_groups, stages
from medusa_decoding.training.loop.states import StateCache, fingerprint
from medusa_decoding.training.loss.fake_quant import store
from medusa_decoding.training.loss.losses import TOP, Loss

LOG = "log.jsonl"


@dataclass(frozen=True)
class Measured:
    """What held-out data says.

    Attributes:
        accuracy: of the heads.
        model_loss: of the model itself, nats a token.
        model_top1: its next-token accuracy.
    """

    accuracy: HeadAccuracy
    model_loss: float
    model_top1: float

    def to_json(self) -> dict[str, Any]:
        """Return figures as plain lists."""
        return {
            "model_loss": self.model_loss,
            "model_top1": self.model_top1,
            "head_top1": [row[0] for row in self.accuracy.cumulative],
            "accuracy": self.accuracy.to_json(),
        }

    @classmethod
    def from_json(cls, values: Any) -> Measured:
        """Read what `to_json` returned.

        Raises:
            ValueError: anything else.
        """
        try:
            return cls(
                HeadAccuracy.from_json(values["accuracy"]), float(values["model_loss"]), float(values["model_top1"])
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"measured: expected accuracy, model_loss and model_top1, got {values!r:.80}") from error


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        stage: number of the stage.
        step: steps of it that are done.
        done: steps of the whole run that are done.
        tokens: tokens that were trained on, padding included.
        seconds: spent.
    """

    stage: int = 0
    step: int = 0
    done: int = 0
    tokens: int = 0
    seconds: float = 0.0


Watcher = Callable[[Mapping[str, Any]], None]
"""Is shown each line of the log."""


@dataclass
class Trainer:
    """Trains heads, and the backbone's adapter or weights where the method says so.

    Args:
        config: of the run.
        backbone: the model.
        heads: in float32, on the model's device.
        rows: to train on.
        held_out: to measure on, or None.
        processes: those of the run.
        states: cache of hidden states, or None.
        watchers: shown each line of the log, by the main process.
    """

    config: Config
    backbone: TrainingBackbone
    heads: MedusaHeads
    rows: PackedDataset
    held_out: PackedDataset | None
    processes: Processes
    states: StateCache | None = None
    watchers: list[Watcher] = field(default_factory=list)

    def __post_init__(self) -> None:
        output = self.config.output
        self.folder = Path(output.folder)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", output.keep_checkpoints, self.processes)
        self.stages = stages(self.config, len(self.rows))
        self.objective = Objective(self.backbone, self.heads, self.config)
        self.at = Progress()
        self.measured: Measured | None = None
        if self.processes.sharded:
            self.processes.shard(self.objective, self.backbone.decoder.layers)
        self._begin_stage(self.stages[0])

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Measured | None:
        """Train from where the run stands to its end; return what held-out data says then.

        Raises:
            FloatingPointError: the loss is not finite; names the step and the last good checkpoint.
            OSError: a checkpoint could not be written; names the last good one.
        """
        for number in range(self.at.stage, len(self.stages)):
            stage = self.stages[number]
            if number > self.at.stage:
                self.at.stage, self.at.step = number, 0
                self._begin_stage(stage)
            while self.at.step < stage.steps:
                started = time.monotonic()
                last = self.at.step + 1 == stage.steps
                logged = (self.at.step + 1) % self.config.output.log_steps == 0 or last or self.at.step == 0
                line = self._step(stage, logged)
                self.at.step += 1
                self.at.done += 1
                self.at.seconds += time.monotonic() - started
                if logged:
                    self._log(line | {"seconds": round(self.at.seconds, 2)})
                if self.held_out is not None and (self._evaluation_due(stage) or last):
                    self.measured = self.measure(self.held_out)
                    self._log({"stage": stage.name, "step": self.at.done} | self.measured.to_json())
                if self.at.done % self.config.output.checkpoint_steps == 0 or last:
                    self.save()
        return self.measured

    def _evaluation_due(self, stage: Stage) -> bool:
        every = self.config.output.evaluate_steps or self._steps_an_epoch
        return self.at.step % every == 0

    @property
    def _steps_an_epoch(self) -> int:
        return -(-len(self.rows) // self.config.optimisation.batch_size)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return sum(stage.steps for stage in self.stages)

    def _begin_stage(self, stage: Stage) -> None:
        objective, config = self.objective, self.config
        objective.joint = stage.trains_backbone
        if not self.processes.sharded:
            # DDP waits for the gradient of whatever requires one. Sharded weights keep what they were made with.
            for weight in self._trained_weights.values():
                weight.requires_grad_(stage.trains_backbone)
        self.wrapped: nn.Module = self.processes.replicated(objective)
        backbone = list(self._trained_weights.items()) if stage.trains_backbone else []
        groups = parameter_groups(self.heads, backbone, config=config)
        self.optimiser = _optimiser(groups, config, self.processes.sharded)
        rates = config.optimisation
        self.schedule = learning_rates(self.optimiser, rates.warmup_steps, stage.steps, rates.schedule)
        self.clipped = [weight for group in groups for weight in group["params"]]

    @functools.cached_property
    def _data(self) -> str:
        return fingerprint(self.rows, {})

    @functools.cached_property
    def _trained_names(self) -> list[str]:
        return list(self.backbone.trained())

    @property
    def _trained_weights(self) -> dict[str, nn.Parameter]:
        weights = dict(self.backbone.module.named_parameters())
        return {name: weights[name] for name in self._trained_names}

    # -- a step ----------------------------------------------------------------------------------------------------

    def _step(self, stage: Stage, logged: bool = True) -> dict[str, Any]:
        """Make a step; return its line of the log, with accuracies where it is `logged` (they cost time)."""
        config, processes = self.config, self.processes
        numbers = self._rows_of_step(self.at.step)
        # Every process has all rows, whose targets it counts; its own go to the device.
        rows = {number: self.rows[number] for number in numbers}
        parts = self._micro_batches(numbers)
        normalisers = self._normalisers(rows.values()).to(processes.device)
        weight = config.loss.lambda_0
        if weight is not None and stage.trains_backbone:
            weight = lambda_0(self.at.step, stage.steps, weight, config.loss.lambda_0_schedule)
        self.objective.train()
        sums: dict[str, Tensor] = {}
        for place, part in enumerate(parts):
            # A GPU still computes the micro-batch before while this one is read and sent.
            batch = self._batch(part, rows)
            more = place + 1 < len(parts)
            with processes.gradients_kept(self.wrapped, more), self._precision():
                found = self.wrapped(batch, normalisers, 1.0 if weight is None else weight, int(logged))
                # Gradients are averaged over the processes, where the step's is their sum.
                (found["loss"] * processes.size).backward()
            for name, value in found.items():
                value = value.detach().double()
                sums[name] = sums[name] + value if name in sums else value
        sums = self._over_processes(sums)
        self._check_finite(sums["loss"], stage)
        norm = self._clip()
        self._check_finite(norm, stage, "gradient norm")
        rates = {group["name"].partition(",")[0]: group["lr"] for group in self.optimiser.param_groups}
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.at.tokens += sum(row["input_ids"].numel() for row in rows.values())
        line = {"stage": stage.name, "step": self.at.done + 1, "of": self.steps, "loss": float(sums["loss"])}
        line |= _means(sums)
        if weight is not None and stage.trains_backbone:
            line["lambda_0"] = weight
        return line | {"rates": rates, "gradient_norm": float(norm), "tokens": self.at.tokens}

    def _rows_of_step(self, step: int) -> list[int]:
        """Return the rows of a stage's step: each epoch in an order of its own, which the seed decides."""
        rates, an_epoch = self.config.optimisation, self._steps_an_epoch
        epoch, place = divmod(step, an_epoch)
        generator = torch.Generator().manual_seed((rates.seed * 7919 + self.at.stage) * 104729 + epoch)
        order = torch.randperm(len(self.rows), generator=generator)
        return [int(row) for row in order[place * rates.batch_size : (place + 1) * rates.batch_size]]

    def _micro_batches(self, numbers: list[int]) -> list[list[int]]:
        """Divide a step's rows among processes and micro-batches; all processes get as many micro-batches."""
        size, micro = self.processes.size, self.config.optimisation.micro_batch_size
        count = math.ceil(len(numbers) / (size * micro))
        own = numbers[self.processes.rank :: size]
        return [own[place * micro : (place + 1) * micro] for place in range(count)]

    def _batch(self, numbers: list[int], rows: Mapping[int, dict[str, Tensor]] | PackedDataset) -> dict[str, Any]:
        """Return rows on the device; without any, a row that nothing is learnt from, which keeps processes in step."""
        trained = not isinstance(rows, PackedDataset)
        chosen = [rows[number] for number in numbers] or [_blank(self.rows[0] if trained else rows[0])]
        batch = collate(chosen, self.config.model.attention)
        states = None
        if self.states is not None and trained and numbers:
            pinned = self.processes.device.type == "cuda"
            states = self.states.get(numbers, pinned)
            if states is None:
                moved = _moved(batch, self.processes.device)
                with torch.no_grad(), self._precision():
                    states = self.backbone.hidden(moved)
                self.states.put(numbers, states)
                states = self.states.get(numbers, pinned)  # as every later epoch reads them
        if states is not None:
            batch[HIDDEN] = states
        return _moved(batch, self.processes.device)

    def _normalisers(self, rows: Iterable[dict[str, Tensor]]) -> Normalisers:
        """Count the targets of a whole step, of which every process has all rows: nobody has to be asked."""
        return Normalisers.count([collate(list(rows))], self._shape_of_heads)

    @functools.cached_property
    def _shape_of_heads(self) -> MedusaHeads:
        # Targets depend on the heads' number and vocabulary, which are looked at on the host.
        heads = self.heads
        token_map = None if heads.token_map is None else heads.token_map.cpu()
        return MedusaHeads(1, heads.vocab_size, heads.num_heads, shared_projection=True, token_map=token_map)

    def _clip(self) -> Tensor:
        limit = self.config.optimisation.max_gradient_norm
        return whole(nn.utils.clip_grad_norm_(self.clipped, math.inf if limit is None else limit)).detach()

    def _check_finite(self, value: Tensor, stage: Stage, name: str = "loss") -> None:
        if not bool(torch.isfinite(value)):
            raise FloatingPointError(
                f"{name}: expected a finite number, got {float(value)} at step {self.at.step + 1} of stage "
                f"{stage.name}; {self._last_good()}"
            )

    def _last_good(self) -> str:
        newest = self.checkpoints.newest()
        return "there is no checkpoint yet" if newest is None else f"the last good checkpoint is {newest}"

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Multiply in bfloat16 where the model is of that type; weights that are trained stay in float32."""
        enabled = self.config.model.dtype == "bfloat16"
        return torch.autocast(self.processes.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _over_processes(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = sorted(sums)
        flat = self.processes.total(torch.cat([sums[name].double().flatten() for name in names]))
        parts = flat.split([sums[name].numel() for name in names])
        return {name: part.view(sums[name].shape) for name, part in zip(names, parts, strict=True)}

    # -- held-out data ---------------------------------------------------------------------------------------------

    def measure(self, rows: PackedDataset) -> Measured:
        """Return the accuracy of heads and model on rows, without touching any random numbers."""
        processes, micro = self.processes, self.config.optimisation.micro_batch_size
        own = list(range(processes.rank, len(rows), processes.size))
        count = math.ceil(len(rows) / (processes.size * micro))
        sums: dict[str, Tensor] = {}
        self.objective.eval()
        with torch.no_grad(), self._precision():
            for place in range(count):
                batch = self._batch(own[place * micro : (place + 1) * micro], rows)
                for name, value in self.objective(batch, top=TOP).items():
                    sums[name] = sums[name] + value.double() if name in sums else value.double()
        processes.divide_again(self.objective)
        sums = self._over_processes(sums)
        accuracy = HeadAccuracy.empty(self.heads.num_heads)
        whole_numbers = {name: value.round().long() for name, value in sums.items() if name.startswith("head_")}
        accuracy.add(
            Loss(
                sums["loss"], sums["head_sums"], whole_numbers["head_counts"], whole_numbers["head_outside"],
                whole_numbers["head_hits"],
            )
        )  # fmt: skip
        targets = max(float(sums["model_count"]), 1.0)
        return Measured(accuracy, float(sums["model_sum"]) / targets, float(sums["model_hits"]) / targets)

    def store(self, storage: Storage) -> None:
        """Turn own projections into the numbers that they are once they are stored in 8 bits, to be measured.

        What was trained is gone then: `trained` comes before. Nobody has to be asked: divided weights are divided
        between heads, of each of which all rows are in one process.
        """
        projections = self.heads.w2
        assert isinstance(projections, nn.Parameter)
        part = own(projections.detach())
        assert part.shape[1:] == projections.shape[1:]
        store(part, storage, DTYPES[self.config.model.dtype])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of where the run stands."""
        weights, optimiser = self._state()
        state = {
            "stage": self.at.stage,
            "step": self.at.step,
            "done": self.at.done,
            "tokens": self.at.tokens,
            "seconds": self.at.seconds,
            "rows": len(self.rows),
            "data": self._data,
            "processes": self.processes.size,
            "sharded": self.processes.sharded,
            "config": self.config.to_yaml(),
            "measured": None if self.measured is None else self.measured.to_json(),
        }
        optimiser = {"optimiser": optimiser, "schedule": self.schedule.state_dict()}
        self.checkpoints.save(self.at.done, state, weights, optimiser)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: a damaged checkpoint, or one of other rows or another number of processes; a damaged log.
        """
        state = read_state(path)
        missing = {"rows", "processes", "sharded", "data", "measured", *vars(self.at)} - state.keys()
        if missing:
            raise damaged(path, f"{STATE} does not say its {min(missing)}")
        for name, wanted in (("rows", len(self.rows)), ("processes", self.processes.size)):
            if state[name] != wanted:
                raise ValueError(f"{path}: expected a run of {wanted} {name}, got one of {state[name]}")
        if state["sharded"] != self.processes.sharded:
            had, has = ("divided" if sharded else "whole" for sharded in (state["sharded"], self.processes.sharded))
            raise ValueError(f"{path}: expected a run with {has} weights, got one with {had} weights")
        if state["data"] != self._data:
            raise ValueError(f"{path}: expected a run on these very rows, got one on others: the data has changed")
        self.at = self._progress(path, state)
        try:
            self.measured = None if state["measured"] is None else Measured.from_json(state["measured"])
        except ValueError as error:
            raise damaged(path, f"{STATE}: {error}") from error
        weights, optimiser, numbers = self.checkpoints.load(path, state)
        if self.at.stage > 0:
            self._begin_stage(self.stages[self.at.stage])
        self._restore(path, weights, optimiser)
        try:
            restore_random(numbers, self.processes.device)
        except Exception as error:  # each of the generators has its own
            raise damaged(path, f"random-{self.processes.rank}.pt: {error!r:.200}") from error
        if self.processes.main:
            self._cut_log()

    def _progress(self, path: Path, state: Mapping[str, Any]) -> Progress:
        """Return where a checkpoint's run stood, which must be a place of this run."""
        names = ("stage", "step", "done", "tokens")
        stage, step, done, tokens = (state[name] for name in names)
        counted = all(isinstance(state[name], int) and not isinstance(state[name], bool) for name in names)
        fits = (
            counted
            and 0 <= stage < len(self.stages)
            and 0 <= step <= self.stages[stage].steps
            and done == step + sum(before.steps for before in self.stages[:stage])
            and tokens >= 0
        )
        seconds = state["seconds"]
        if not fits or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            got = ", ".join(f"{name} {state[name]!r:.40}" for name in (*names, "seconds"))
            raise damaged(path, f"{STATE}: expected a place in this run's {self.steps} steps, got {got}")
        return Progress(stage, step, done, tokens, float(seconds))

    def trained(self) -> dict[str, Tensor]:
        """Return whole copies of the trained weights on the CPU, by their names in heads and model.

        All processes must ask; only the main one is told.
        """
        named = {f"heads.{name}": weight for name, weight in self.heads.named_parameters()}
        named |= {f"model.{name}": weight for name, weight in self._trained_weights.items()}
        found = {}
        for name, weight in named.items():
            values = whole(weight.detach())
            if self.processes.main:
                found[name] = values.to("cpu", copy=True)
        return found

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        weights = self.trained()
        if not self.processes.sharded:
            return weights, self.optimiser.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return weights, get_optimizer_state_dict(self.objective, self.optimiser, options=options)

    def _restore(self, path: Path, weights: Mapping[str, Tensor], saved: dict[str, Any]) -> None:
        named = {f"heads.{name}": weight for name, weight in self.heads.named_parameters()}
        named |= {f"model.{name}": weight for name, weight in self._trained_weights.items()}
        check_weights(path, weights, named)
        if not self.processes.sharded:
            check_optimiser(path, saved, self.optimiser, self.schedule, self.at.step)
        optimiser = saved["optimiser"]
        with torch.no_grad():
            for name, weight in named.items():
                fill(weight, weights[name])
        if not self.processes.sharded:
            self.optimiser.load_state_dict(optimiser)
            self.schedule.load_state_dict(saved["schedule"])
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.objective, self.optimiser, optim_state_dict=optimiser, options=options)
        self.schedule.load_state_dict(saved["schedule"])

    # -- the log ---------------------------------------------------------------------------------------------------

    def _log(self, line: Mapping[str, Any]) -> None:
        if not self.processes.main:
            return
        try:
            with open(self.folder / LOG, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(dict(line)) + "\n")
        except OSError as error:
            raise OSError(f"{self.folder / LOG}: could not be written ({error}); {self._last_good()}") from error
        for watcher in self.watchers:
            watcher(line)

    def _cut_log(self) -> None:
        """Leave off what a stopped run logged behind its last checkpoint: those steps are made again."""
        file = self.folder / LOG
        if file.is_file():
            kept = [line for line in read_log(self.folder) if line["step"] <= self.at.done]
            write_text(file, "".join(json.dumps(line) + "\n" for line in kept))


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log; a last one that a kill cut off is left out.

    Raises:
        ValueError: a line that is not of a log; it is named.
    """
    file = folder / LOG
    return list(_lines(file)) if file.is_file() else []


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            found = parse_json(line, where := f"{file}:{number}")
            if not isinstance(found, dict) or not all(
                isinstance(value, (int, float)) for value in (found.get("step"), found.get("loss", 0))
            ):
                raise ValueError(f"{where}: expected the log of a step, got {found!r:.80}; remove the line to go on")
            yield found


def _optimiser(groups: list[dict[str, Any]], config: Config, sharded: bool) -> torch.optim.Optimizer:
    rates = config.optimisation
    options: dict[str, Any] = {"betas": (rates.beta_1, rates.beta_2), "eps": rates.epsilon}
    if rates.optimizer == "adamw":
        return torch.optim.AdamW(groups, **options)
    if sharded:
        raise ValueError("optimisation.optimizer: expected adamw with divided weights, got adamw_8bit")
    for weight in (weight for group in groups for weight in group["params"]):
        if weight.numel() >= 2**31:
            raise ValueError(
                f"optimisation.optimizer: expected adamw for weights of {list(weight.shape)} (adamw_8bit counts in 32 "
                "bits; or make them smaller with heads.token_map_size or heads.shared_projection), got adamw_8bit"
            )
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "bitsandbytes: expected the library for optimisation.optimizer adamw_8bit "
            "(pip install 'medusa-kernels[train]', or use adamw), got none"
        ) from error
    found: torch.optim.Optimizer = AdamW8bit(groups, **options)
    return found


def _means(sums: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return losses and accuracies a token, from sums over a step."""
    counts = sums["head_counts"].clamp(min=1)
    asked = (sums["head_counts"] + sums["head_outside"]).clamp(min=1)
    found: dict[str, Any] = {"head_losses": (sums["head_sums"] / counts).tolist()}
    if sums["head_hits"].numel():
        found["head_top1"] = (sums["head_hits"][:, 0] / asked).tolist()
    if "model_sum" in sums:
        found["model_loss"] = float(sums["model_sum"] / sums["model_count"].clamp(min=1))
    if "model_hits" in sums:
        found["model_top1"] = float(sums["model_hits"] / sums["model_count"].clamp(min=1))
    return found


def _blank(row: dict[str, Tensor]) -> dict[str, Tensor]:
    return row | {"labels": torch.full_like(row["labels"], IGNORE)}


def _moved(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    # What lies in pinned memory is copied while the host goes on; other tensors are copied at once.
    return {
        name: value.to(device, non_blocking=value.is_pinned()) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
