"""Prefill on a CPU: our whole call for one new token against transformers' forward pass over the same prompt.

    python -m benchmarks.bench_prefill

Weights are random. Ours is `generate` for one token: checks, the cache, the prompt, and the first token. transformers'
is `model(input_ids, use_cache=True, logits_to_keep=1)` and the argmax. They run in turn, in random order, with another
prompt in each round. A ratio is our median time over transformers'; below 1 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree

Ways = dict[str, Callable[[torch.Tensor], int]]
# Name: hidden size, layers, heads, KV heads, intermediate size, vocabulary.
SHAPES = {
    "254M": (1024, 16, 16, 8, 2816, 32000),
    "127M": (768, 12, 12, 4, 2048, 32000),
    "tiny": (64, 2, 4, 2, 96, 128),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_ways(shape: str, dtype: torch.dtype) -> tuple[Ways, int]:
    """Return both ways by name, each from a prompt int64 [1, T] to the next token, and the vocabulary's size."""
    hidden, layers, heads, kv_heads, inner, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=hidden // heads, intermediate_size=inner, vocab_size=vocabulary, max_position_embeddings=1 << 14,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config).to(dtype).eval()
    swapped = LlamaForCausalLM(config).to(dtype).eval()  # a model of its own, with the same weights
    swapped.load_state_dict(theirs.state_dict(), assign=True)
    medusa: Any = MedusaModel(swapped)

    @torch.no_grad()
    def transformers(ids: torch.Tensor) -> int:
        return int(theirs(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

    def ours(ids: torch.Tensor) -> int:
        output = medusa.generate(ids, max_new_tokens=1, eos_token_id=[], tree=Tree([]))
        assert isinstance(output, MedusaOutput)
        return int(output.sequences[0, -1])

    return {"transformers": transformers, "ours": ours}, vocabulary


def measure(shape: str, dtype: str, lengths: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Time both ways on `rounds` prompts per length; yield one record per length."""
    ways, vocabulary = make_ways(shape, DTYPES[dtype])

    def clocked(way: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], tuple[float, int]]:
        def run(ids: torch.Tensor) -> tuple[float, int]:
            start = time.perf_counter()
            token = way(ids)
            return time.perf_counter() - start, token

        return run

    timed = {name: clocked(way) for name, way in ways.items()}
    shuffler, generator = random.Random(0), torch.Generator().manual_seed(0)
    for length in lengths:
        prompts = [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(rounds + 1)]
        found = [harness.in_turn(timed, ids, shuffler) for ids in prompts][1:]  # the first warms up
        seconds = {name: [one[name][0] for one in found] for name in ways}
        ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["transformers"], strict=True)]
        record = {
            "shape": shape,
            "dtype": dtype,
            "prompt_tokens": length,
            "rounds": rounds,
            "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
            "fastest": {name: round(min(values), 4) for name, values in seconds.items()},
            "ratio": round(statistics.median(seconds["ours"]) / statistics.median(seconds["transformers"]), 4),
            "ratios": [round(value, 3) for value in sorted(ratios)],
            "same_first_token": sum(one["ours"][1] == one["transformers"][1] for one in found),
        }
        print(json.dumps(record), flush=True)
        yield record


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill(way_through: Any, dtype: str) -> None:
    """A small model: both ways give the same first token."""
    [record] = way_through.pedantic(lambda: list(measure("tiny", dtype, (300,), 3)), rounds=1)
    assert record["same_first_token"] == 3 or dtype != "float32"


def main() -> None:
    """Measure, print and append to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["254M", "127M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 4096], help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for shape in args.shapes:
        for dtype in args.dtypes:
            for record in measure(shape, dtype, args.tokens, args.rounds):
                path = harness.write_record("prefill", record)
    print(path)


if __name__ == "__main__":
    main()
