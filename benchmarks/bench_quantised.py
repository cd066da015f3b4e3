"""A model quantised by each library: are its texts those of plain decoding, and what does a step cost, on a CPU.

    python -m benchmarks.bench_quantised --model MODEL.gguf --heads HEADS --data FOLDER
    python -m benchmarks.bench_quantised --model MODEL.gguf --heads HEADS --data FOLDER --forms bnb-nf4 --prompts 4

Each form is made by its library from the same weights: bitsandbytes and torchao from the loaded model,
compressed-tensors as a checkpoint on disk (rounded to nearest). Only the layers are quantised, unless the form's name
ends in "-all". For each form:

* In float32 and bfloat16, greedy texts by the tree and by the plain loop through the same kernels: how many are equal,
  and where two part, how far the tree's token is below the model's best one, in standard deviations of the logits.
* How far the ops' product is from that of the library's own layer, at most, relative to the largest number of it.
* In bfloat16, in turn within this process: the milliseconds of a plain step through the ops and module by module (the
  library's own kernels), and of a step with 4 and 8 nodes through the ops. Ratios are medians over the rounds.
* Of forms whose inputs may be rounded (`activation_dtype="int8"`): in float32 how often that changes texts and next
  tokens, and by how much their distributions; in bfloat16 the times of its steps over the others', in turn.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from benchmarks.bench_cpu_step import turn
from benchmarks.bench_published import find, spread
from benchmarks.bench_step import prepare_step
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checkpoints.accuracies import find_accuracies
from medusa_decoding.evaluation.prompts import Conversations, read_prompts
from medusa_decoding.generation.output import MedusaOutput
from medusa_decoding.linears.reading import read
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from medusa_kernels import decode_linear, quantised

NEW_TOKENS, NODES, PREFIX, STEPS = 64, (4, 8), 256, 3
Make = Callable[[Path, torch.dtype], Any]


def plain(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model as it is."""
    return pretrained.load_model(folder, dtype=dtype)


def bitsandbytes(**settings: Any) -> Make:
    """Return what quantises the layers in 4 bits by bitsandbytes."""
    from transformers import BitsAndBytesConfig

    def make(folder: Path, dtype: torch.dtype) -> Any:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **settings)
        return pretrained.load_model(folder, dtype=dtype, quantization_config=config)

    return make


def torchao(config: Callable[[], Any], whole: bool = False) -> Make:
    """Return what quantises the layers, or all projections, by torchao."""

    def make(folder: Path, dtype: torch.dtype) -> Any:
        from torchao.quantization import quantize_

        model = plain(folder, dtype)
        quantize_(model if whole else model.model, config())
        return model

    return make


