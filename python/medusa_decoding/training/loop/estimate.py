"""Estimate a run before it starts: its memory on the device, and its time.

Shapes come from the model's config alone, so nothing is loaded. Time is measured on a micro-batch and an update if the
model is small enough to load for that, else it follows from the number of operations.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checkpoints.exporting import readers
from medusa_decoding.decode.runtime.memory import available, size
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.training.config import Config
from medusa_decoding.training.distill.record_file import states_file
from medusa_decoding.training.loop import machines
from medusa_decoding.training.loop.backbone import DTYPES, NAME, TrainingBackbone
from medusa_decoding.training.loop.heads import make_heads, new_heads
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.rows import Rows
from medusa_decoding.training.loop.schedules import stages
from medusa_decoding.training.loop.trainer import Trainer
from medusa_decoding.training.loss.chunked import CHUNK_ELEMENTS

SMALL = 2**30
"""Bytes of weights up to which a model is loaded to time it."""
SLOW = 30.0
"""Seconds that a micro-batch may take by its operations to be timed."""
REACHED = 0.5
"""Share of a large product's rate that a step is assumed to reach when it is not timed."""
REPEATS, BUDGET = 3, 10.0
"""Timings of a micro-batch, of which the fastest counts, and seconds after which none is begun."""
BUSY = 0.9
"""Share of the time that this thread has a core, below which the machine counts as busy."""
_BITS = {"4bit": 4.5, "8bit": 8.0}  # per quantised weight, with the scale of each block of 64


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model and of the heads to train on it; counts are of weights.

    Attributes:
        linear: in the linear layers of the decoder, which can be quantised.
        other: all others, with embeddings and lm_head.
        adapter: of the LoRA adapter.
        heads, own: of the heads, and of their own projections among these.
        stored: bytes of weights that are quantised on disk already, or None.
        kv: width of all KV heads.
    """

    layers: int
    hidden: int
    inner: int
    attention: int
    vocabulary: int
    linear: int
    other: int
    adapter: int
    heads: int
    own: int
    stored: int | None = None
    kv: int = 0


def meta_heads(config: Config, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Return heads as configured on the meta device: shapes alone. Draws no random numbers from torch's generator."""
    trimmed = config.heads.token_map_size
    token_map = None if trimmed is None else torch.arange(trimmed)
    with torch.random.fork_rng(devices=[]):
        return new_heads(config.heads, hidden_size, vocab_size, token_map, torch.float32, "meta")


