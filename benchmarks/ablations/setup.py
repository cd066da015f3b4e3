"""What every ablation starts from: the arguments, the model, its prompts, and how often its heads are right.

Without `--model` and `--prompts`: the embedded demo model in float32 and requests with names and combinations that it
was not trained on. This module measures no time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checks import token_list
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.runtime.steps import BACKENDS, resolve_backend
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation import read_prompts
from medusa_decoding.evaluation.own_text import accuracy_of_texts
from medusa_decoding.evaluation.prompts import Conversations
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees import tree
from medusa_decoding.trees.tree import Tree
from recipes.demo.requests import draw, encoded

DEMO = "the embedded demo checkpoint"
DEMO_PROMPTS = "held-out requests of the demo model"
NEW = 256
"""Most new tokens of an answer of the demo model."""


@dataclass(frozen=True)
class Asked:
    """One prompt.

    Attributes:
        number: its place among those measured, from 0.
        ids: int64 [1, T], on the CPU.
    """

    number: int
    ids: torch.Tensor


@dataclass
class Bench:
    """A model and its prompts.

    Attributes:
        model: with its heads.
        tokenizer: the base model's.
        asked: what is measured on.
        tuning: other prompts, on which the heads are counted and trees are chosen.
        new_tokens: of each text at most.
        ends: arguments of `MedusaModel.generate` that say what ends a text.
        seed: of all random choices.
        described: model and prompts in words and numbers, for the record.
    """

    model: MedusaModel
    tokenizer: Any
    asked: list[Asked]
    tuning: list[Asked]
    new_tokens: int
    ends: dict[str, Any]
    seed: int = 0
    described: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether texts must be the plain loop's token for token: in float32."""
        return self.model.backbone.dtype == torch.float32

    @property
    def captured(self) -> bool:
        """Whether steps are compiled or captured at their first use."""
        backbone = self.model.backbone
        return resolve_backend(self.model.backend, backbone.device, backbone.peers.size) != "eager"

    @property
    def num_heads(self) -> int:
        """K."""
        return heads_of(self.model).num_heads


def bench_of(
    model: MedusaModel, prompts: Sequence[torch.Tensor], tuning: Sequence[torch.Tensor], new_tokens: int
) -> Bench:
    """Return a bench of prompts int64 [1, T], whose texts end at the model's EOS tokens."""
    asked, other = ([Asked(i, ids) for i, ids in enumerate(some)] for some in (prompts, tuning))
    eos = token_list(model.backbone.causal_lm.generation_config.eos_token_id)
    return Bench(model, None, asked, other, new_tokens, {"eos_token_id": eos})


def prompts(held_out: bool, count: int, seed: int) -> list[torch.Tensor]:
    """Draw requests of one side as the demo model's prompts, int64 [1, T] each; the kinds of request take turns."""
    return encoded(pretrained.load_tokenizer(CHECKPOINT / "base"), draw(count, seed, held_out=held_out))


def heads_of(model: MedusaModel) -> Any:
    """Return a model's heads.

    Raises:
        ValueError: it has none.
    """
    if model.heads is None:
        raise ValueError("model: expected one with heads, got one without")
    return model.heads


def add_arguments(parser: argparse.ArgumentParser, *, limit: int, files: bool = False) -> None:
    """Declare what all ablations take.

    Args:
        parser: of one ablation.
        limit: prompts by default.
        files: whether prompts must come from files.
    """
    _arguments.add_model(parser)
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="how steps run (default: auto)")
    positive = _arguments.at_least_one
    words = "as for medusa eval" + ("" if files else f"; of each the first turn (default: {DEMO_PROMPTS})")
    parser.add_argument("--prompts", nargs="+", required=files, metavar="FILE", help=words)
    parser.add_argument("--categories", nargs="+", metavar="NAME", help="of the files, only these")
    words = "prompts; of files, the first N of each category (default: %(default)s)"
    parser.add_argument("--limit", type=positive, default=limit, metavar="N", help=words)
    if not files:
        words = "prompts on which heads are counted and trees chosen; of files, so many are set aside (default: 16)"
        parser.add_argument("--tuning", type=positive, default=16, metavar="N", help=words)
    parser.add_argument("--max-new-tokens", type=positive, default=NEW, metavar="N", help="default: %(default)s")
    _arguments.add_template(parser)
    parser.add_argument("--seed", type=_arguments.at_least_zero, default=0, help="default: 0")
    words = "of records and pictures (default: benchmarks/results/ablations)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=words)
    words = "write the record only, where matplotlib is missing; see redraw"
    parser.add_argument("--no-picture", action="store_true", help=words)
    parser.set_defaults(tree=Tree([]))


def load(args: argparse.Namespace) -> Bench:
    """Load the model and read the prompts.

    Raises:
        ValueError: bad arguments, too few prompts; it names which.
    """
    _arguments.resolve_device(args)
    if args.prompts is None:
        if args.model is not None or args.base_model is not None:
            raise ValueError("--prompts is needed for a model of your own")
        for name in ("categories", "template"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} needs --prompts")
    tokenizer = _arguments.load_tokenizer(args)
    model = _arguments.load_model(args)
    try:
        heads_of(model)
        bench = _with_prompts(args, model, tokenizer)
    except BaseException:
        model.undo()
        raise
    bench.described = _described(args, bench)
    return bench


