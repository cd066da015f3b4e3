"""What each kind of heads does to accuracy, tokens a step and bytes: the same data, the same steps, one table.

    python -m benchmarks.head_variants --work runs/variants

The embedded model continues pieces of code greedily (`medusa distill`), each variant learns that from the same start
(`medusa train`, hidden states kept), and decodes other pieces, of held-out files, with the tree of 16 nodes that its
own accuracies ask for. int8 and fp8 are the heads with own projections, stored so. What is in the folder already is
not done again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from medusa_decoding.checkpoints import pretrained, read_heads
from medusa_decoding.cli import main as medusa
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation.interval import ratio
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.training import Config, train
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.training.loop.writing import MEASURED
from medusa_decoding.trees.tree import Tree
from recipes.demo.seeds import write_seeds

RECIPE = Path(__file__).parents[1] / "recipes" / "demo-cpu.yaml"
PLAIN = {"num_heads": 4, "parent_rank": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "own projections": {},
    "two blocks a head": {"num_layers": 2},
    "shared lm_head": {"shared_projection": True},
    "shared, two blocks": {"shared_projection": True, "num_layers": 2},
    "1,024 of 2,048 tokens": {"token_map_size": 1024},
    "512 of 2,048 tokens": {"token_map_size": 512},
    "parents, rank 16": {"parent_rank": 16},
    "parents, rank 64": {"parent_rank": 64},
    "shared, parents, rank 64": {"shared_projection": True, "parent_rank": 64},
}
STORED = ("int8", "fp8")
PROMPT, NEW, NODES = 128, 128, 16


def prepare(work: Path, count: int) -> Path:
    """Have the model write the data, once a folder; return the file."""
    records = work / "data" / "generated" / "records.jsonl"
    if not (records.parent / "records.jsonl.finished").exists():
        seeds = work / "seeds.jsonl"
        if not seeds.exists():
            write_seeds(seeds, count)
        arguments = ["--set", f"data.train=[{{path: {seeds}}}]", "--set", f"output.folder={work / 'data'}"]
        arguments += ["--set", f"model.name={CHECKPOINT / 'base'}", "--only-data"]
        arguments += ["--resume"] if records.exists() else []
        if medusa(["distill", "--config", str(RECIPE), *arguments]) != 0:
            raise RuntimeError("the data could not be written; see above")
    return records


def trained(work: Path, name: str, variant: dict[str, Any], records: Path, epochs: float) -> Path:
    """Train a variant, once a folder; return the folder of its heads."""
    from medusa_decoding.training import config_schema

    folder = work / name.replace(" ", "-").replace(",", "")
    values: dict[str, Any] = config_schema.read_yaml(RECIPE)
    values["model"]["name"] = str(CHECKPOINT / "base")
    values["heads"] = PLAIN | variant
    values["data"] |= {"train": [{"path": str(records)}], "cache_hidden": str(work / "states")}
    values["optimisation"]["epochs"] = epochs
    values["output"]["folder"] = str(folder)
    if not (folder / "heads" / MEASURED).exists():
        train(Config.of(values), resume=(folder / "checkpoints").exists())
    return folder / "heads"


def own_accuracy(heads: MedusaHeads, model: MedusaModel, texts: list[list[int]]) -> HeadAccuracy:
    """Return the accuracy on the model's own texts, prompts left out, as decoding ranks candidates."""
    from medusa_decoding.evaluation.own_text import own_text_accuracy

    found = HeadAccuracy.empty(heads.num_heads)
    for text in texts:
        part = own_text_accuracy(model, text, PROMPT)
        found.hits += part.hits
        found.total += part.total
    return found


