"""Measure steps on this device and choose the tree with the most tokens a second; it is the default here from then on.

Steps of the decode loop are timed at each number of nodes, batch and prefix length, as the backend in use runs them
(captured on a GPU). Of each size the best tree is taken: walked along the texts of medusa calibrate if the checkpoint
has them, else by the accuracies of the heads, which are the trainer's or published ones of other heads. The choice
stands in tuning.json beside the heads; where these are part of the package or may not be written to, in the user's
folder for caches (XDG_CACHE_HOME). Where device, model, heads, dtype or backend are others it is refused, with a
warning, and the checkpoint's own tree serves.

    medusa tune --model HEADS --dtype bfloat16 --device cuda --batch 1,4 --prefix 128,1024
    medusa tune --model HEADS --check
    medusa tune --model HEADS --sweep --prompts mt_bench.jsonl --limit 3 --sweep-out records.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from medusa_decoding.checkpoints import _folder
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.step_graph import BACKENDS, resolve_backend
from medusa_decoding.evaluation import read_prompts
from medusa_decoding.evaluation.conversation import AsItStands, Conversation, conversation_of
from medusa_decoding.evaluation.interval import WORDS
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.evaluation.run import PROMPT_TOKENS
from medusa_decoding.heads import MAX_TOP_K
from medusa_decoding.inputs import token_list
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.provenance import versions
from medusa_decoding.tree import Tree
from medusa_decoding.tuning import places, record, stored
from medusa_decoding.tuning.accuracy import Calibration
from medusa_decoding.tuning.choice import (
    CALIBRATION,
    Accuracies,
    best,
    candidates,
    find_accuracies,
    published,
    read_of,
    read_texts,
    trees_of,
)
from medusa_decoding.tuning.latency import Latency, longest_prefix, measure
from medusa_decoding.tuning.stored import Case, Place, Tuning
from medusa_decoding.tuning.sweep import Swept, Verdict, Written, judge, sweep

PREFIXES, NODES = (128, 1024), (1, 2, 4, 8, 16, 32, 64)


def counts(text: str) -> list[int]:
    """Parse different counts of at least 1, separated by commas, into ascending order."""
    return sorted({_arguments.at_least_one(part) for part in text.split(",")})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _arguments.add_model(parser)
    parser.add_argument("--batch", type=counts, default=[1], metavar="B,B", help="rows of the batch (default: 1)")
    parser.add_argument(
        "--prefix",
        type=counts,
        metavar="T,T",
        help=f"tokens before the step (default: {','.join(map(str, PREFIXES))}, as far as the model's context goes)",
    )
    parser.add_argument(
        "--nodes",
        type=counts,
        metavar="N,N",
        help="sizes of trees, root included; 1, plain decoding, is always measured (default: "
        f"{','.join(map(str, NODES))}, as far as the heads fill them)",
    )
    parser.add_argument(
        "--repeats",
        type=_arguments.at_least_one,
        default=7,
        metavar="N",
        help="rounds through all sizes, of three timed steps each (default: 7)",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="how steps run, see medusa generate (default: auto); the choice holds for this one",
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="of medusa calibrate, in place of the one beside the heads"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="in place of tuning.json beside the heads")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--check", action="store_true", help="instead: say whether the stored choice holds; 2 if not")
    other.add_argument(
        "--sweep",
        action="store_true",
        help="instead: write texts to --prompts with every tree of the stored choice, and say where the chosen one is",
    )
    swept = parser.add_argument_group("with --sweep")
    swept.add_argument("--prompts", nargs="+", metavar="FILE", help="as for medusa eval; of each the first turn")
    swept.add_argument("--limit", type=_arguments.at_least_one, metavar="N", help="the first N prompts of a category")
    swept.add_argument("--max-new-tokens", type=_arguments.at_least_one, metavar="N", help="of a text (default: 128)")
    swept.add_argument("--rounds", type=_arguments.at_least_one, metavar="R", help="times a text (default: 3)")
    swept.add_argument(
        "--sweep-out",
        type=Path,
        metavar="FILE",
        help="add the figures to this file as a JSON line, with machine, shapes, versions, commit and command",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # Nothing that is stored already is asked for when the model is loaded.
    parser.set_defaults(tree=Tree([]))


def run(args: argparse.Namespace) -> int:
    """Load, then measure and store, or check, or compare."""
    _arguments.check_device(args)
    for name in ("prompts", "limit", "max_new_tokens", "rounds", "sweep_out"):
        if getattr(args, name) is not None and not args.sweep:
            raise ValueError(f"--{name.replace('_', '-')}: expected --sweep with it, got none")
    if args.sweep and args.prompts is None:
        raise ValueError("--prompts: expected some files with --sweep, got none")
    if args.sweep and args.calibration is not None:
        raise ValueError(f"--calibration: expected none with --sweep, which takes stored trees, got {args.calibration}")
    if args.sweep_out is not None:
        check_place("--sweep-out", args.sweep_out)
    folder = _folder(_arguments._heads(args), None)
    if args.check or args.sweep:
        there = [place for place in places.places(folder) if place.is_file()]
        file = args.out or (there or places.places(folder))[0]
        if not file.is_file():
            raise ValueError(f"{file}: expected a file that `medusa tune` wrote, got none")
    else:
        file = args.out or places.place_of(folder)
        if args.out is None:
            file.parent.mkdir(parents=True, exist_ok=True)
        check_place("--out", file)
    prompts = read_prompts(args.prompts, limit=args.limit, turns=1) if args.sweep else []
    with _arguments.load_model(args) as model:
        if args.check:
            check(args, file, folder, model)
        elif args.sweep:
            compare(args, file, model, prompts)
        else:
            tune(args, file, folder, model)
    return 0


def check_place(name: str, file: Path) -> None:
    """Raise `ValueError` unless a file can be written there."""
    place = file.absolute().parent
    if file.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"{name}: expected a file in a folder that exists and may be written to, got {file}")


def tune(args: argparse.Namespace, file: Path, folder: Path, model: MedusaModel) -> None:
    """Measure, choose, store, print."""
    place = Place.of(model)
    accuracies, texts = accuracies_of(args, folder, model, place)
    sizes = sorted({1, *(args.nodes or (size for size in NODES if size <= accuracies.most_nodes))})
    trees = trees_of(accuracies.by_rank, sizes, texts)
    prefixes = args.prefix or [prefix for prefix in PREFIXES if prefix <= longest_prefix(model, trees)]
    if not prefixes:
        raise ValueError(f"--prefix: expected one that fits the context of {model.trunk.context_limit}, got none")
    measured: list[Latency] = []
    cases: list[Case] = []
    blocks = len(args.batch) * len(prefixes) * (args.repeats + 1) * len(trees)
    with tqdm(total=blocks, unit="block", disable=None) as bar:
        # The longest first: what does not fit is found out before anything is measured.
        for batch in reversed(args.batch):
            for prefix in reversed(prefixes):
                found = measure(
                    model, trees, batch=batch, prefix=prefix, repeats=args.repeats, on_block=lambda: bar.update()
                )
                weighed = candidates(accuracies.by_rank, {one.nodes: one.typical for one in found}, texts)
                cases.append(Case.of(found, best(weighed), weighed))
                measured += found
    tuning = Tuning.of(place, accuracies, cases, measured, weighed_by(texts))
    tuning.save(file)
    print(json.dumps({"file": str(file)} | tuning.to_json()) if args.json else as_text(tuning, file))


def accuracies_of(
    args: argparse.Namespace, folder: Path, model: MedusaModel, place: Place
) -> tuple[Accuracies, Calibration | None]:
    """Return what trees are weighed with: accuracies, and a calibration with texts to walk along, if there is one."""
    assert model.heads is not None
    heads, ranks = model.heads.num_heads, min(MAX_TOP_K, model.heads.num_candidates)
    if args.calibration is not None:
        file = args.calibration
        found = read_of(file, CALIBRATION, heads, ranks, place.heads, place.dtype)
    else:
        file = folder / CALIBRATION
        found = find_accuracies(folder, heads, ranks, place.heads, place.dtype) or published(heads, ranks)
    return found, read_texts(file, ranks) if found.source == CALIBRATION else None


def weighed_by(texts: Calibration | None) -> str:
    """Return how expected tokens are found, with texts or without."""
    return stored.INDEPENDENT if texts is None else stored.WALKED


def check(args: argparse.Namespace, file: Path, folder: Path, model: MedusaModel) -> None:
    """Say that a stored choice holds; raise `ValueError` where it does not."""
    tuning = stored.load_for(file, model)
    now = versions(*stored.LIBRARIES)
    notes = [
        f"{name} was {tuning.versions.get(name, 'missing')}, is {now.get(name, 'missing')}"
        for name in sorted({*tuning.versions, *now})
        if tuning.versions.get(name) != now.get(name)
    ]
    accuracies, texts = accuracies_of(args, folder, model, tuning.place)
    if weighed_by(texts) != tuning.weighed:
        notes.append(f"expected tokens were {tuning.weighed}, would be {weighed_by(texts)}")
    if accuracies.by_rank != tuning.accuracies.by_rank:
        notes.append(f"accuracies were {tuning.accuracies.source}, are {accuracies.source} with other values")
    if args.json:
        print(json.dumps({"file": str(file), "holds": True, "notes": notes}))
        return
    print(f"{file} holds: {tuning.place.device}, {tuning.place.dtype}, {tuning.place.backend}")
    for note in notes:
        print(f"  since then: {note}; medusa tune again takes it into account")


def compare(args: argparse.Namespace, file: Path, model: MedusaModel, prompts: Sequence[Prompt]) -> None:
    """Write texts with every tree of the stored choice and print where the chosen one stands."""
    tuning = stored.load_for(file, model)
    tokenizer = _arguments.load_tokenizer(args)
    eos = token_list(model.trunk.causal.generation_config.eos_token_id)
    chat, as_it_stands = conversation_of(tokenizer, None, eos), AsItStands(tokenizer, eos)
    new_tokens, rounds = args.max_new_tokens or 128, args.rounds or 3
    asked = [encoded(prompt, as_it_stands if prompt.is_text else chat) for prompt in prompts]
    asked = [ids for ids in asked if len(ids) + new_tokens <= model.trunk.context_limit]
    if not asked:
        raise ValueError(
            f"--prompts: expected one that leaves room for {new_tokens} new tokens in the context, got none"
        )
    middle = sorted(map(len, asked))[len(asked) // 2] + new_tokens // 2
    case = tuning.nearest(1, middle)
    trees = [size.tree for size in case.sizes]
    ends: dict[str, Any] = {"eos_token_id": chat.ends(eos)} if chat.ends(eos) else {}

    def write(text: int, tree: Tree) -> Written:
        prompt = torch.tensor([asked[text]])
        output = model.generate(prompt, max_new_tokens=new_tokens, tree=tree, metrics=True, **ends)
        assert isinstance(output, MedusaOutput)
        assert output.metrics is not None
        return Written(output.new_tokens[0] - 1, output.metrics.steps, output.metrics.decode_seconds)

    eager = resolve_backend(model.backend, model.trunk.device) == "eager"
    with tqdm(total=rounds * len(asked) * len(trees), unit="text", disable=None) as bar:
        found = sweep(write, trees, len(asked), rounds=rounds, warm_all=not eager, on_text=lambda: bar.update())
    verdict = judge(case.tree, found)
    figures = as_json(case, found, verdict, len(asked), new_tokens, rounds)
    if args.sweep_out is not None:
        place = tuning.place
        of_model = {"model": args.model or "the embedded demo checkpoint", "shapes": record.shapes(model)}
        how = {"dtype": place.dtype, "backend": place.backend, "batch": 1, "weighed": tuning.weighed}
        made = record.provenance(model.trunk.device)
        record.append(args.sweep_out, {"benchmark": "tune_sweep"} | of_model | how | figures | made)
    if args.json:
        print(json.dumps(figures))
        return
    print(f"{len(asked)} texts of up to {new_tokens} new tokens, {rounds} rounds; stored for prefix {case.prefix}:")
    print("   nodes  tokens a step  expected  tokens a second   slowest..fastest round")
    for one, size in zip(found, case.sizes, strict=True):
        mark = "*" if one.tree == case.tree else " "
        print(
            f" {mark}{one.tree.num_nodes:6}{one.tokens_per_step:15.2f}{size.tokens:10.2f}{one.rate:17.1f}"
            f"{one.low:11.1f}..{one.high:.1f}"
        )
    print(
        f"the chosen tree of {case.tree.num_nodes} nodes is number {verdict.rank} of {len(found)}, "
        f"{100 * verdict.behind:.1f} % behind the fastest ({verdict.best.num_nodes} nodes)"
    )
    if verdict.behind and verdict.of_best is not None and verdict.of_best.low is not None:
        low, high = verdict.of_best.low, verdict.of_best.high
        print(f"its rate over the fastest one's: {verdict.of_best.value:.3f} ({low:.3f} to {high:.3f}; {WORDS})")


def encoded(prompt: Prompt, conversation: Conversation) -> list[int]:
    """Return the tokens of a prompt's first turn."""
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    ids = conversation.encode([*messages, {"role": "user", "content": prompt.turns[0]}])
    return ids[:PROMPT_TOKENS] if prompt.is_text else ids