def count_heads(bench: Bench, model: MedusaModel | None = None) -> list[list[float]]:
    """Count how often each head's candidates are right about the model's own text on the tuning prompts, by rank."""
    model = model or bench.model
    texts = []
    for one in bench.tuning:
        output = model.generate(one.ids, max_new_tokens=bench.new_tokens, tree=Tree([]), **bench.ends)
        assert isinstance(output, MedusaOutput)
        texts.append((output.sequences[0].tolist(), one.ids.shape[1]))
    return [row[: heads_of(model).num_candidates] for row in accuracy_of_texts(model, texts).by_rank]


def most_nodes(accuracies: Sequence[Sequence[float]]) -> int:
    """Return the nodes of the largest tree that the heads can fill, at most 256."""
    return tree.most_nodes(map(len, accuracies))


def sizes(text: str) -> list[int]:
    """Parse different sizes of trees of at least 2 nodes, separated by commas, into ascending order."""
    found = sorted({int(part) for part in text.split(",")})
    if found[0] < 2 or found[-1] > 256:
        raise argparse.ArgumentTypeError(f"expected sizes from 2 to 256 nodes, got {text}")
    return found


def fitting(asked: Sequence[int], accuracies: Sequence[Sequence[float]]) -> list[int]:
    """Return the sizes that the heads can fill.

    Raises:
        ValueError: none of them.
    """
    most = most_nodes(accuracies)
    found = [size for size in asked if size <= most]
    if not found:
        raise ValueError(f"--nodes: expected sizes up to {most}, which these heads can fill, got {list(asked)}")
    return found


def set_aside(found: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Divide prompts into those measured on and `count` others, evenly spread over all of them.

    Raises:
        ValueError: nothing is left.
    """
    if count >= len(found):
        raise ValueError(f"--tuning: expected below {len(found)} (the prompts that fit the context), got {count}")
    chosen = {(2 * i + 1) * len(found) // (2 * count) for i in range(count)}
    return [one for i, one in enumerate(found) if i not in chosen], [found[i] for i in sorted(chosen)]


def _with_prompts(args: argparse.Namespace, model: MedusaModel, tokenizer: Any) -> Bench:
    conversations, left_out = Conversations(model, tokenizer, args.template), 0
    if args.prompts is None:
        rows = prompts(held_out=True, count=args.limit, seed=11)
        tuning = prompts(held_out=False, count=args.tuning, seed=3)
    else:
        read = read_prompts(args.prompts, categories=args.categories, limit=args.limit, turns=1, distinct=True)
        found = [torch.tensor([conversations.encode(one)]) for one in read]
        fits = [ids for ids in found if ids.shape[1] + args.max_new_tokens <= model.backbone.context_limit]
        left_out = len(found) - len(fits)
        if not fits:
            most = model.backbone.context_limit - args.max_new_tokens
            raise ValueError(f"--prompts: expected one of at most {most} tokens, got {len(found)} longer ones")
        rows, tuning = set_aside(fits, args.tuning)
    ends = {"eos_token_id": []} | conversations.ending()
    asked, other = ([Asked(i, ids) for i, ids in enumerate(some)] for some in (rows, tuning))
    bench = Bench(model, tokenizer, asked, other, args.max_new_tokens, ends, args.seed)
    bench.described["left_out"] = left_out
    return bench


def _described(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    lengths = [one.ids.shape[1] for one in bench.asked]
    return described_model(args, bench.model) | {
        "prompts": len(bench.asked),
        "prompts_from": DEMO_PROMPTS if args.prompts is None else [Path(path).name for path in args.prompts],
        "prompts_too_long": bench.described["left_out"],
        "prompt_tokens": {"least": min(lengths), "median": statistics.median(lengths), "most": max(lengths)},
        "new_tokens": bench.new_tokens,
        "batch": 1,
        "tuning_prompts": len(bench.tuning),
        "seed": bench.seed,
    }


def described_model(args: argparse.Namespace, model: MedusaModel) -> dict[str, Any]:
    """Return what a record says of a model."""
    backbone, heads = model.backbone, heads_of(model)
    config = backbone.config
    return {
        "model": DEMO if args.model is None else "/".join(Path(args.model).parts[-3:]),
        "shape": {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "vocabulary": config.vocab_size,
            "parameters": sum(p.numel() for p in backbone.causal_lm.parameters()),
            "heads": heads.num_heads,
            "head_parameters": sum(p.numel() for p in heads.parameters()),
        },
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "device": backbone.device.type,
        "backend": resolve_backend(model.backend, backbone.device, backbone.peers.size),
    }


def folder(args: argparse.Namespace) -> Path:
    """Return the folder of this machine's records."""
    return (args.out or harness.RESULTS / "ablations") / harness.machine_slug()
