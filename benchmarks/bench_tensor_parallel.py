"""Tensor parallel over two GPUs: the text of one process, and the time of a step.

    python -m benchmarks.bench_tensor_parallel

The demo model in float32 must write what one process writes. Then steps are timed on a model with random weights, of
which every process holds a part, plain and with a tree of 64 nodes, in turn. `--device cpu` runs it over gloo,
to test this file.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch
from transformers.distributed.configuration_utils import DistributedConfig

from benchmarks import bench_step, harness
from medusa_decoding.backbone.tensor_parallel import joined
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checkpoints.accuracies import default_accuracies
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree

PROCESSES = 2
PROMPT = "def main("
NEW = 64
PREFIX = 1024


def check_texts(device: torch.device) -> None:
    """Compare the demo model's texts over all processes with those of one process."""
    ids = pretrained.load_tokenizer(CHECKPOINT / "base")(PROMPT, return_tensors="pt").input_ids.to(device)

    def texts(**placed: Any) -> list[list[int]]:
        with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32, backend="eager", **placed) as model:
            found = []
            for tree in (None, Tree([])):
                output = model.generate(ids, max_new_tokens=NEW, tree=tree)
                assert isinstance(output, MedusaOutput)
                found.append(output.sequences[0].tolist())
            return found

    expected = texts(device_map=device)
    got = texts(distributed_config=DistributedConfig(tp_plan="auto"))
    if got != expected:
        raise SystemExit(f"expected the text of one process, got {got} instead of {expected}")


def time_steps(folder: str, device: torch.device, rounds: int) -> dict[str, float]:
    """Return the median microseconds of a step by size of the tree, as this process sees them."""
    placed = DistributedConfig(tp_plan="auto")
    base = pretrained.load_model(folder, distributed_config=placed, dtype="auto")
    torch.manual_seed(0)  # the same heads and prompt in all processes
    heads = bench_step.random_heads(base, "full bf16")
    ids = torch.randint(base.config.vocab_size, (1, PREFIX if device.type == "cuda" else 16)).to(device)
    seconds: dict[str, list[float]] = {}
    with MedusaModel(base, heads) as model:
        trees = [Tree([]), Tree.optimal(default_accuracies(heads).by_rank, 64)]
        shuffler = random.Random(0)  # the same order in all processes
        for _ in range(rounds):
            for tree in shuffler.sample(trees, len(trees)):
                output = model.generate(ids, max_new_tokens=NEW, tree=tree, eos_token_id=None, metrics=True)
                assert isinstance(output, MedusaOutput)
                assert output.metrics is not None
                # The first step loads kernels.
                seconds.setdefault(f"nodes={tree.num_nodes}", []).extend(output.metrics.step_seconds[1:])
    return {name: statistics.median(times) * 1e6 for name, times in seconds.items()}


def main() -> None:
    """Start two processes; in each of them, check and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=bench_step.MODELS, default="Llama-3-8B")
    parser.add_argument("--rounds", type=int, default=5, help="generations with each tree")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        if args.device == "cuda" and torch.cuda.device_count() < PROCESSES:
            print(f"skipped: needs {PROCESSES} CUDA devices, torch sees {torch.cuda.device_count()}")
            return
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
        with tempfile.TemporaryDirectory() as folder:
            dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
            bench_step.build(args.model, torch.device(args.device), dtype).save_pretrained(folder)
            torch.cuda.empty_cache()
            command = [*start, "-m", "benchmarks.bench_tensor_parallel", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=os.environ | {"MEDUSA_BENCH_MODEL": folder}, check=False).returncode)
    with joined(args.device) as rank:
        device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
        check_texts(device)
        medians = time_steps(os.environ["MEDUSA_BENCH_MODEL"], device, args.rounds)
    if rank == 0:
        for name, median in medians.items():
            print(f"{name}: {median:.0f} us")
        figures = {"model": args.model, "processes": PROCESSES, "texts": "equal to one process", "median_us": medians}
        harness.write_record("tensor_parallel", figures)


if __name__ == "__main__":
    main()