def shapes_of(config: Config) -> Shapes:
    """Return the sizes that a run's memory and time depend on."""
    settings = pretrained.load_config(config.model.name, config.model.revision, argument=NAME)
    quantised = getattr(settings, "quantization_config", None) is not None
    if quantised:
        del settings.quantization_config  # shapes are those of the layers before they are packed
    model: Any = pretrained.build_model(settings, torch.device("meta"), argument=NAME)
    linears = [layer for layer in model.get_decoder().modules() if isinstance(layer, nn.Linear)]
    adapted = [*linears, *([model.get_output_embeddings()] if config.lora.lm_head else [])]
    linear = sum(layer.weight.numel() for layer in linears)
    heads = meta_heads(config, int(settings.hidden_size), int(settings.vocab_size))
    queries, head = int(settings.num_attention_heads), int(getattr(settings, "head_dim", None) or 0)
    attention = queries * head or int(settings.hidden_size)
    return Shapes(
        layers=int(settings.num_hidden_layers),
        hidden=int(settings.hidden_size),
        inner=int(getattr(settings, "intermediate_size", 4 * settings.hidden_size)),
        attention=attention,
        vocabulary=int(settings.vocab_size),
        linear=linear,
        other=sum(weight.numel() for weight in model.parameters()) - linear,
        adapter=sum(config.lora.rank * (layer.in_features + layer.out_features) for layer in adapted)
        if config.lora.enabled
        else 0,
        heads=sum(weight.numel() for weight in heads.parameters()),
        own=0 if heads.w2 is None else heads.w2.numel(),
        stored=(linear * 9 // 16) if quantised else None,
        kv=attention // queries * int(getattr(settings, "num_key_value_heads", None) or queries),
    )


def memory(config: Config, shapes: Shapes, shards: int = 1) -> dict[str, int]:
    """Return the bytes that a process takes on its device, by what they are for (estimated; weights in `shards` parts).

    Left out: the program itself and its libraries (about 1 GB on the host; about 0.5 GB of a GPU), fragmentation, and
    on the host the best heads so far (`Trainer.best`) and what a checkpoint is written from.
    """
    rates, e = config.optimisation, DTYPES.get(config.model.dtype, torch.bfloat16).itemsize
    whole = config.trains_backbone and not config.lora.enabled
    linear, other = shapes.linear, shapes.other
    if shapes.stored is not None:
        backbone = shapes.stored + other * e
    elif whole:
        backbone = 4 * (linear + other)
    else:
        bits = _BITS.get(config.model.quantization, 8.0 * e)
        backbone = int(linear * bits / 8) + other * e
    own = shapes.heads + shapes.adapter
    trained = own + (linear + other if whole else 0)
    positions = rates.micro_batch_size * config.data.length
    # Numbers per position and layer, of width hidden and inner, with the adapter's inputs and their dropout if trained.
    kept = (20, 9) if config.trains_backbone else (6, 3)
    layer = positions * e * (kept[0] * shapes.hidden + kept[1] * shapes.inner + shapes.attention)
    if not config.trains_backbone:
        activations = layer
    elif config.model.gradient_checkpointing:
        activations = layer + shapes.layers * positions * shapes.hidden * e
    else:
        activations = layer * shapes.layers
    if config.data.pack:  # the mask of rows with several texts
        activations += positions * config.data.length
    candidates = config.heads.token_map_size or shapes.vocabulary
    chunk = min(positions, max(1, CHUNK_ELEMENTS["cuda"] // candidates))
    heads, blocks, rooted = config.heads.num_heads, config.heads.num_layers, config.heads.root_rank > 0
    features = len(config.heads.feature_layers)
    mapped = 3 * (1 + features) if features else 0
    # Of own projections, 2 bytes for chunks that wait for their product, 4 for one head's operand.
    operands = 0 if config.heads.shared_projection else 6 * candidates * shapes.hidden
    if config.trains_backbone:
        operands += 6 * chunk * shapes.vocabulary
    if whole:  # operands in 16 bits, until the step ends, and lm_head's gradient
        operands += 2 * linear + 4 * shapes.vocabulary * shapes.hidden
    if config.loss.targets != "hard":  # the teacher's logits, two softmaxes, and the teacher's operand
        operands += (14 * chunk + 2 * shapes.hidden) * candidates
    again = 4 * shapes.own if rates.batch_size > rates.micro_batch_size else 0
    held = {
        "backbone": backbone,
        "trained weights": 4 * own,
        "gradients": 4 * trained + again,
        "optimiser": (2 if rates.optimizer == "adamw_8bit" else 8) * trained,
    }
    if shards > 1:
        held = {name: count // shards for name, count in held.items()}
        # At a time, two layers and all weights outside the layers.
        held["gathered weights"] = (4 if whole else e) * (other + 2 * linear // shapes.layers) + 4 * own
    return held | {
        "activations": activations,
        "heads' states": 4 * positions * shapes.hidden * (heads * (3 * blocks + 3 + rooted) + mapped),
        "logits": 6 * chunk * candidates + operands,  # with the gradient in 16 bits
    }


def operations(config: Config, shapes: Shapes, trains_backbone: bool | None = None) -> tuple[float, float]:
    """Return the operations per position of the backbone's pass, and of heads and losses with their gradients.

    A multiply-add counts as two. `trains_backbone` says it for a stage; None for the last one.
    """
    trains_backbone = config.trains_backbone if trains_backbone is None else trains_backbone
    # Half of attention is masked.
    forward = 2.0 * shapes.linear + 2.0 * shapes.layers * config.data.length * shapes.attention
    passes = 1.0
    if trains_backbone:
        passes = 2.0 if config.lora.enabled else 3.0  # the gradient of activations, and of all weights
        passes += config.model.gradient_checkpointing + (config.method == "self-distillation")
    heads, candidates = config.heads.num_heads, config.heads.token_map_size or shapes.vocabulary
    after = 6.0 * heads * config.heads.num_layers * shapes.hidden**2
    # The embedding that a root input reads has no gradient, and neither do the states of feature layers.
    after += (6.0 * heads + 4.0) * config.heads.root_rank * shapes.hidden
    features = len(config.heads.feature_layers)
    after += 4.0 * (1 + features) * shapes.hidden**2 if features else 0
    # Logits, the gradients of their states and of own projections, and soft labels' teacher.
    products = (2 if config.heads.shared_projection else 3) + (config.loss.targets != "hard")
    after += 2.0 * heads * candidates * shapes.hidden * products
    if trains_backbone:  # the model's own logits
        after += 6.0 * shapes.vocabulary * shapes.hidden
    return forward * passes, after


@dataclass(frozen=True)
class Pace:
    """How long the parts of a run take on this machine if no other program runs, in seconds.

    Attributes:
        backbone: of the backbone's pass over a micro-batch.
        heads: of the rest of a micro-batch: heads, losses and gradients.
        update: of the optimiser's step.
        how: "measured" on a micro-batch here, or by the number of "operations" (a rough estimate).
        core_share: share of the time that this thread had a core during the timing; 1 on a GPU, where it does not tell.
        first: of the stage before, which trains the heads alone, if there are two.
    """

    backbone: float
    heads: float
    update: float
    how: Literal["measured", "operations"]
    core_share: float = 1.0
    first: Pace | None = None

    def seconds(self, config: Config, rows: int, held_out: int, processes: int = 1) -> float:
        """Return the time of a run's steps and measurements, without loading, checkpoints and writing.

        Processes divide the micro-batches of a step; what they send each other is not counted.
        """
        rates, total = config.optimisation, 0.0
        micro = rates.micro_batch_size * processes
        for stage in stages(config, rows):
            pace = self if self.first is None or stage.trains_backbone else self.first
            of_epoch = math.ceil(rows / rates.batch_size)  # of its steps the last one may have fewer rows
            epochs = stage.steps / of_epoch
            batches = rows / micro
            if processes > 1:
                full, rest = divmod(rows, rates.batch_size)
                batches = full * math.ceil(rates.batch_size / micro) + math.ceil(rest / micro)
            passes = stage.steps / of_epoch * batches
            files = (Path(source.path).expanduser() for source in config.data.train)
            saved = all(states_file(file, config.heads.feature_layers).is_file() for file in files)
            read = 1.0 if config.data.cache_hidden is None else 0.0 if saved else min(1.0, epochs) / epochs
            total += passes * (pace.backbone * read + pace.heads) + stage.steps * pace.update
            # Measuring has no gradients, of about two thirds of the work.
            measured = math.ceil(stage.steps / (config.output.evaluate_steps or of_epoch))
            total += measured * held_out / micro * (pace.backbone + pace.heads / 3)
        return total


def pace(config: Config, shapes: Shapes, rows: Rows, tokenizer: Any, processes: Processes) -> Pace:
    """Return how long the parts of a run take, measured if the model is small enough to load for that.

    For one process: several divide the micro-batches among them.
    """
    found = pace_by_operations(config, shapes, processes.device, rows.learnt)
    used, free = sum(memory(config, shapes).values()), available(processes.device)
    fits = free is None or used < free
    if memory(config, shapes)["backbone"] <= SMALL and found.backbone + found.heads <= SLOW and fits:
        found = measure_pace(config, rows, tokenizer, processes.device)
    return found


def pace_by_operations(config: Config, shapes: Shapes, device: torch.device, learnt: float = 1.0) -> Pace:
    """Return a rough estimate: the operations at half the rate that a large product reaches here, measured now.

    `learnt` is the share of positions that heads learn from.
    """
    share, rate = _core_share(device), product_rate(device, DTYPES.get(config.model.dtype, torch.bfloat16))
    return dataclasses.replace(pace_at(rate, config, shapes, learnt), core_share=share())


def pace_at(rate: float, config: Config, shapes: Shapes, learnt: float = 1.0) -> Pace:
    """Return what the operations take at `REACHED` of a device's `rate` (operations per second)."""
    positions = config.optimisation.micro_batch_size * config.data.length
    found, reached = None, REACHED * rate
    for trains_backbone in (False, True) if config.trains_backbone else (False,):
        backbone, heads = operations(config, shapes, trains_backbone)
        parts = positions * backbone / reached, positions * learnt * heads / reached
        found = Pace(*parts, 0.0, "operations", first=found)
    assert found is not None
    return found


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second that a device can do: as published for a GPU, else of a product measured now."""
    gpu = None
    if device.type == "cuda" and dtype == torch.bfloat16:
        gpu = machines.find(torch.cuda.get_device_name(device))
    return product_rate(device, dtype) if gpu is None else gpu.rate


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product."""
    side = 8192 if device.type == "cuda" else 1024
    left = torch.ones(side, side, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):
        started = _now(device)
        torch.mm(left, left)
        best = min(best, _now(device) - started)
    return 2 * side**3 / best


def measure_pace(config: Config, rows: Rows, tokenizer: Any, device: torch.device) -> Pace:
    """Load the model, and time the parts of a step on micro-batches after a first one; the fastest counts."""
    alone = Processes(0, 1, device, False)
    before = torch.random.get_rng_state()
    backbone = TrainingBackbone.load(config, device)
    heads = make_heads(config, backbone, tokenizer, rows.frequencies)
    data = dataclasses.replace(config.data, cache_hidden=None)
    trainer = Trainer(dataclasses.replace(config, data=data), backbone, heads, rows.train, None, alone)
    found = None
    for stage in range(len(trainer.stages)):
        trainer.time_parts(lambda: _now(device), stage)  # the first pass allocates memory and picks kernels
        share, end = _core_share(device), time.perf_counter() + BUDGET
        timed: list[tuple[float, float, float]] = []
        while not timed or (len(timed) < REPEATS and time.perf_counter() < end):
            timed.append(trainer.time_parts(lambda: _now(device), stage))
        found = Pace(*min(timed, key=sum), "measured", share(), found)
    torch.random.set_rng_state(before)
    assert found is not None
    return found


def _now(device: torch.device) -> float:
    """Return the seconds so far: of this thread's processor time on a CPU, which other programs do not use up.

    PyTorch's thread that calls works along with its others, so on an idle machine these are the seconds that pass.
    """
    if device.type != "cuda":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _core_share(device: torch.device) -> Callable[[], float]:
    """Return a function that returns the share of the time since now in which this thread had a core."""
    cpu, wall = time.thread_time(), time.perf_counter()
    if device.type == "cuda":
        return lambda: 1.0
    return lambda: (time.thread_time() - cpu) / (time.perf_counter() - wall)


def describe_memory(config: Config, shapes: Shapes, device: torch.device | machines.Gpu, shards: int = 1) -> list[str]:
    """Return the memory of a process as lines of text, with what the device has, or a GPU that is not here."""
    parts = memory(config, shapes, shards)
    free: int | None
    if isinstance(device, machines.Gpu):
        free, has = device.memory, f" of the {size(device.memory)} of one {device.name}"
    else:
        free = available(device)
        has = "" if free is None else f" of the {size(free)} that {device_name(device)} has free"
    total = sum(parts.values())
    of_each = f"of each of {shards} processes, " if shards > 1 else ""
    lines = [f"memory ({of_each}estimated, without the program itself): {size(total)}{has}"]
    lines += [f"  {name:16} {size(count):>12}" for name, count in parts.items()]
    if free is not None and total > free:
        lines.append(
            "  that does not fit: lower optimisation.micro_batch_size or data.length, share lm_head "
            "(heads.shared_projection), or quantise the model (model.quantization, on a GPU)"
        )
    return lines


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or "this machine" for its CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"


def describe_time(config: Config, rows: Rows, pace: Pace, processes: int = 1, gpu: machines.Gpu | None = None) -> str:
    """Return the time of a run on an idle machine as a line of text, with a second one if it is busy now.

    With `gpu` it is on GPUs that are not here, one process on each.
    """
    held_out = 0 if rows.held_out is None else len(rows.held_out)
    seconds = pace.seconds(config, len(rows.train), held_out, processes)
    if gpu is not None:
        where, left = f"{processes} x {gpu.name}", "loading, writing and what GPUs send each other"
        how = f"predicted: its operations at {REACHED:.0%} of the published peak"
    else:
        where, left = "an idle machine", "loading and writing"
        how = f"a rough estimate: its operations at {REACHED:.0%} of the rate of a large product here"
        if pace.how == "measured":
            how = "from a micro-batch measured here"
    line = f"time: about {duration(seconds)} on {where} ({how}; without {left})"
    if pace.core_share >= BUSY:
        return line
    return (
        f"{line}\n  the machine is busy: other programs had the core {1 - pace.core_share:.0%} of the time; "
        f"next to them a run takes about {duration(seconds / pace.core_share)}"
    )


def describe_states(config: Config, shapes: Shapes, rows: Rows, pace: Pace) -> str:
    """Return the size of the states that `data.cache_hidden` keeps, and the time of making them, as a line of text."""
    count, micro = len(rows.train), config.optimisation.micro_batch_size
    numbers = (1 + len(config.heads.feature_layers)) * shapes.hidden
    each = config.data.length * numbers * DTYPES.get(config.model.dtype, torch.bfloat16).itemsize
    return (
        f"hidden states: {size(count * each)} in {config.data.cache_hidden}, made in the first epoch (or copied from "
        "those saved with the answers) in about "
        f"{duration(count / micro * pace.backbone)} of it (divided by the number of processes)"
    )


def describe_readers(config: Config, shapes: Shapes) -> list[str]:
    """Return which programs will read the trained heads, a line each."""
    heads = meta_heads(config, shapes.hidden, shapes.vocabulary)
    lines = ["who can read the heads (after `medusa export`, docs/export.md):", "  this package: yes, as they are"]
    for reader in readers(heads):
        answer = f"no: {reader.reason}" if reader.options is None else f"yes, medusa export {reader.options}"
        lines.append(f"  {reader.program}: {answer}")
    return lines


def duration(seconds: float) -> str:
    """Return a time in words: "3 h 20 min", "4 min", "30 s"."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"