def int4() -> Any:
    """Return torchao's form with the group size of llama.cpp's Q4_0."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return IntxWeightOnlyConfig(torch.int4, PerGroup(32))


def by_rows(name: str) -> Any:
    """Return the config of that name, in 8 bits with a scale per row."""
    import torchao.quantization as forms

    return getattr(forms, name)()


def compressed(**weights: Any) -> Make:
    """Return what writes a compressed-tensors checkpoint, rounded to nearest, and loads it."""

    def make(folder: Path, dtype: torch.dtype) -> Any:
        from compressed_tensors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            QuantizationStatus,
            apply_quantization_config,
        )
        from compressed_tensors.quantization.utils import calculate_qparams

        model, args = plain(folder, dtype), QuantizationArgs(**weights)
        form = "pack-quantized" if args.num_bits == 4 else f"{args.type}-quantized"
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        config = QuantizationConfig(
            config_groups={"all": scheme}, format=form, quantization_status="initialized", ignore=["lm_head"]
        )
        apply_quantization_config(model, config)
        for module in model.modules():
            if isinstance(module, nn.Linear) and hasattr(module, "weight_scale"):
                groups = module.weight.data.float().unflatten(1, (module.weight_scale.shape[1], -1))
                scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
                module.weight_scale.data.copy_(scale)
                module.quantization_status = QuantizationStatus.FROZEN
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        with tempfile.TemporaryDirectory() as written:
            model.save_pretrained(written)
            compressor.update_config(written)
            return pretrained.load_model(written, dtype=dtype)

    return make


FORMS: dict[str, Make] = {
    "none": plain,
    "bnb-nf4": bitsandbytes(bnb_4bit_quant_type="nf4"),
    "bnb-nf4-nested": bitsandbytes(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "bnb-fp4": bitsandbytes(bnb_4bit_quant_type="fp4"),
    "compressed-int4": compressed(num_bits=4, type="int", strategy="group", group_size=32),
    "torchao-int4": torchao(int4),
    "torchao-int4-all": torchao(int4, whole=True),
    "torchao-int8": torchao(lambda: by_rows("Int8WeightOnlyConfig")),
    "torchao-int8-all": torchao(lambda: by_rows("Int8WeightOnlyConfig"), whole=True),
    "compressed-int8": compressed(num_bits=8, type="int", strategy="channel"),
    "torchao-fp8": torchao(lambda: by_rows("Float8WeightOnlyConfig")),
    "compressed-fp8": compressed(num_bits=8, type="float", strategy="channel"),
}


@torch.no_grad()
def agreement(decoder: nn.Module, library: nn.Module) -> float | None:
    """Return how far the ops' products are from the layers' own, at most, relative to the largest number of a result.

    `decoder` is held by a `MedusaModel`, `library` is another copy, which is not. None if no weight is quantised.
    """
    worst = None
    for name, module in library.named_modules():
        found = read(decoder.get_submodule(name)) if name.endswith("_proj") else ""
        if isinstance(found, str) or found.scale is None:
            continue
        x = torch.randn(3, quantised.columns(found.weight), dtype=next(decoder.parameters()).dtype)
        theirs = module(x).float()
        zeros = None if found.zero is None else [found.zero]
        ours = decode_linear(x, [found.weight], [found.bias], scales=[found.scale], zeros=zeros, codes=found.codes)
        worst = max(worst or 0.0, float((ours.float() - theirs).abs().max() / theirs.abs().max()))
    return worst


def answer(model: MedusaModel, ids: torch.Tensor, tree: Tree) -> MedusaOutput:
    """Return what a model writes after a prompt, up to the limit of tokens."""
    output = model.generate(ids, max_new_tokens=NEW_TOKENS, tree=tree, eos_token_id=[])
    assert not isinstance(output, torch.Tensor)
    return output


@torch.no_grad()
def texts(model: MedusaModel, tree: Tree, prompts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Answer prompts by the plain loop and by a tree, and compare the texts."""
    equal, below, tokens, steps = 0, [0.0], 0, 0
    for ids in prompts:
        plain_text, found = (answer(model, ids, one) for one in (Tree([]), tree))
        first, other = (output.sequences[0].tolist() for output in (plain_text, found))
        tokens, steps = tokens + NEW_TOKENS, steps + NEW_TOKENS / found.tokens_per_step
        equal += first == other
        if first != other:
            place = next(i for i, pair in enumerate(zip(first, other, strict=True)) if pair[0] != pair[1])
            logits = model.base(torch.tensor([first[:place]])).logits[0, -1].float()
            below.append(float((logits.max() - logits[other[place]]) / logits.std()))
    return {"texts": len(prompts), "equal": equal, "below_best": max(below), "tokens_per_step": tokens / steps}


@torch.no_grad()
def rounding(model: MedusaModel, rounded: MedusaModel, prompts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Compare the answers of the plain loop, and the distributions of next tokens along the model's own ones."""
    equal, same, divergences = 0, 0, []
    for ids in prompts:
        text, other = (answer(one, ids, Tree([])).sequences for one in (model, rounded))
        equal += torch.equal(text, other)
        p, q = (one.base(text).logits[0, ids.shape[1] - 1 : -1].double().log_softmax(-1) for one in (model, rounded))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        divergences += (p.exp() * (p - q)).sum(-1).tolist()
    return {
        "texts": len(prompts), "equal": equal, "tokens": len(divergences), "same_next": same / len(divergences),
        "divergence": statistics.mean(divergences), "largest": max(divergences),
    }  # fmt: skip


def timed(steps: Mapping[Any, tuple[MedusaModel, Tree]], rounds: int) -> list[dict[Any, float]]:
    """Time steps of models and trees in turn; return the milliseconds of each in each round."""
    turns = {way: turn(*prepare_step(model, tree, "eager", PREFIX, 1)) for way, (model, tree) in steps.items()}
    shuffler = random.Random(0)
    each = (harness.in_turn(turns, STEPS, shuffler) for _ in range(rounds))
    return [{way: statistics.median(times) for way, times in one.items()} for one in each]


@torch.no_grad()
def rounded_times(model: MedusaModel, rounded: MedusaModel, trees: dict[int, Tree], rounds: int) -> dict[str, Any]:
    """Time steps with rounded inputs and without, in turn."""
    ways = {
        (name, nodes): (one, tree) for name, one in (("", model), ("rounded", rounded)) for nodes, tree in trees.items()
    }
    found = timed(ways, rounds)
    return {
        "plain_ms": statistics.median(one["rounded", 1] for one in found),
        **{f"{n} nodes": statistics.median(one["rounded", n] / one["", n] for one in found) for n in trees},
        **{
            f"{n} nodes_to_plain": statistics.median(one["rounded", n] / one["rounded", 1] for one in found)
            for n in trees
        },
    }


@torch.no_grad()
def times(model: MedusaModel, library: MedusaModel, trees: dict[int, Tree], rounds: int) -> dict[str, Any]:
    """Time steps through the ops, and plain ones of a copy that runs as its library's modules, in turn."""
    # A layer with a hook runs as its modules, and so do all others.
    library.backbone.decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: None)
    steps = {f"{count} nodes": (model, tree) for count, tree in trees.items()} | {"modules": (library, Tree([]))}
    found = timed(steps, rounds)
    return {
        "plain_ms": statistics.median(one["1 nodes"] for one in found),
        **{f"{way}_to_plain": statistics.median(one[way] / one["1 nodes"] for one in found) for way in steps},
    }