def measure(base: Any, heads: MedusaHeads, calibration: list[list[int]], held_out: list[list[int]]) -> dict[str, Any]:
    """Return accuracy and tokens a step of heads: the tree from one set of texts, figures from the other."""
    with MedusaModel(base, heads) as model:
        tree = Tree.optimal(own_accuracy(heads, model, calibration).by_rank, NODES)
        accuracy = own_accuracy(heads, model, held_out)
        committed, steps, same = [], [], 0
        for text in held_out:
            output = model.generate(torch.tensor([text[:PROMPT]]), max_new_tokens=NEW, eos_token_id=[], tree=tree)
            assert isinstance(output, MedusaOutput)
            committed.append(output.new_tokens[0] - 1)
            steps.append(output.steps)
            same += output.sequences[0].tolist() == text
    rate = ratio(list(zip(committed, steps, strict=True)))
    cumulative = accuracy.cumulative
    return {
        "top1": [row[0] for row in cumulative],
        "top10": [row[9] for row in cumulative],
        "tokens_per_step": sum(committed) / sum(steps),
        "interval": None if rate is None else [rate.low, rate.high],
        "bytes_bf16": sum(heads.to(torch.bfloat16).step_bytes().values()),
        "same_texts": same,
    }


def texts(base: Any, tokenizer: Any, file: Path) -> list[list[int]]:
    """Return greedy continuations of pieces, prompts included."""
    found = []
    with MedusaModel(base) as plain:
        for line in file.read_text(encoding="utf-8").splitlines():
            ids = tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids[:, :PROMPT]
            if ids.shape[1] == PROMPT:
                output = plain.generate(ids, max_new_tokens=NEW, eos_token_id=[], tree=Tree([]))
                assert isinstance(output, MedusaOutput)
                found.append(output.sequences[0].tolist())
    return found


def run(work: Path, seeds: int, epochs: float, prompts: int, only: list[str]) -> dict[str, Any]:
    """Train and measure all variants."""
    work.mkdir(parents=True, exist_ok=True)
    records = prepare(work, seeds)
    base = pretrained.load_model(CHECKPOINT / "base", dtype=torch.float32).eval()
    tokenizer = pretrained.load_tokenizer(CHECKPOINT / "base")
    sets = []
    for name, held_out, seed in (("calibration", False, 101), ("held-out", True, 102)):
        file = work / f"{name}.jsonl"
        write_seeds(file, prompts, seed, held_out=held_out)
        sets.append(texts(base, tokenizer, file))
    figures: dict[str, Any] = {
        "seeds": seeds, "epochs": epochs, "prompts": len(sets[1]), "prompt_tokens": PROMPT, "new_tokens": NEW,
        "nodes": NODES, "dtype": "float32", "variants": {},
    }  # fmt: skip
    for name, variant in VARIANTS.items():
        if only and name not in only:
            continue
        folder = trained(work, name, variant, records, epochs)
        heads = read_heads(folder, dtype=torch.float32).heads
        figures["variants"][name] = measure(base, heads, *sets)
        print(row(name, figures["variants"][name]), flush=True)
        if name == "own projections":
            for storage in STORED:
                stored = read_heads(folder, dtype=torch.float32).heads.quantized(storage)
                figures["variants"][f"own, {storage}"] = measure(base, stored, *sets)
                print(row(f"own, {storage}", figures["variants"][f"own, {storage}"]), flush=True)
    return figures


def row(name: str, figures: dict[str, Any]) -> str:
    """Return a row of the table in Markdown."""
    low, high = figures["interval"] or (float("nan"), float("nan"))
    shares = " ".join(f"{100 * value:.0f}" for value in figures["top1"])
    tops = " ".join(f"{100 * value:.0f}" for value in figures["top10"])
    rate = f"{figures['tokens_per_step']:.2f} ({low:.2f} to {high:.2f})"
    return f"| {name} | {shares} | {tops} | {rate} | {figures['bytes_bf16'] / 1e6:.2f} | {figures['same_texts']} |"


def main() -> None:
    """Run, print the table and append a record to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of data, states and runs")
    parser.add_argument("--seeds", type=int, default=1200, help="pieces that the model continues (default: 1200)")
    parser.add_argument("--epochs", type=float, default=2.0, help="over what it wrote (default: 2)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts to decode (default: 64)")
    parser.add_argument("--only", action="append", default=[], help="a variant; may be repeated")
    parser.add_argument("--dry", action="store_true", help="append nothing to the results")
    args = parser.parse_args()
    print("| heads | top-1, heads 1 to 4, % | top-10, % | tokens a step | MB a step, bf16 | same texts |")
    print("|---|---|---|---|---|---|")
    figures = run(args.work, args.seeds, args.epochs, args.prompts, args.only)
    if not args.dry:
        print(harness.write_record("head-variants-demo", figures))


if __name__ == "__main__":
    main()
