"""Steps of our trainer against a plain PyTorch loop of the same mathematics: time, peak memory, and the same losses.

    python -m benchmarks.training_step --record
    python -m benchmarks.training_step --size 576 --ways cached --repeats 9
    python -m benchmarks.training_step --dtype bfloat16 --length 2048 --rows 4 --record     # where there is a GPU

The plain loop is what one writes without this package: the transformers model with the same attention on the same
packed rows, the heads' full logits at the positions that each head learns, `F.cross_entropy`, autograd, clipping and
fused AdamW, with the states of a frozen backbone in the device's memory if they are cached. Both begin with the same
weights, and take steps in turn, of which the first two are not timed. No step is a logged one.

The ratio is plain time over ours, the median of the pairs. On a CPU it is the process' own time with one thread, which
other programs on the machine change little; what our trainer does ahead in a thread counts too. On a GPU, which is
used if there is one, it is the time until the device has done its work. The peak is what torch holds at once during a
step in addition to what it holds before.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import markdown, provenance, write_record
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.training.config import Config
from medusa_decoding.training.data.encoding import Example
from medusa_decoding.training.data.packing import PackedDataset, collate, model_inputs
from medusa_decoding.training.data.targets import IGNORE
from medusa_decoding.training.loop.backbone import DTYPES, TrainingBackbone
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.schedules import learning_rates
from medusa_decoding.training.loop.states import StateCache
from medusa_decoding.training.loop.trainer import Trainer
from medusa_decoding.training.loss.chunked import CHUNK_ELEMENTS

MIB = 2**20
WARM = 2
HEADS = 3


@dataclass(frozen=True)
class Size:
    """A model, and the rows of a step: one micro-batch of `rows` of `length` tokens."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    rows: int


# By hidden size; 576 has the shape of SmolLM2-135M, with an lm_head of its own, and 4096 is four layers of Llama-2-7B.
SIZES = {
    "256": Size(256, 704, 6, 4, 4096, 256, 4),
    "576": Size(576, 1536, 30, 9, 49152, 256, 2),
    "1024": Size(1024, 2816, 8, 16, 32000, 256, 2),
    "4096": Size(4096, 11008, 4, 32, 32000, 256, 2),
}
WAYS = ("frozen", "cached", "lora")
CASES = [(size, way) for size in SIZES for way in ("frozen", "cached")] + [("256", "lora"), ("4096", "lora")]


def main() -> None:
    """Measure the cases, print a table, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in SIZES if name != "4096" or torch.cuda.is_available()]
    parser.add_argument("--size", choices=SIZES, action="append", help=f"of these models only (default: {usual})")
    parser.add_argument("--length", type=int, help="tokens of a row (default: the size's own)")
    parser.add_argument("--rows", type=int, help="rows of a step (default: the size's own)")
    parser.add_argument("--ways", choices=WAYS, action="append", help="the backbone's states in these ways only")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs of steps")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model and of products")
    parser.add_argument("--compile", action="store_true", help="torch.compile the backbone of the plain loop")
    parser.add_argument("--chunk-elements", type=int, help="logits of a chunk (default: the device's own)")
    parser.add_argument("--record", action="store_true", help="append the figures to this machine's file")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on a CPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.chunk_elements:
        CHUNK_ELEMENTS.update(dict.fromkeys(CHUNK_ELEMENTS, args.chunk_elements))
    chosen = [(size, way) for size, way in CASES if size in (args.size or usual) and way in (args.ways or WAYS)]
    shape = {name: value for name in ("length", "rows") if (value := getattr(args, name))}
    cases, settings = [], {"dtype": args.dtype, "threads": args.threads, "num_heads": HEADS, "chunks": CHUNK_ELEMENTS}
    settings |= {"compiled": True} if args.compile else {}
    for name, way in chosen:
        size = dataclasses.replace(SIZES[name], **shape)
        cases.append(measure(name, size, way, args.dtype, args.repeats, args.compile))
        if args.record:
            write_record("training_step", settings | cases[-1])
    names = ("size", "way", "ours_s", "plain_s", "ratio", "ours_mib", "plain_mib", "loss_difference")
    print(provenance())
    print(markdown([names, *[[f"{c[n]:.3g}" if isinstance(c[n], float) else c[n] for n in names] for c in cases]]))


def measure(name: str, size: Size, way: str, dtype: str, repeats: int, compiled: bool) -> dict[str, Any]:
    """Return the figures of one size in one way; `compiled` says whether the plain loop's backbone is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = prepare(size, way, dtype, Path(folder), device, WARM + repeats + 1, compiled)
        for _ in range(WARM):
            losses = [(ours(), plain())]
        seconds: list[tuple[float, float]] = []
        for number in range(repeats):
            pair = [0.0, 0.0]
            found = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                start = _now(device)
                found[which] = (ours, plain)[which]()
                pair[which] = _now(device) - start
            seconds.append((pair[0], pair[1]))
            losses.append((found[0], found[1]))
        peaks = [_peak(step, device) for step in (ours, plain)]
    return {
        "size": name,
        "way": way,
        **dataclasses.asdict(size),
        "ours_s": statistics.median(one for one, _ in seconds),
        "plain_s": statistics.median(other for _, other in seconds),
        "ratio": statistics.median(other / one for one, other in seconds),
        "ratios": [round(other / one, 4) for one, other in seconds],
        "ours_mib": peaks[0] / MIB,
        "plain_mib": peaks[1] / MIB,
        "loss_difference": max(abs(one - other) / other for one, other in losses),
    }


