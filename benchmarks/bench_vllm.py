"""vLLM with our plugin against vLLM without heads, in the environment of `make test-vllm`.

    python -m benchmarks.bench_vllm
    python -m benchmarks.bench_vllm --base BASE --heads HEADS --dtype bfloat16 --graphs    # on a GPU

Both engines live in this process and take turns, in a random order, with the same prompts. The model is the embedded
one if none is named. `held-out` are requests of the kinds that it was trained on, with names that training never had:
it answers them by its templates, which flatters the heads. `continue` are beginnings of functions of Python's standard
library, which it was not trained to continue. The texts that are those of vLLM without heads are counted: all of them,
in float32.
"""

from __future__ import annotations

import argparse
import inspect
import os
import textwrap
from typing import Any

from benchmarks import harness
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.demo import CHECKPOINT
from recipes.demo.requests import draw, encoded

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
"""Environment of vLLM, where the caller has not set it."""
MODULES = (argparse, inspect, textwrap)
"""Their functions are what `continue` shows the beginnings of."""


def prompts(count: int, base: str) -> dict[str, list[list[int]]]:
    """Return `count` prompts of each kind, as token ids."""
    tokenizer = pretrained.load_tokenizer(base)
    asked = [ids[0].tolist() for ids in encoded(tokenizer, draw(count, seed=13, held_out=True))]
    functions = [value for module in MODULES for value in vars(module).values() if inspect.isfunction(value)]
    sources = [inspect.getsource(function)[:300] for function in functions[:count]]
    return {"held-out": asked, "continue": [tokenizer(source).input_ids for source in sources]}


def main() -> int:
    """Measure, print the figures and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="of each kind (default: 16)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="requests in a batch (default: 1 8)")
    parser.add_argument("--rounds", type=int, default=4, help="default: 4")
    parser.add_argument("--base", default=str(CHECKPOINT / "base"), help="model (default: the embedded one)")
    parser.add_argument("--heads", default=str(CHECKPOINT / "heads"), help="its heads (default: the embedded ones)")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--graphs", action="store_true", help="let vLLM compile the model and capture graphs")
    parser.add_argument("--share", type=float, default=0.4, help="of a GPU's memory, per engine (default: 0.4)")
    args = parser.parse_args()
    os.environ |= SETTINGS | dict(os.environ)
    import vllm

    shared: dict[str, Any] = {
        "dtype": args.dtype, "max_model_len": 1024, "enforce_eager": not args.graphs, "disable_log_stats": False,
        "enable_prefix_caching": False, "gpu_memory_utilization": args.share,
    }  # fmt: skip
    speculation = {"method": "custom_class", "model": "medusa_vllm.MedusaProposer", "num_speculative_tokens": 4}
    heads = {"speculative_config": speculation, "additional_config": {"medusa_heads": args.heads}}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "heads": heads}
    engines = {name: vllm.LLM(args.base, **shared, **own) for name, own in ways.items()}
    sampling = vllm.SamplingParams(temperature=0, max_tokens=96)
    texts: dict[str, dict[str, list[int]]] = {name: {} for name in ways}

    def drafts() -> tuple[int, int]:
        counts = {metric.name: getattr(metric, "value", 0) for metric in engines["heads"].get_metrics()}
        return counts["vllm:spec_decode_num_drafts"], counts["vllm:spec_decode_num_accepted_tokens"]

    def answer(name: str, batch: list[list[int]]) -> int:
        given: Any = [{"prompt_token_ids": prompt} for prompt in batch]
        found = [list(one.outputs[0].token_ids) for one in engines[name].generate(given, sampling, use_tqdm=False)]
        texts[name] |= {str(prompt): text for prompt, text in zip(batch, found, strict=True)}
        return sum(map(len, found))

    cases: list[dict[str, Any]] = []
    for kind, asked in prompts(args.requests, args.base).items():
        for at_once in args.at_once:
            batches = [asked[i : i + at_once] for i in range(0, len(asked), at_once)]
            for name in ways:  # warm
                answer(name, batches[0])
            before = drafts()
            timed = harness.interleaved(
                {name: lambda batch, name=name: answer(name, batch) for name in ways}, batches, rounds=args.rounds
            )
            steps, accepted = (after - start for after, start in zip(drafts(), before, strict=True))
            cases += [{
                "prompts": kind, "at_once": at_once, "accepted_per_step": accepted / steps, "texts": len(asked),
                "same_texts": sum(texts["plain"][str(one)] == texts["heads"][str(one)] for one in asked),
                "tokens_per_second": {name: harness.rate(samples) for name, samples in timed.items()},
                **harness.ratio(timed["heads"], timed["plain"]),
            }]  # fmt: skip
            print(cases[-1], flush=True)
    record = {"vllm": vllm.__version__, "drafted": 4, "model": args.base, "dtype": args.dtype, "graphs": args.graphs}
    record |= {"load_average": os.getloadavg()[0], "cases": cases}
    print(harness.write_record("vllm-plugin", record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
