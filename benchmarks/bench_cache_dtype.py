"""What a KV cache in 8 bits changes: the texts of a real model, and the time of attention to long prefixes on a CPU.

    python -m benchmarks.bench_cache_dtype text --model smollm2 --dtype float32 --prompts mt_bench.jsonl
    python -m benchmarks.bench_cache_dtype attention --prefixes 4096 16384

text: the model answers the first turn of each prompt greedily, with a cache in its own dtype and in int8. Then both
read the first of these answers after its prompt, and their distributions of each of its tokens are compared.

attention: one layer whose projections are small beside its attention, on the C++ library, with a cache in each dtype in
turn within this process. The same, with a prefix of one row, is subtracted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from medusa_decoding.backbone.attention_swap import DecodeContext
from medusa_decoding.chat.template import ChatTemplate
from medusa_decoding.checkpoints import find_base_model, pretrained
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.evaluation.prompts import read_prompts
from medusa_decoding.model import MedusaModel
from medusa_decoding.serving.loading import find_model
from medusa_kernels import LayerWeights, Projection, ancestor_words, decoder_layers, packed
from medusa_kernels.cache_rows import quantised_rows

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 32, 8, 128, 64


def logits_of(model: MedusaModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [T, V] of a text int64 [T], read as a prompt with the model's cache."""
    backbone, pool = model.backbone, model._steps.pool
    state = pool.acquire(Sizes([len(ids)], 1), len(ids))
    depths = torch.arange(len(ids), dtype=torch.int32)
    hidden = backbone.forward(ids[None], DecodeContext(state.cache, depths, None))
    pool.release(state)
    return backbone.lm_head(hidden)[0].float()


def text(args: argparse.Namespace) -> dict[str, Any]:
    """Compare answers, and distributions given the same answer."""
    heads = find_model(args.model)
    model = MedusaModel.from_pretrained(heads, args.base_model or find_base_model(heads), dtype=args.dtype)
    template = ChatTemplate(pretrained.load_tokenizer(args.base_model or str(find_base_model(heads))), None)
    prompts = read_prompts([args.prompts], limit=args.limit, turns=1, distinct=True)
    same, agreed, distances, sizes = [], [], [], {}
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([template.encode([{"role": "user", "content": prompt.turns[0]}])])
        answers, logits = {}, {}
        for name in (None, "int8"):
            model.cache_dtype = name
            output = model.generate(ids, max_new_tokens=args.max_new_tokens)
            answers[name] = output.sequences[0]
            with torch.no_grad():
                logits[name] = logits_of(model, answers[None])[ids.shape[1] - 1 : -1].log_softmax(-1)
            shape = model.backbone.kv_shape(1, 1)
            sizes[name or args.dtype] = torch.Size(shape).numel() * model.backbone.kv_dtype.itemsize
        own, other = logits[None], logits["int8"]
        same.append(torch.equal(answers[None], answers["int8"]))
        agreed += (own.argmax(-1) == other.argmax(-1)).tolist()
        distances += (own.exp() * (own - other)).sum(-1).tolist()
        print(f"{number + 1} texts, {sum(same)} equal, {statistics.mean(agreed):.4f} agreed", flush=True)
    return {
        "model": args.model, "dtype": args.dtype, "prompts": len(same), "max_new_tokens": args.max_new_tokens,
        "tokens": len(agreed), "equal_texts": sum(same) / len(same), "agreement": statistics.mean(agreed),
        "mean_kl": statistics.mean(distances), "largest_kl": max(distances), "bytes_per_token": sizes,
    }  # fmt: skip


def layer(dtype: torch.dtype, kept: torch.dtype, prefix: int, nodes: int) -> Callable[[], torch.Tensor]:
    """Return a call of one layer with random weights and cache, in which attention takes nearly all of the time."""
    torch.manual_seed(0)

    def random_weight(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype) / sizes[-1] ** 0.5

    rows = ((HEADS * HEAD_DIM, WIDTH), *[(KV_HEADS * HEAD_DIM, WIDTH)] * 2, (WIDTH, HEADS * HEAD_DIM))
    projections = [Projection(random_weight(*size)) for size in (*rows, *[(WIDTH, WIDTH)] * 3)]
    ones = torch.ones(WIDTH, dtype=dtype)
    weights, forms = packed([LayerWeights(ones, ones, projections)], ones)
    kv = torch.randn(1, 2, 1, KV_HEADS, prefix + nodes, HEAD_DIM)
    kv = quantised_rows(kv) if kept == torch.int8 else kv.to(kept)
    table = torch.ones(prefix + nodes, HEAD_DIM, dtype=dtype)
    lens, depths = torch.tensor([prefix], dtype=torch.int32), torch.arange(nodes, dtype=torch.int32)
    words, hidden = ancestor_words(torch.ones(nodes, nodes, dtype=torch.bool).tril()), random_weight(1, nodes, WIDTH)
    return lambda: decoder_layers(
        hidden, weights, forms, kv, table, table, lens, depths, words, windows=[0], eps=1e-5, scale=HEAD_DIM**-0.5
    )


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def attention(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time attention with caches in each dtype; a ratio is the median over rounds of two times of one round."""
    found, shuffler = [], random.Random(0)
    for dtype in (torch.float32, torch.bfloat16):
        for prefix in args.prefixes:
            for nodes in args.nodes:
                ways = {name: [layer(dtype, kept, p, nodes) for p in (prefix, 1)]
                        for name, kept in (("own", dtype), ("int8", torch.int8))}  # fmt: skip
                times: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(args.rounds + 1):
                    timed = {name: lambda _, calls=calls: seconds(calls[0]) - seconds(calls[1])
                             for name, calls in ways.items()}  # fmt: skip
                    for name, value in harness.in_turn(timed, None, shuffler).items():
                        times[name].append(value)
                ratio = statistics.median(a / b for a, b in zip(times["int8"][1:], times["own"][1:], strict=True))
                found.append({
                    "dtype": str(dtype).removeprefix("torch."), "prefix": prefix, "nodes": nodes,
                    "ms": {name: statistics.median(values[1:]) * 1e3 for name, values in times.items()}, "ratio": ratio,
                })  # fmt: skip
                print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, print, and with --record keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="append to this machine's file in benchmarks/results")
    commands = parser.add_subparsers(dest="what", required=True)
    of_text = commands.add_parser("text")
    of_text.add_argument("--model", default="smollm2")
    of_text.add_argument("--base-model")
    of_text.add_argument("--dtype", default="float32")
    of_text.add_argument("--prompts", type=Path, required=True)
    of_text.add_argument("--limit", type=int, default=None)
    of_text.add_argument("--max-new-tokens", type=int, default=64)
    of_attention = commands.add_parser("attention")
    of_attention.add_argument("--prefixes", type=int, nargs="+", default=[4096, 16384])
    of_attention.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    of_attention.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    figures = text(args) if args.what == "text" else {"cases": attention(args)}
    print(figures)
    if args.record:
        harness.write_record(f"cache_dtype_{args.what}", figures)


if __name__ == "__main__":
    main()
