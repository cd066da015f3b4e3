"""The training loop: stages of steps, each the gradient of one global batch (Medusa paper, sections 2.2 and B).

The order of rows depends on the seed alone, and every mean is over a whole step's targets: neither the number of
processes nor the size of micro-batches changes the loss. A stopped run resumes with the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from medusa_decoding.files import append_line
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.provenance import fingerprint as weights_fingerprint
from medusa_decoding.training.config import Config
from medusa_decoding.training.data.packing import TEXTS, PackedDataset, Texts, collate
from medusa_decoding.training.data.targets import IGNORE, send
from medusa_decoding.training.loop.accuracy import HeadAccuracy, Measured
from medusa_decoding.training.loop.backbone import TrainingBackbone
from medusa_decoding.training.loop.log import LOG, Watcher, cut_log
from medusa_decoding.training.loop.objective import HIDDEN, Objective, count_targets
from medusa_decoding.training.loop.processes import Processes, whole
from medusa_decoding.training.loop.saving import Checkpoints, read_state
from medusa_decoding.training.loop.schedules import (
    Progress,
    Stage,
    lambda_0,
    learning_rates,
    make_optimiser,
    parameter_groups,
    stages,
)
from medusa_decoding.training.loop.states import StateCache, fingerprint
from medusa_decoding.training.loss.chunked import TOP


@dataclass
class Best:
    """The heads that were best on held-out data so far.

    Attributes:
        step: of the whole run, after which they were measured.
        measured: their figures.
        later: measurements since then, all of them worse.
        weights: whole, on the CPU; only the main process has them.
    """

    step: int
    measured: Measured
    later: int
    weights: dict[str, Tensor]


@dataclass
class Trainer:
    """Trains heads (in float32), and also the backbone's adapter or weights if the method says so.

    Measures on the rows `held_out`, if any. The watchers receive each line of the log in the main process. The meter
    adds the speed to it.
    """

    config: Config
    backbone: TrainingBackbone
    heads: MedusaHeads
    rows: PackedDataset
    held_out: PackedDataset | None
    processes: Processes
    states: StateCache | None = None
    watchers: list[Watcher] = field(default_factory=list)
    meter: Callable[[Progress, bool], dict[str, Any]] = lambda at, trains_backbone: {}

    def __post_init__(self) -> None:
        output = self.config.output
        self.folder = Path(output.folder)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", output.keep_checkpoints)
        self.stages = stages(self.config, len(self.rows))
        self.steps = sum(stage.steps for stage in self.stages)
        self.objective = Objective(self.backbone, self.heads, self.config)
        self.at = Progress()
        self.measured: Measured | None = None
        self.best: Best | None = None
        self._trained_names = list(self.backbone.trained())
        if self.processes.size > 1:
            self._check_same()
        if self.processes.sharded:
            self.processes.shard(self.objective, self.backbone.decoder.layers)
        self.objective.token_map = None if self.heads.token_map is None else self.heads.token_map.cpu()
        self._reader = ThreadPoolExecutor(1, "ahead")
        self._begin_stage(self.stages[0])

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Measured | None:
        """Train until the end of the run; return the figures of the heads that it leaves in `heads`.

        If the backbone is frozen and there is held-out data, they are the best heads, otherwise the last.

        Raises:
            FloatingPointError: the loss is not finite; names the step and the last good checkpoint.
            OSError: a checkpoint could not be written; names the last good one.
        """
        output = self.config.output
        for number in range(self.at.stage, len(self.stages)):
            stage = self.stages[number]
            if number > self.at.stage:
                self.at.stage, self.at.step = number, 0
                self._begin_stage(stage)
            while self.at.step < stage.steps and not self.stopped:
                started = time.monotonic()
                last = self.at.step + 1 == stage.steps
                logged = (self.at.step + 1) % output.log_steps == 0 or last or self.at.step == 0
                line = self._step(stage, logged)
                self.at.step += 1
                self.at.done += 1
                evaluated = self.at.step % (output.evaluate_steps or self._steps_per_epoch) == 0 or last
                saved = self.at.done % output.checkpoint_steps == 0 or last
                if evaluated or saved:
                    self._check_finite(stage)  # waits for the device: that is time of these steps
                self.at.seconds += time.monotonic() - started
                if logged:
                    speed = self.meter(self.at, stage.trains_backbone)
                    self._log(line | {"seconds": round(self.at.seconds, 2)} | speed)
                if self.held_out is not None and evaluated:
                    self._evaluate(stage, self.held_out)
                if saved or self.stopped:
                    self.save()
        if self.best is None:
            return self.measured
        with torch.no_grad():
            for name, weight in self._named().items():
                self.processes.fill(weight, self.best.weights.get(name))
        return self.best.measured

    @property
    def stopped(self) -> bool:
        """Whether the run ends early: `optimisation.patience` measurements since the best were worse."""
        patience = self.config.optimisation.patience
        return patience is not None and self.best is not None and self.best.later >= patience

    def _evaluate(self, stage: Stage, rows: PackedDataset) -> None:
        self.measured = self.measure(rows)
        line = {"stage": stage.name, "step": self.at.done} | self.measured.to_json()
        if not self.config.trains_backbone:  # heads fit the backbone of their own step
            if self.best is None or self.measured.figure >= self.best.measured.figure:
                self.best = Best(self.at.done, self.measured, 0, self.trained())
            else:
                self.best.later += 1
            line["best_step"] = self.best.step
        self._log(line)

    @property
    def _steps_per_epoch(self) -> int:
        return math.ceil(len(self.rows) / self.config.optimisation.batch_size)

    def _begin_stage(self, stage: Stage) -> None:
        self.objective.joint = stage.trains_backbone
        trained = self._trained_weights
        if not self.processes.sharded:
            # DDP waits for the gradient of every weight that requires one. Sharded weights keep their setting.
            for weight in trained.values():
                weight.requires_grad_(stage.trains_backbone)
        self.wrapped = self.processes.replicated(self.objective)
        groups = parameter_groups(self.heads, trained.items() if stage.trains_backbone else (), config=self.config)
        self.optimiser = make_optimiser(groups, self.config)
        schedule = self.config.optimisation.schedule
        self.schedule = learning_rates(self.optimiser, stage.warmup_steps, stage.steps, schedule)
        self._latest = torch.zeros(3, dtype=torch.float64, device=self.processes.device)  # step, loss, gradient norm
        self._ahead: tuple[tuple[int, int], Future[tuple[dict[str, Any], Tensor | None]]] | None = None
        self.clipped = [weight for group in groups for weight in group["params"]]

    @property
    def _trained_weights(self) -> dict[str, nn.Parameter]:
        # Looked up by name: sharding replaces the parameters.
        weights = dict(self.backbone.module.named_parameters())
        return {name: weights[name] for name in self._trained_names}

    def _log(self, line: dict[str, Any]) -> None:
        if not self.processes.main:
            return
        try:
            append_line(self.folder / LOG, line)
        except OSError as error:
            raise OSError(
                f"{self.folder / LOG}: could not be written ({error}); {self.checkpoints.last_good()}"
            ) from error
        for watcher in self.watchers:
            watcher(line)

    # -- a step ----------------------------------------------------------------------------------------------------

    def _step(self, stage: Stage, logged: bool = True) -> dict[str, Any]:
        """Make a step; return its line of the log if it is `logged`: accuracies cost time, and a GPU is waited for."""
        config, processes = self.config, self.processes
        # Dropout depends on the seed, the step and the process alone, so a resumed run draws the same.
        torch.manual_seed((config.optimisation.seed * 7919 + self.at.done) * 104729 + processes.rank)
        numbers = self._rows_of_step(self.at.step)
        parts = self._micro_batches(numbers)
        weight = config.loss.lambda_0
        if weight is not None and stage.trains_backbone:
            weight = lambda_0(self.at.step, stage.steps, weight, config.loss.lambda_0_schedule)
        self.objective.train()
        sums: dict[str, Tensor] = {}
        normalisers = torch.empty(0)
        for place, part in enumerate(parts):
            more = place + 1 < len(parts)
            following = (self.at.step, place + 1) if more else (self.at.step + 1, 0)
            begun, key = self._ahead, (self.at.step, place)
            # Read while the previous micro-batch was computed, as the next one will be.
            reading = begun[1] if begun is not None and begun[0] == key else self._reader.submit(self._read, key)
            is_there = following[0] < stage.steps
            self._ahead = (following, self._reader.submit(self._read, following)) if is_there else None
            batch, counts = reading.result()
            if counts is not None:
                normalisers = send(counts, processes.device)
            batch = self._complete(part, batch)
            with processes.gradients_kept(self.wrapped, more), self._precision():
                found = self.wrapped(batch, normalisers, 1.0 if weight is None else weight, int(logged))
                # The wrapper averages gradients over the processes; the step's gradient is their sum.
                (found["loss"] * processes.size).backward()
            _accumulate(sums, found)
        sums = self._over_processes(sums)
        limit = config.optimisation.max_gradient_norm
        norm = whole(nn.utils.clip_grad_norm_(self.clipped, math.inf if limit is None else limit)).detach()
        step = torch.full_like(sums["loss"], self.at.step + 1)
        latest = torch.stack([step, sums["loss"], norm.to(step)])
        # Weights may be lost from the first step that is not finite: it is kept, and read before anything is saved.
        self._latest = latest.where(self._latest.isfinite().all(), self._latest)
        if logged:
            self._check_finite(stage)
        rates = {group["name"].partition(",")[0]: group["lr"] for group in self.optimiser.param_groups}
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.at.tokens += len(numbers) * config.data.length
        if not logged:
            return {}
        line = {"stage": stage.name, "step": self.at.done + 1, "of": self.steps, "loss": float(sums["loss"])}
        line |= _means(sums)
        if weight is not None and stage.trains_backbone:
            line["lambda_0"] = weight
        return line | {"rates": rates, "gradient_norm": float(norm), "tokens": self.at.tokens}

    def time_parts(self, now: Callable[[], float], stage: int) -> tuple[float, float, float]:
        """Return the seconds of the backbone's pass over a micro-batch, of the rest of it, and of an update.

        They are those of a stage, by its number. `now` reads a clock once the device has done its work. The weights are
        trained by this: discard the trainer.
        """
        if self.at.stage != stage:
            self.at.stage = stage
            self._begin_stage(self.stages[stage])
        numbers = self._rows_of_step(0)[: self.config.optimisation.micro_batch_size]
        counts = count_targets(
            collate([self.rows[number] for number in numbers]), self.heads.num_heads, self.objective.token_map
        )
        self.objective.train()
        start = now()
        batch = _moved(self._on_host(numbers, self.rows), self.processes.device)
        with torch.no_grad(), self._precision():
            self.backbone.hidden(batch)
        middle = now()
        with self._precision():
            self.wrapped(batch, counts.to(self.processes.device), 1.0, 0)["loss"].backward()
        end = now()
        nn.utils.clip_grad_norm_(self.clipped, math.inf)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return middle - start, max(0.0, end - middle - (middle - start)), now() - end

    def _rows_of_step(self, step: int) -> list[int]:
        """Return the rows of a stage's step: each epoch has its own order, which the seed decides."""
        rates = self.config.optimisation
        epoch, place = divmod(step, self._steps_per_epoch)
        generator = torch.Generator().manual_seed((rates.seed * 7919 + self.at.stage) * 104729 + epoch)
        order = torch.randperm(len(self.rows), generator=generator)
        return [int(row) for row in order[place * rates.batch_size : (place + 1) * rates.batch_size]]

    def _micro_batches(self, numbers: list[int]) -> list[list[int]]:
        """Divide rows among processes and micro-batches; each process gets equally many, some of them empty."""
        size, micro = self.processes.size, self.config.optimisation.micro_batch_size
        count = math.ceil(len(numbers) / (size * micro))
        mine = numbers[self.processes.rank :: size]
        return [mine[place * micro : (place + 1) * micro] for place in range(count)]

    def _read(self, key: tuple[int, int]) -> tuple[dict[str, Any], Tensor | None]:
        """Read a step's micro-batch on the CPU, and count the targets of the whole step with its first one."""
        step, place = key
        numbers = self._rows_of_step(step)
        counts = None
        if place == 0:  # every process reads all rows for it
            every = collate([self.rows[number] for number in numbers])
            counts = count_targets(every, self.heads.num_heads, self.objective.token_map)
        mine = self._micro_batches(numbers)[place]
        batch = self._on_host(mine, self.rows)
        states = self.states.get(mine, self.processes.device.type == "cuda") if self.states and mine else None
        return (batch if states is None else batch | {HIDDEN: states}), counts

    def _on_host(self, numbers: list[int], rows: PackedDataset) -> dict[str, Any]:
        """Return rows on the CPU; if there are none, one row without labels, which keeps processes in sync."""
        chosen = [rows[number] for number in numbers]
        if not chosen:
            chosen = [rows[0] | {"labels": torch.full_like(rows[0]["labels"], IGNORE)}]
        batch = collate(chosen, self.config.model.attention)
        return batch | {TEXTS: Texts.of(batch)}

    def _complete(self, numbers: list[int], batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch on the device, with the states of its rows if they are kept."""
        moved = _moved(batch, self.processes.device)
        if self.states is not None and numbers and HIDDEN not in batch:
            states = self.states.get(numbers)  # made since the batch was read?
            if states is None:
                with torch.no_grad(), self._precision():
                    states = self.backbone.hidden(moved).to(self.states.dtype)  # in the type that later epochs read
                self.states.put(numbers, states)
            moved[HIDDEN] = states.to(self.processes.device)
        return moved

    def _check_finite(self, stage: Stage) -> None:
        """Raise for the first step whose loss or gradient was not finite; waits for the device."""
        step, *values = self._latest.tolist()
        for name, value in zip(("loss", "gradient norm"), values, strict=True):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"{name}: expected a finite number, got {value} at step {step:.0f} of stage {stage.name}; "
                    f"{self.checkpoints.last_good()}"
                )

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Multiply in bfloat16 if the model is of that type; trained weights stay in float32."""
        enabled = self.config.model.dtype == "bfloat16"
        return torch.autocast(self.processes.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _over_processes(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = sorted(sums)
        flat = self.processes.total(torch.cat([sums[name].flatten() for name in names]))
        parts = flat.split([sums[name].numel() for name in names])
        return {name: part.view(sums[name].shape) for name, part in zip(names, parts, strict=True)}

    # -- held-out data ---------------------------------------------------------------------------------------------

    def measure(self, rows: PackedDataset) -> Measured:
        """Return the accuracy of heads and model on rows. Draws no random numbers."""
        sums: dict[str, Tensor] = {}
        self.objective.eval()
        with torch.no_grad(), self._precision():
            for numbers in self._micro_batches(list(range(len(rows)))):
                batch = _moved(self._on_host(numbers, rows), self.processes.device)
                _accumulate(sums, self.objective(batch, top=TOP))
        if isinstance(self.objective, FSDPModule):  # no backward pass divides the gathered weights again
            self.objective.reshard()
        sums = self._over_processes(sums)
        hits, counts, outside = (sums[f"head_{name}"].round().long() for name in ("hits", "counts", "outside"))
        accuracy = HeadAccuracy.empty(self.heads.num_heads)
        accuracy.add(hits, counts + outside)
        targets = max(float(sums["model_count"]), 1.0)
        losses = tuple((sums["head_sums"] / counts.clamp(min=1)).tolist())
        return Measured(accuracy, float(sums["model_sum"]) / targets, float(sums["model_hits"]) / targets, losses)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _data(self) -> str:
        return fingerprint(self.rows, {}, labels=True)

    def _check_same(self) -> None:
        """Refuse processes that have other data, model or heads; divided weights are the main process's."""
        held_out = None if self.held_out is None else fingerprint(self.held_out, {}, labels=True)
        same: dict[str, Any] = {"data": (self._data, held_out)}
        if not self.processes.sharded:
            same |= {"model.name": weights_fingerprint(self.backbone.causal)}
            same |= {"heads.initial": weights_fingerprint(self.heads)}
        self.processes.same(same)

    def _named(self) -> dict[str, nn.Parameter]:
        named = {f"heads.{name}": weight for name, weight in self.heads.named_parameters()}
        return named | {f"model.{name}": weight for name, weight in self._trained_weights.items()}

    def trained(self) -> dict[str, Tensor]:
        """Return whole copies of the trained weights on the CPU, by their names in heads and model.

        All processes must call it. Only the main one gets the weights, the others an empty dictionary.
        """
        found = {}
        for name, weight in self._named().items():
            values = whole(weight.detach())
            if self.processes.main:
                found[name] = values.to("cpu", copy=True)
        return found

    def save(self) -> None:
        """Write a checkpoint."""
        if self.states is not None:
            self.processes.each(self.states.flush)
        best = self.best
        state = dataclasses.asdict(self.at) | {
            "rows": len(self.rows),
            "data": self._data,
            "config": self.config.to_yaml(),
            "measured": None if self.measured is None else self.measured.to_json(),
            "best": None
            if best is None
            else {"step": best.step, "measured": best.measured.to_json(), "later": best.later},
        }
        weights = self.trained()
        optimiser = {
            "optimiser": self.processes.optimiser_state(self.optimiser),
            "schedule": self.schedule.state_dict(),
        }
        best_weights = None if best is None or best.step == self.at.done else best.weights

        def write() -> None:
            if self.processes.main:
                self.checkpoints.save(self.at.done, state, weights, optimiser, best_weights)

        self.processes.each(write)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of any number of processes; the main process reads it.

        Raises:
            ValueError: a damaged checkpoint, or one of other rows; a damaged log.
        """
        weights: Mapping[str, Tensor] = {}
        best: Mapping[str, Tensor] = {}
        saved: dict[str, Any] = {}

        def read() -> dict[str, Any]:
            nonlocal weights, best, saved
            state = read_state(path)
            if state["rows"] != len(self.rows):
                raise ValueError(f"{path}: expected a run of {len(self.rows)} rows, got one of {state['rows']}")
            if state["data"] != self._data:
                raise ValueError(f"{path}: expected a run on these very rows, got one on others: the data has changed")
            weights, saved, best = self.checkpoints.load(path)
            cut_log(self.folder, state["done"])
            return state | {"schedule": saved["schedule"]}

        state = self.processes.by_main(read)
        self.at = Progress(**{name: state[name] for name in vars(self.at)})
        self.measured = None if state["measured"] is None else Measured.from_json(state["measured"])
        if (kept := state.get("best")) is not None:  # older checkpoints have none
            self.best = Best(kept["step"], Measured.from_json(kept["measured"]), kept["later"], weights=dict(best))
        if self.at.stage > 0:
            self._begin_stage(self.stages[self.at.stage])
        with torch.no_grad():
            for name, weight in self._named().items():
                self.processes.fill(weight, weights.get(name))
        self.processes.load_optimiser_state(self.optimiser, saved.get("optimiser"))
        self.schedule.load_state_dict(state["schedule"])


def _accumulate(sums: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, value in found.items():
        value = value.detach().double()
        sums[name] = sums[name] + value if name in sums else value


def _means(sums: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return losses and accuracies per target, from sums over a step."""
    counts = sums["head_counts"].clamp(min=1)
    targets = (sums["head_counts"] + sums["head_outside"]).clamp(min=1)
    found: dict[str, Any] = {"head_losses": (sums["head_sums"] / counts).tolist()}
    if sums["head_hits"].numel():
        found["head_top1"] = (sums["head_hits"][:, 0] / targets).tolist()
    if "model_sum" in sums:
        found["model_loss"] = float(sums["model_sum"] / sums["model_count"].clamp(min=1))
    if "model_hits" in sums:
        found["model_top1"] = float(sums["model_hits"] / sums["model_count"].clamp(min=1))
    return found


def _moved(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: send(value, device) if isinstance(value, Tensor) else value for name, value in batch.items()}
