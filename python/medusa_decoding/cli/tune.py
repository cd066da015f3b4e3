"""Measure steps on this device and choose the tree with the most tokens a second; it is the default here from then on.

Steps of the decode loop are timed at each number of nodes, batch and prefix length, as the backend in use runs them
(captured on a GPU). Of each size the best tree is taken: walked along the texts of medusa calibrate if the checkpoint
has them, else by the accuracies of the heads, which are the trainer's or published ones of other heads. Walked trees
are weighed along the texts that they were searched on, which flatters large trees a little, the less the more texts
there are; --sweep with other prompts shows what is left of it.

The choice stands in tuning.json beside the heads; where these are part of the package or may not be written to, in the
user's folder for caches (XDG_CACHE_HOME). Where device, model, heads, dtype or backend are others it is refused, with a
warning, and the checkpoint's own tree serves.

    medusa tune --model HEADS --dtype bfloat16 --device cuda --batch 1,4 --prefix 128,1024
    medusa tune --model HEADS --check
    medusa tune --model HEADS --sweep --prompts mt_bench.jsonl --limit 3 --sweep-out records.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm.auto import tqdm

from medusa_decoding.checkpoints import _folder, tuning_file, tuning_paths
from medusa_decoding.checkpoints.tuning_file import Place, Tuning
from medusa_decoding.cli import _arguments
from medusa_decoding.cli._sweep import compare
from medusa_decoding.cli._sweep import encoded as encoded  # which benchmarks take from here
from medusa_decoding.decode.runtime.steps import BACKENDS
from medusa_decoding.evaluation import read_prompts
from medusa_decoding.files import only_writer
from medusa_decoding.heads import MAX_TOP_K
from medusa_decoding.model import MedusaModel
from medusa_decoding.provenance import versions
from medusa_decoding.trees.calibration import Calibration
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.cases import Case
from medusa_decoding.tuning.select import (
    CALIBRATION,
    Accuracies,
    Source,
    best,
    find_accuracies,
    published,
    read_of,
    read_texts,
    tokens_of,
    trees_of,
    weigh,
)
from medusa_decoding.tuning.step_timer import Latency, longest_prefix, measure

PREFIXES, NODES = (128, 1024), (1, 2, 4, 8, 16, 32, 64)
FEW_TEXTS = 20
"""Below so many texts, trees that fit them best are not to be trusted on others."""


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
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where the choice is stored, or with --check and --sweep read from, in place of tuning.json beside the "
        "heads or the user's folder for caches; the loader does not look there",
    )
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
    for name in ("out", "sweep_out", "calibration"):
        if getattr(args, name) is not None:
            setattr(args, name, tuning_paths.expanded(getattr(args, name)))
    if args.calibration is not None and not args.calibration.is_file():
        raise ValueError(f"--calibration: expected a file that `medusa calibrate` wrote, got {args.calibration}")
    if args.sweep_out is not None:
        tuning_paths.check_place("--sweep-out", args.sweep_out)
    folder = _folder(_arguments._heads(args), None)
    # Which file it is depends on the model; that there is one, or a place for it, does not.
    if args.check or args.sweep:
        there = args.out.is_file() if args.out is not None else bool(tuning_paths.places(folder, ""))
        if not there:
            raise nothing_stored(args, folder)
    elif args.out is not None:
        tuning_paths.check_place("--out", args.out)
    else:
        place = tuning_paths.folder_of(folder)
        place.mkdir(parents=True, exist_ok=True)
        tuning_paths.check_place("--out", place / tuning_paths.FILE)
    prompts = read_prompts(args.prompts, limit=args.limit, turns=1) if args.sweep else []
    with _arguments.load_model(args) as model:
        if args.check:
            check(args, folder, model)
        elif args.sweep:
            compare(args, read_stored(args, folder, model)[1], model, prompts)
        else:
            tune(args, folder, model)
    return 0


def nothing_stored(args: argparse.Namespace, folder: Path) -> ValueError:
    """Return what is said where nothing is stored."""
    own = folder / tuning_paths.FILE
    file = args.out or (own if tuning_paths.is_users(folder) else tuning_paths.cache_of(folder) or own)
    return ValueError(f"{file}: expected a file that `medusa tune` wrote, got none")


def read_stored(args: argparse.Namespace, folder: Path, model: MedusaModel) -> tuple[Path, Tuning]:
    """Return the file that --out names, or else the one that the loader takes, and what it says.

    Raises:
        ValueError: none that holds for the model.
    """
    if args.out is not None:
        return args.out, tuning_file.load_for(args.out, model)
    found = tuning_file.find(folder, model)
    if found is None:
        raise nothing_stored(args, folder)
    return found


def tune(args: argparse.Namespace, folder: Path, model: MedusaModel) -> None:
    """Measure, choose, store, print."""
    place = Place.of(model)
    file = args.out or tuning_paths.place_of(folder, place.here)
    with only_writer("--out", file):
        measure_and_store(args, folder, model, place, file)


def measure_and_store(args: argparse.Namespace, folder: Path, model: MedusaModel, place: Place, file: Path) -> None:
    """Measure, choose and store in a file that nobody else writes, print."""
    accuracies, texts, source = accuracies_of(args.calibration, folder, model, place)
    warn_of_few(texts)
    sizes = sorted({1, *(args.nodes or (size for size in NODES if size <= accuracies.most_nodes))})
    trees = trees_of(accuracies.by_rank, sizes, texts)
    tokens = tokens_of(trees, accuracies.by_rank, texts)
    prefixes = args.prefix or [prefix for prefix in PREFIXES if prefix <= longest_prefix(model, trees)]
    if not prefixes:
        raise ValueError(f"--prefix: expected one that fits the context of {model.backbone.context_limit}, got none")
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
                weighed = weigh(trees, tokens, {one.nodes: one.typical for one in found})
                cases.append(Case.of(found, best(weighed), weighed))
                measured += found
    tuning = Tuning.of(place, accuracies, cases, measured, weighed_by(texts), source)
    tuning.save(file)
    print(json.dumps({"file": str(file)} | tuning.to_json()) if args.json else as_text(tuning, file))


def warn_of_few(texts: Calibration | None) -> None:
    """Say so where there are too few texts to walk along."""
    count = 0 if texts is None else sum(len(text) > 0 for of_prompt in texts.texts or () for text in of_prompt)
    if 0 < count < FEW_TEXTS:
        print(
            f"medusa: the calibration has {count} texts; trees that fit so few best may do worse on others (from "
            f"{FEW_TEXTS} on this is not said)",
            file=sys.stderr,
        )


def accuracies_of(
    calibration: Path | None, folder: Path, model: MedusaModel, place: Place
) -> tuple[Accuracies, Calibration | None, Source | None]:
    """Return what trees are weighed with.

    Args:
        calibration: a file of `medusa calibrate`, in place of what stands beside the heads.
        folder: of the heads.
        model: the model.
        place: where it runs.

    Returns:
        Accuracies; a calibration with texts to walk along, if there is one; what to keep of the file.
    """
    assert model.heads is not None
    heads, ranks = model.heads.num_heads, min(MAX_TOP_K, model.heads.num_candidates)
    made = place.heads, place.dtype, place.base_model
    if calibration is not None:
        found = read_of(calibration, CALIBRATION, heads, ranks, *made)
    else:
        calibration = folder / CALIBRATION
        found = find_accuracies(folder, heads, ranks, *made) or published(heads, ranks)
    if found.source != CALIBRATION:
        return found, None, None
    return found, read_texts(calibration, ranks), Source.of(calibration, folder, place.dtype)


def weighed_by(texts: Calibration | None) -> str:
    """Return how expected tokens are found, with texts or without."""
    return tuning_file.INDEPENDENT if texts is None else tuning_file.WALKED


def check(args: argparse.Namespace, folder: Path, model: MedusaModel) -> None:
    """Say that a stored choice holds; raise `ValueError` where it does not."""
    file, tuning = read_stored(args, folder, model)
    now = versions(*tuning_file.LIBRARIES)
    notes = [
        f"{name} was {tuning.versions.get(name, 'missing')}, is {now.get(name, 'missing')}"
        for name in sorted({*tuning.versions, *now})
        if tuning.versions.get(name) != now.get(name)
    ]
    notes += changes_of(tuning, args.calibration, folder, model)
    if args.json:
        print(json.dumps({"file": str(file), "holds": True, "notes": notes}))
        return
    print(f"{file} holds: {tuning.place.device}, {tuning.place.dtype}, {tuning.place.backend}")
    if tuning.calibration is not None:
        print(f"  weighed by {tuning.calibration}")
    for note in notes:
        print(f"  since then: {note}; medusa tune again takes it into account")


def changes_of(tuning: Tuning, calibration: Path | None, folder: Path, model: MedusaModel) -> list[str]:
    """Say what trees would be weighed with otherwise now: by the same calibration, or the one that is named."""
    before = tuning.calibration
    if calibration is None and before is not None:
        calibration = folder / before.path  # an absolute path stays what it is
        if not calibration.is_file():
            return [f"the calibration {before.path} is gone"]
    try:
        accuracies, texts, source = accuracies_of(calibration, folder, model, tuning.place)
    except ValueError as error:
        return [f"calibration: {error}"]
    notes = []
    if before is not None and source is not None and source.hash != before.hash:
        other = f"was {before.path}, is {source.path}"
        notes.append(f"the calibration {f'{before.path} has changed' if source.path == before.path else other}")
    if weighed_by(texts) != tuning.weighed:
        notes.append(f"expected tokens were {tuning.weighed}, would be {weighed_by(texts)}")
    if accuracies.by_rank != tuning.accuracies.by_rank:
        notes.append(f"accuracies were {tuning.accuracies.source}, are {accuracies.source} with other values")
    return notes


def as_text(tuning: Tuning, file: Path) -> str:
    """Return what was measured and chosen, for a person."""
    place = tuning.place
    lines = [
        f"{place.device}; {place.dtype}, {place.backend} steps; {place.model}",
        f"accuracies of the heads: {tuning.accuracies}",
    ]
    source = tuning.calibration
    if source is not None:
        lines.append(f"calibration: {source}")
        if not source.checked:
            lines.append(
                f"  not checked to be of these heads and this base model: it says nothing of them in {place.dtype}"
            )
    if tuning.weighed == tuning_file.WALKED:
        lines += [
            "expected tokens a step: walked along the texts that the trees were searched on, so that they are a little",
            "  too high, the more the larger the tree and the fewer the texts (--sweep with other prompts measures it)",
        ]
    else:
        lines.append("expected tokens a step: as if heads were right independently")
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
