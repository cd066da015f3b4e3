"""Whole answers of models whose weights exceed the cache: transformers' ways, our plain loop, Medusa by size of tree.

    python -m benchmarks.bench_models --models Llama-254M --dtypes bfloat16
    python -m benchmarks.bench_models --models Llama-127M --dtypes float32 int8 --batches 4 8 --prompts 16
    python -m benchmarks.bench_models --heads HEADS --prompts-from mt_bench.jsonl     # a small model of your own inside

The models are the demo model, or another small one, within larger ones (`benchmarks.enlarged`): they write its answers
and accept its drafts, at the cost of their own size. All ways of a model, dtype and batch answer the same held-out
requests in turn within this process; texts must be equal in float32. Prefill is timed by itself, as an answer of one
token; what is left of an answer's time is decoding.

`--draft` is a small model for assisted generation, as `python -m benchmarks.ablations draft` makes one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import enlarged, harness
from benchmarks.bench_step import MODELS as CONFIGS
from benchmarks.bench_step import stored_bytes
from benchmarks.simulator.shapes import ModelShape, shape_of
from medusa_decoding.checkpoints import pretrained, read_heads
from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.checkpoints.reading import stated_base_model
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation.prompts import read_prompts
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree
from recipes.demo.requests import draw, encoded

NEW = 256
"""Most new tokens of an answer."""
DEMO = CHECKPOINT / "heads"
MODELS = ("Llama-127M", "Llama-254M")
SIZES = (4, 8, 16, 64)
# Dtype of the activations, and whether the layers' weights are int8 (torchao).
DTYPES = {"float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False), "int8": (torch.bfloat16, True)}
PLAIN = "plain"
Way = Callable[["Batch", int], list[list[int]]]
"""Answers a batch with at most so many new tokens each."""


@dataclass(frozen=True)
class Batch:
    """Prompts int64 [B, T], padded on the left, and their mask."""

    ids: torch.Tensor
    mask: torch.Tensor


@dataclass
class Model:
    """One model in one dtype, twice: with transformers' attention modules and with ours."""

    theirs: Any
    medusa: MedusaModel
    accuracies: Any
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def make(cls, shape: ModelShape, dtype: str, folder: Path = DEMO) -> Model:
        """Enlarge the heads in a folder and their model."""
        small = pretrained.load_model(stated_base_model(folder)[0], dtype=torch.float32).eval()
        heads = enlarged.enlarge_heads(read_heads(folder, dtype=torch.float32).heads, shape)
        activations, quantised = DTYPES[dtype]
        both = []
        for _ in range(2):
            model: Any = enlarged.enlarge(small, shape).to(activations)
            if quantised:
                from torchao.quantization import Int8WeightOnlyConfig, quantize_

                quantize_(model.model, Int8WeightOnlyConfig())
            both.append(model)
        accuracies = read_accuracies(folder / "measured.json")
        return cls(both[0], MedusaModel(both[1], heads.to(activations)), accuracies)

    def ways(self, draft: Path | None, sizes: Sequence[int]) -> dict[str, Way]:
        """Return the ways by name, the strong baselines first."""
        found: dict[str, Way] = {
            "transformers": self._transformers(),
            "transformers, static cache, compiled": self._transformers(cache_implementation="static", **compiled()),
            "transformers, prompt lookup": self._transformers(prompt_lookup_num_tokens=8),
        }
        if draft is not None:
            small = pretrained.load_model(draft, dtype=torch.float32)
            known = shape_of(small.config, "draft")
            shape = replace(known, hidden=known.hidden + known.head_dim, vocabulary=self.theirs.config.vocab_size)
            assistant: Any = enlarged.enlarge(small, shape).to(self.theirs.dtype)
            found["transformers, assisted"] = self._transformers(assistant_model=assistant)
        found[PLAIN] = self._ours(PLAIN, Tree([]))
        for nodes in sizes:
            found[f"Medusa, {nodes} nodes"] = self._ours(f"Medusa, {nodes} nodes", Tree.optimal(self.accuracies, nodes))
        return found

    def _transformers(self, **settings: Any) -> Way:
        def way(batch: Batch, new_tokens: int) -> list[list[int]]:
            out = self.theirs.generate(
                batch.ids, attention_mask=batch.mask, max_new_tokens=new_tokens, do_sample=False, **settings
            )
            end = self.theirs.generation_config.eos_token_id
            rows = out[:, batch.ids.shape[1] :].tolist()
            return [row[: row.index(end) + 1] if end in row else row for row in rows]

        return way

    def _ours(self, name: str, tree: Tree) -> Way:
        def way(batch: Batch, new_tokens: int) -> list[list[int]]:
            output = self.medusa.generate(batch.ids, batch.mask, new_tokens, tree)
            assert isinstance(output, MedusaOutput)
            committed, steps = self.steps.get(name, (0, 0))
            rows = output.accept_lengths
            made = committed + sum(sum(row) + len(row) for row in rows), steps + sum(map(len, rows))
            self.steps[name] = made
            new = output.sequences[:, batch.ids.shape[1] :].tolist()
            return [row[:length] for row, length in zip(new, output.new_tokens, strict=True)]

        return way


