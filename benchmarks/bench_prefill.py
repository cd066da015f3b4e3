"""Prefill: our whole call for one new token against transformers' forward pass over the same prompt.

    python -m benchmarks.bench_prefill
    python -m benchmarks.bench_prefill --device cuda --budget 480

Weights are random. Ours is `generate` for one token: checks, the cache, the prompt, and the first token. transformers'
is `model(input_ids, use_cache=True, logits_to_keep=1)` and the argmax. They run in turn, in random order, with another
prompt in each round. A ratio is our median time over transformers'; below 1 ours is faster.

On a GPU the shapes are real models' in bfloat16. transformers attends by flash-attn if it is installed and by PyTorch's
function otherwise, and ours also runs without a flash kernel, as before there was one ("ours, chains").
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers.utils import is_flash_attn_2_available

from benchmarks import bench_step, harness
from medusa_decoding.backbone import prefill_attention
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree

Ways = dict[str, Callable[[torch.Tensor], int]]
SHAPES = {"254M": "Llama-254M", "127M": "Llama-127M", "tiny": "tiny"}
"""Names of shapes of `bench_step` in the records of CPUs."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


ON_GPU = ("Llama-3-8B", "Llama-2-7B")
"""Shapes of `bench_step` that a GPU runs, with prompts of these lengths:"""
TOKENS_ON_GPU = (1024, 8192, 32768)
NO_GPU = "bench_prefill: --device cuda needs a CUDA device, and torch sees none\n"


def make_ways(shape: str, dtype: torch.dtype, device: torch.device) -> tuple[Ways, dict[str, Any], int]:
    """Return the ways by name, what attends in them, and the vocabulary's size.

    A way takes a prompt int64 [1, T] on the device to the next token.
    """
    torch.manual_seed(0)
    config = bench_step.MODELS[SHAPES.get(shape, shape)]()
    theirs = pretrained.build_model(config, device, dtype=dtype).eval()
    swapped = pretrained.build_model(config, device, dtype=dtype).eval()  # a model of its own, with the same weights
    swapped.load_state_dict(theirs.state_dict(), assign=True)
    on_gpu = device.type == "cuda"
    theirs.set_attn_implementation("flash_attention_2" if on_gpu and is_flash_attn_2_available() else "sdpa")
    medusa: Any = MedusaModel(swapped)

    @torch.no_grad()
    def transformers(ids: torch.Tensor) -> int:
        return int(theirs(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

    def ours(ids: torch.Tensor) -> int:
        output = medusa.generate(ids, max_new_tokens=1, eos_token_id=[], tree=Tree([]))
        assert isinstance(output, MedusaOutput)
        return int(output.sequences[0, -1])

    def chains(ids: torch.Tensor) -> int:
        prefill_attention.FLASH_PREFILL = False
        try:
            return ours(ids)
        finally:
            prefill_attention.FLASH_PREFILL = True

    ways: Ways = {"transformers": transformers, "ours": ours}
    attention = {"transformers": theirs.config._attn_implementation}
    if on_gpu:
        ways["ours, chains"] = chains
        head_dim = config.head_dim
        attention["ours"] = prefill_attention.served_by(torch.device("cuda", 0), dtype, head_dim)[:2]
    return ways, attention, config.vocab_size


def measure(
    shape: str, dtype: str, lengths: Sequence[int], rounds: int, device: torch.device, until: float = float("inf")
) -> Iterator[dict[str, Any]]:
    """Time all ways on `rounds` prompts per length; yield one record per length, none begun after `until`."""
    ways, attention, vocabulary = make_ways(shape, DTYPES[dtype], device)

    def clocked(way: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], tuple[float, int]]:
        def run(ids: torch.Tensor) -> tuple[float, int]:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            token = way(ids)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - start, token

        return run

    timed = {name: clocked(way) for name, way in ways.items()}
    shuffler, generator = random.Random(0), torch.Generator().manual_seed(0)
    for length in lengths:
        if time.perf_counter() > until:
            print(f"budget spent before {shape}, {length} tokens", flush=True)
            return
        drawn = [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(rounds + 1)]
        prompts = [ids.to(device) for ids in drawn]
        found = [harness.in_turn(timed, ids, shuffler) for ids in prompts][1:]  # the first warms up
        seconds = {name: [one[name][0] for one in found] for name in ways}
        ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["transformers"], strict=True)]
        record = {
            "shape": shape,
            "dtype": dtype,
            "device": device.type,
            "attention": attention,
            "prompt_tokens": length,
            "rounds": rounds,
            "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
            "fastest": {name: round(min(values), 4) for name, values in seconds.items()},
            "ratio": round(statistics.median(seconds["ours"]) / statistics.median(seconds["transformers"]), 4),
            "ratios": [round(value, 3) for value in sorted(ratios)],
            "same_first_token": sum(one["ours"][1] == one["transformers"][1] for one in found),
        }
        if "ours, chains" in ways:
            record["ratio_to_chains"] = round(
                statistics.median(seconds["ours"]) / statistics.median(seconds["ours, chains"]), 4
            )
        print(json.dumps(record), flush=True)
        yield record


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill(way_through: Any, dtype: str) -> None:
    """A small model: both ways give the same first token."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    [record] = way_through.pedantic(lambda: list(measure("tiny", dtype, (300,), 3, device)), rounds=1)
    assert record["same_first_token"] == 3 or dtype != "float32"


def main() -> None:
    """Measure, print and append to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", nargs="+", choices=(*SHAPES, *ON_GPU), help="default: 254M 127M; on a GPU: 8B, 7B")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: both; on a GPU: bfloat16")
    parser.add_argument("--tokens", nargs="+", type=int, help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; no length is begun after them")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.exit(2, NO_GPU)
    until = time.perf_counter() + args.budget
    for shape in args.shapes or (ON_GPU if on_gpu else ("254M", "127M")):
        for dtype in args.dtypes or (("bfloat16",) if on_gpu else DTYPES):
            lengths = args.tokens or (TOKENS_ON_GPU if on_gpu else (512, 2048, 4096))
            for record in measure(shape, dtype, lengths, args.rounds, torch.device(args.device), until):
                print(harness.write_record("prefill", record))
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