def prepare(
    size: Size, way: str, dtype: str, folder: Path, device: torch.device, steps: int, compiled: bool
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return our step and the plain one, which return their losses; both begin with the same weights and rows."""
    torch.manual_seed(0)
    shapes = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.inner,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, max_position_embeddings=2048,
        tie_word_embeddings=False,
    )  # fmt: skip
    with device:
        LlamaForCausalLM(shapes).to(DTYPES[dtype]).save_pretrained(folder / "model")
    config = Config.of(
        {
            "method": "medusa-2" if way == "lora" else "medusa-1",
            "model": {"name": str(folder / "model"), "dtype": dtype},
            "data": {"train": [{"path": "unread"}], "length": size.length},
            "heads": {"num_heads": HEADS},
            "lora": {"dropout": 0.0} if way == "lora" else {},
            "optimisation": {
                "optimizer": "adamw", "batch_size": size.rows, "micro_batch_size": size.rows, "warmup_steps": 1,
                "heads_first_epochs": 0.0,
            },
            "output": {"folder": str(folder / "out"), "tensorboard": False},
        }
    )  # fmt: skip
    rows = PackedDataset(_examples(size, steps), size.length, 0)
    one = Processes(0, 1, device, False)
    models = []
    for _ in range(2):
        torch.manual_seed(1)  # of LoRA
        models.append(TrainingBackbone.load(config, device))
    heads = MedusaHeads(size.hidden, size.vocabulary, HEADS, dtype=torch.float32, device=device)
    with torch.no_grad():
        heads.get_parameter("w2").copy_(models[0].causal.lm_head.weight.detach().expand(HEADS, -1, -1))
    states, kept = None, None
    if way == "cached":
        shape = (len(rows), size.length, size.hidden)
        states = StateCache(folder, "key", shape, DTYPES[dtype], one)
        with torch.no_grad():
            for number in range(len(rows)):
                batch = {key: value.to(device) for key, value in collate([rows[number]]).items()}
                states.put([number], models[0].hidden(batch))
        states.flush()
        kept = states.get(range(len(rows)))
        kept = None if kept is None else kept.to(device)
    plain = Plain(models[1], heads, rows, config, kept)
    if compiled:
        models[1].decoder.compile(dynamic=False)
    trainer = Trainer(config, models[0], heads, rows, None, one, states)
    stage = trainer.stages[0]

    def ours() -> float:
        trainer._step(stage, logged=False)
        trainer.at.step += 1
        return trainer._latest.tolist()[1]

    def theirs() -> float:
        return plain.step(trainer._rows_of_step(plain.steps), trainer.stages[0].steps)

    return ours, theirs


def _examples(size: Size, steps: int) -> list[Example]:
    """Two conversations fill a row; of each the first quarter is a prompt."""
    found, draw = [], np.random.default_rng(0)
    for _ in range(size.rows * steps):
        for length in (size.length * 5 // 8, size.length - size.length * 5 // 8):
            ids = draw.integers(1, size.vocabulary, length, dtype=np.int32)
            found.append(Example.from_spans(ids, [(length // 4, length)], "drawn"))
    return found


class Plain:
    """The plain loop."""

    def __init__(
        self, model: TrainingBackbone, heads: MedusaHeads, rows: PackedDataset, config: Config, states: Tensor | None
    ) -> None:
        self.model, self.rows, self.config, self.states, self.steps = model, rows, config, states, 0
        self.device = heads.w1.device
        w2 = heads.get_parameter("w2")
        self.blocks = nn.ParameterList(w.detach().clone() for w in (heads.w1[:, 0], heads.get_parameter("b1")[:, 0]))
        self.projections = nn.ParameterList(w.detach().clone() for w in w2)
        rates = config.optimisation
        groups = [{"params": [*self.blocks, *self.projections], "lr": rates.learning_rate * rates.heads_factor}]
        if config.trains_backbone:
            groups.append({"params": list(model.trained().values()), "lr": rates.learning_rate})
        self.weights = [weight for group in groups for weight in group["params"]]
        options: dict[str, Any] = {"betas": (rates.beta_1, rates.beta_2), "eps": rates.epsilon, "weight_decay": 0.0}
        self.optimiser = torch.optim.AdamW(groups, fused=True, **options)
        self.schedule: Any = None

    def step(self, numbers: list[int], total: int) -> float:
        """Take a step on these rows; return its loss."""
        if self.schedule is None:
            self.schedule = learning_rates(self.optimiser, 1, total)
        self.steps += 1
        batch = {name: tensor.to(self.device) for name, tensor in collate([self.rows[n] for n in numbers]).items()}
        joint = self.config.trains_backbone
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.model.dtype == "bfloat16"):
            if self.states is not None:
                hidden = self.states[numbers]
            else:
                with torch.set_grad_enabled(joint):
                    hidden = self.model.decoder(**model_inputs(batch)).last_hidden_state
            loss = self.loss(hidden.flatten(0, 1), batch["labels"].flatten(), joint)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, self.config.optimisation.max_gradient_norm or float("inf"))
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad(set_to_none=True)
        return float(loss.detach())

    def loss(self, hidden: Tensor, labels: Tensor, joint: bool) -> Tensor:
        """Return the loss of equation 1 or 2. The first label of each conversation is IGNORE, as is its prompt."""
        total = hidden.new_zeros((), dtype=torch.float32)
        after = F.pad(labels, (0, HEADS + 1), value=IGNORE)
        learnt = after[1 : 1 + len(labels)] != IGNORE  # heads draft after a token that is learnt too
        for head, projection in enumerate(self.projections):
            target = after[head + 2 : head + 2 + len(labels)]
            for between in range(2, head + 2):  # nor across the end of a conversation
                target = target.where(after[between : between + len(labels)] != IGNORE, IGNORE)
            places = (learnt & (target != IGNORE)).nonzero().squeeze(1)
            x = hidden[places].to(projection.dtype)
            x = x + F.silu(F.linear(x, self.blocks[0][head], self.blocks[1][head]))
            logits = F.linear(x, projection).float()
            total = total + 0.8 ** (head + 1) * F.cross_entropy(logits, target[places])
        if not joint:
            return total
        places = learnt.nonzero().squeeze(1)
        own = F.cross_entropy(self.model.lm_head(hidden[places]).float(), after[1:][places])
        return own + (self.config.loss.lambda_0 or 0.0) * total


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _peak(step: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    found = trace.profiler.kineto_results.events()
    events = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in events))


if __name__ == "__main__":
    main()