def compiled() -> dict[str, Any]:
    """Return the argument of `generate` that compiles its step on a CPU too."""
    from transformers import CompileConfig

    config = CompileConfig(fullgraph=False)
    config._compile_all_devices = True
    return {"compile_config": config}


def encode(folder: Path, prompts: Path | None, count: int) -> list[list[int]]:
    """Return the tokens of held-out requests of the demo model, or of a file's first turns."""
    tokenizer = pretrained.load_tokenizer(stated_base_model(folder)[0])
    if prompts is None:
        return [ids[0].tolist() for ids in encoded(tokenizer, draw(count, 11, held_out=True))]
    found = read_prompts([prompts], turns=1)
    if len(found) < count:
        raise ValueError(f"{prompts}: expected {count} prompts, got {len(found)}")
    asked = ([{"role": "user", "content": one.turns[0]}] for one in found[:: len(found) // count][:count])
    return [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]


def batches(rows: Sequence[list[int]], size: int) -> Iterator[Batch]:
    """Yield prompts as padded batches."""
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        width = max(map(len, some))
        pad = [[0] * (width - len(row)) for row in some]
        ids = torch.tensor([zeros + row for zeros, row in zip(pad, some, strict=True)])
        mask = torch.tensor([zeros + [1] * len(row) for zeros, row in zip(pad, some, strict=True)])
        yield Batch(ids, mask)


def measure(
    model: Model, inputs: Sequence[Batch], draft: Path | None = None, sizes: Sequence[int] = SIZES, most: int = NEW
) -> dict[str, Any]:
    """Have a model answer batches of one size in every way; return the record's figures.

    Args:
        model: it.
        inputs: the batches.
        draft: folder of a draft model for assisted generation of single rows.
        sizes: nodes of the trees.
        most: new tokens of an answer.

    Raises:
        AssertionError: in float32, a way writes another text than transformers.
    """
    count, size = len(inputs), len(inputs[0].ids)
    ways = model.ways(draft if size == 1 else None, sizes)
    if size > 1:  # these take one row only
        ways.pop("transformers, prompt lookup")
    texts: dict[str, list[list[list[int]]]] = {name: [] for name in ways}

    def counted(name: str, new_tokens: int) -> Callable[[Batch], int]:
        def run(batch: Batch) -> int:
            rows = ways[name](batch, new_tokens)
            if new_tokens > 1:
                texts[name].append(rows)
            return sum(map(len, rows))

        return run

    with torch.no_grad(), model.medusa:
        for name in ways:
            # What is compiled is compiled for every length of a prompt before it is timed.
            met, lengths = (inputs, (1, most)) if "compiled" in name else (inputs[:1], (1, 16))
            for batch, new_tokens in itertools.product(met, lengths):
                counted(name, new_tokens)(batch)
            texts[name].clear()
        model.steps.clear()
        prefills = ("transformers", PLAIN)
        prefill = harness.interleaved({name: counted(name, 1) for name in prefills}, inputs)
        model.steps.clear()
        samples = harness.interleaved({name: counted(name, most) for name in ways}, inputs)
    same = {
        name: sum(a == b for a, b in zip(found, texts["transformers"], strict=True)) for name, found in texts.items()
    }
    exact = model.theirs.dtype == torch.float32
    assert not exact or set(same.values()) == {len(inputs)}, f"expected the same texts, got {same}"
    weights = sum(map(stored_bytes, model.theirs.parameters()))
    known, itemsize = model.theirs.config, model.theirs.dtype.itemsize
    filled = {name: sum(taken for _, taken in found) for name, found in prefill.items()}
    decoding = {
        name: (sum(made for made, _ in found) - count * size)
        / (sum(taken for _, taken in found) - filled["transformers" if name.startswith("transformers") else PLAIN])
        for name, found in samples.items()
    }
    return {
        "parameters": sum(weight.numel() for weight in model.theirs.parameters()), "batch": size,
        "prompts": count * size, "threads": torch.get_num_threads(), "weights_bytes": weights,
        "heads_bytes": sum(map(stored_bytes, model.medusa.heads.parameters())),
        "cache_bytes_per_token": 2 * known.num_hidden_layers * known.num_key_value_heads * known.head_dim * itemsize,
        "new_tokens": sum(len(row) for rows in texts[PLAIN] for row in rows),
        "prefill_seconds": {name: taken / count for name, taken in filled.items()},
        "prefill_over_transformers": harness.ratio(prefill[PLAIN], prefill["transformers"]),
        "tokens_per_second": {name: harness.rate(found) for name, found in samples.items()},
        "decoding_tokens_per_second": decoding,
        "over_plain": {name: harness.ratio(found, samples[PLAIN]) for name, found in samples.items() if name != PLAIN},
        "over_transformers": {
            name: harness.ratio(found, samples["transformers"])
            for name, found in samples.items()
            if name != "transformers"
        },
        "tokens_per_step": {name: committed / steps for name, (committed, steps) in model.steps.items()},
        "same_text_as_transformers": same, "batches": count,
    }  # fmt: skip


def main() -> None:
    """Measure, print and append to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="rows at a time (default: 1)")
    parser.add_argument("--prompts", type=int, default=12, help="batches of held-out requests (default: 12)")
    parser.add_argument("--nodes", nargs="+", type=int, default=SIZES, help="sizes of trees (default: %(default)s)")
    parser.add_argument("--draft", type=Path, help="folder of a draft model for assisted generation")
    parser.add_argument("--heads", type=Path, default=DEMO, help="folder of heads on a small model (default: demo)")
    parser.add_argument("--prompts-from", type=Path, help="file of prompts (default: requests of the demo model)")
    parser.add_argument("--max-new-tokens", type=int, default=NEW, help="default: %(default)s")
    args = parser.parse_args()
    name = "models" if args.heads == DEMO else "models-with-own-heads"
    for model in args.models:
        shape = shape_of(CONFIGS[model](), model)
        for dtype in args.dtypes:
            for size in args.batches:
                rows = encode(args.heads, args.prompts_from, args.prompts * size)
                made = Model.make(shape, dtype, args.heads)
                found = measure(made, list(batches(rows, size)), args.draft, args.nodes, args.max_new_tokens)
                figures = {"model": model, "dtype": dtype, "prefix": 0, **found}
                print(json.dumps(figures, indent=1), flush=True)
                print(harness.write_record(name, figures))
                del made
                gc.collect()


if __name__ == "__main__":
    main()