def as_json(
    case: Case, found: Sequence[Swept], verdict: Verdict, texts: int, new_tokens: int, rounds: int
) -> dict[str, Any]:
    """Return a comparison as JSON has it."""
    return {
        "texts": texts,
        "max_new_tokens": new_tokens,
        "rounds": rounds,
        "prefix": case.prefix,
        "trees": [
            {
                "nodes": one.tree.num_nodes,
                "choices": one.tree.choices,
                "tokens_per_step": one.tokens_per_step,
                "step_seconds": size.seconds,
                "expected_tokens": size.tokens,
                "tokens_per_second": one.rate,
                "slowest_round": one.low,
                "fastest_round": one.high,
            }
            for one, size in zip(found, case.sizes, strict=True)
        ],
        "chosen_nodes": case.tree.num_nodes,
        "best_nodes": verdict.best.num_nodes,
        "rank": verdict.rank,
        "behind": verdict.behind,
        "chosen_over_best": None if verdict.of_best is None else verdict.of_best.to_json(),
    }


def as_text(tuning: Tuning, file: Path) -> str:
    """Return what was measured and chosen, for a person."""
    place = tuning.place
    lines = [
        f"{place.device}; {place.dtype}, {place.backend} steps; {place.model}",
        f"accuracies of the heads: {tuning.accuracies}",
        "expected tokens a step: "
        + ("walked along the texts" if tuning.weighed == stored.WALKED else "as if heads were right independently"),
    ]
    for case in tuning.cases:
        plain = case.sizes[0]
        lines += [
            f"batch {case.batch}, prefix {case.prefix}:",
            "   nodes   ms a step       quartiles  steps  of plain  tokens a step  tokens a second and row",
        ]
        for size in case.sizes:
            mark = "*" if size.nodes == case.tree.num_nodes else " "
            lines.append(
                f" {mark}{size.nodes:6}{1e3 * size.seconds:12.3f}{1e3 * size.low:9.3f}..{1e3 * size.high:<7.3f}"
                f"{size.steps:5}{size.seconds / plain.seconds:10.2f}{size.tokens:15.2f}{size.rate:25.1f}"
            )
        chosen = "plain decoding" if case.tree.num_nodes == 1 else f"the tree of {case.tree.num_nodes} nodes"
        lines.append(f"  chosen: {chosen}, {case.chosen.rate / plain.rate:.2f} times plain decoding's rate expected")
    return "\n".join([*lines, f"stored in {file}"])