def measure(form: str, folder: Path, args: argparse.Namespace, ids: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Measure one form and write its record."""
    record: dict[str, Any] = {"model": Path(args.model).name, "form": form, "threads": torch.get_num_threads()}
    for dtype in (torch.float32, torch.bfloat16):
        library, base = FORMS[form](folder, dtype).eval(), FORMS[form](folder, dtype).eval()
        with torch.no_grad():
            library(ids[0])  # after which its weights are as the library wants them
        found: dict[str, Any] = {}
        with MedusaModel.from_pretrained(args.heads, base) as model:
            found["agreement"] = agreement(model.backbone.decoder, library.model)
            assert model.heads is not None
            accuracies = find_accuracies(Path(args.heads), model.heads)
            assert accuracies is not None, f"--heads: expected measured accuracies in {args.heads}"
            trees = {n: Tree.optimal(accuracies.by_rank, n) if n > 1 else Tree([]) for n in (1, *NODES)}
            found |= texts(model, trees[NODES[-1]], ids)
            found["layers"] = "ops" if model.backbone.native is not None else "modules"
            if "int" in form:
                other = FORMS[form](folder, dtype).eval()
                with MedusaModel.from_pretrained(args.heads, other, activation_dtype="int8") as rounded:
                    if dtype == torch.float32:
                        found["rounding"] = rounding(model, rounded, ids)
                        found["rounding"]["tree"] = texts(rounded, trees[NODES[-1]], ids)
                    elif args.rounds:
                        found["rounding"] = rounded_times(model, rounded, trees, args.rounds)
                del other, rounded
            if dtype == torch.bfloat16 and args.rounds:
                with MedusaModel(library) as other:
                    found |= times(model, other, trees, args.rounds)
        record[str(dtype).removeprefix("torch.")] = found
        del base, model, library
        gc.collect()
    harness.write_record("quantised", record)
    return record


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table, a row for each form."""
    rows = [["form", "layers", "agreement fp32, bf16", "equal texts fp32, bf16", "below best fp32, bf16", "plain ms"]]
    rows[0] += ["by modules", *(f"{n} nodes" for n in NODES)]
    for record in records:
        both = [record["float32"], record["bfloat16"]]
        apart = ["" if one["agreement"] is None else f"{one['agreement']:.0e}" for one in both]
        row = [record["form"], both[1]["layers"], ", ".join(apart)]
        row += [", ".join(f"{one['equal']} of {one['texts']}" for one in both)]
        row += [", ".join(f"{one['below_best']:.3f}" for one in both)]
        if "plain_ms" in both[1]:
            ratios = [both[1][f"{way}_to_plain"] for way in ("modules", *(f"{n} nodes" for n in NODES))]
            row += [f"{both[1]['plain_ms']:.1f}", *(f"{ratio:.2f} x" for ratio in ratios)]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return harness.markdown(rows)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file, or a folder")
    parser.add_argument("--heads", required=True, help="folder of heads with their accuracies")
    parser.add_argument("--data", type=Path, required=True, help="folder with mt_bench.jsonl")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=tuple(FORMS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8, help="0: no times")
    args = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, tokenizer = pretrained.load_model(args.model, dtype=torch.float32), pretrained.load_tokenizer(args.model)
        base.save_pretrained(folder)
        with MedusaModel(base) as model:
            conversations = Conversations(model, tokenizer)
            asked = spread(read_prompts([find(args.data, "mt_bench.jsonl")], turns=1), args.prompts)
            ids = [torch.tensor([conversations.encode(one)]) for one in asked]
        del base, model
        for form in args.forms:
            records.append(measure(form, folder, args, ids))
            print(table(records), flush=True)


if __name__ == "__main__":
    main()
