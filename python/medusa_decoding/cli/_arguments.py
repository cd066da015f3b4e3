"""Arguments that several commands share, and what they stand for: the model, decoding, sampling, a chat template."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from medusa_decoding.checkpoints import find_base_model, find_base_revision, pretrained
from medusa_decoding.decode.runtime.steps import BACKENDS
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.generation.settings import ACCEPTANCES
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOOKUP = "+lookup:"


def text(value: str) -> str:
    """Parse a text, which is UTF-8 whatever the locale says.

    Python keeps bytes of a command line that the locale has no characters for as lone surrogates.
    """
    try:
        return value if value.isascii() else os.fsencode(value).decode("utf-8")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"expected UTF-8 text, got {ascii(value)[:60]}") from error


def at_least_one(text: str) -> int:
    """Parse a count of at least 1."""
    return _whole(text, 1)


def at_least_zero(text: str) -> int:
    """Parse a count of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from error
    if value < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
    return value


def number(words: str, within: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of numbers that `within` accepts; `words` say which those are."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not within(value):
            raise argparse.ArgumentTypeError(f"expected a number {words}, got {text}")
        return value

    return parse


temperature = number("from 0", lambda value: 0 <= value < math.inf)
share = number("above 0 and at most 1", lambda value: 0 < value <= 1)
share_or_none = number("from 0 to 1", lambda value: 0 <= value <= 1)
proper_share = number("above 0 and below 1", lambda value: 0 < value < 1)
factor = number("above 0", lambda value: 0 < value < math.inf)


def tree(text: str) -> Tree | Literal["auto"]:
    """Parse a tree: a JSON file, `chain:4`, `cartesian:7,6`, `root` (plain decoding), `dynamic:16,4` (nodes, depth).

    All with or without `+lookup:8`. A file is read as it is named, also where its name ends like that. `auto` stands
    for itself.
    """
    if text == "auto":
        return "auto"
    shape, plus, length = text.rpartition(LOOKUP)
    if not plus or Path(text).is_file():
        return _shape(text)
    try:
        return _shape(shape).with_lookup(int(length))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _shape(text: str) -> Tree:
    kind, _, rest = text.partition(":")
    try:
        if text == "root":
            return Tree([])
        if kind == "chain":
            return Tree.chain(int(rest))
        if kind == "cartesian":
            return Tree.cartesian([int(width) for width in rest.split(",")])
        if kind == "dynamic":
            numbers = [int(number) for number in rest.split(",")]
            if len(numbers) not in (2, 3):
                raise ValueError("expected NODES,DEPTH or NODES,DEPTH,GUESSES")
            return Tree.dynamic(*numbers)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(
            "expected a JSON file, root, chain:LENGTH, cartesian:WIDTH,WIDTH.., dynamic:NODES,DEPTH or auto, "
            f"got {text!r}"
        )
    try:
        return Tree.load(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_model(parser: argparse.ArgumentParser, default: str = "the embedded demo checkpoint") -> None:
    """Add what names a model and its place."""
    parser.add_argument("--model", metavar="HEADS", help=f"folder or hub id of the heads (default: {default})")
    parser.add_argument(
        "--base-model", metavar="BASE", help="folder or hub id of the base model (default: the one the heads name)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's; float32 on a CPU)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")


def add_decoding(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """Add how decoding runs; `new_tokens` is the default limit."""
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, default=new_tokens, metavar="N", help=f"default: {new_tokens}"
    )
    parser.add_argument(
        "--tree",
        type=tree,
        metavar="TREE",
        help="JSON file, chain:4, cartesian:7,6 or root (plain decoding); dynamic:16,4 for the 16 likeliest nodes of "
        "each step, at most 4 deep (a third number: drafts a head); +lookup:8 behind any of them adds a branch of 8 "
        "tokens copied from the text; auto: chosen while it runs, by what steps take and give; "
        "default: the checkpoint's",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="how steps run: eager; compiled by torch.compile first (seconds; needs a C++ compiler on a CPU); graph: "
        "captured as a CUDA graph; auto: graph on CUDA, else eager (default)",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON, one object a line")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add how tokens are chosen; `sampling` makes arguments of `generate` of it."""
    group = parser.add_argument_group(
        "choosing tokens",
        "Greedy unless --temperature is above 0 or --do-sample is given.\n"
        "When drawing, what is not given comes from the base model's own generation config.",
    )
    group.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="above 0: draw tokens at this temperature (implies --do-sample); 0: greedy, the default",
    )
    group.add_argument("--do-sample", action="store_true", help="draw tokens from the model's distribution")
    group.add_argument("--top-p", type=share, metavar="P", help="draw from the likeliest tokens that add up to P")
    group.add_argument("--top-k", type=at_least_zero, metavar="K", help="draw from the K likeliest tokens; 0 for all")
    group.add_argument(
        "--min-p", type=share_or_none, metavar="P", help="draw from tokens at least P times as likely as the likeliest"
    )
    group.add_argument("--seed", type=at_least_zero, metavar="N", help="of drawing: the same seed, the same text")
    group.add_argument(
        "--repetition-penalty",
        type=factor,
        metavar="X",
        help="above 1: tokens that were there already become unlikelier",
    )
    group.add_argument(
        "--stop",
        type=text,
        action="append",
        metavar="TEXT",
        help="end behind the token that completes TEXT; may be repeated",
    )
    group.add_argument(
        "--acceptance",
        choices=ACCEPTANCES,
        default="lossless",
        help="lossless: the base model's own text (default); typical: the paper's typical acceptance, which is LOSSY: "
        "likely drafts are kept though the model alone would write another text",
    )
    group.add_argument(
        "--posterior-threshold", type=share, metavar="E", help="epsilon of typical acceptance (default: 0.09)"
    )
    group.add_argument(
        "--posterior-alpha", type=proper_share, metavar="D", help="delta of typical acceptance (default: 0.3)"
    )


DRAWING = ("top_p", "top_k", "min_p")
TYPICAL = ("posterior_threshold", "posterior_alpha")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `MedusaModel.generate` that `add_sampling`'s arguments stand for, stop strings apart.

    Raises:
        ValueError: arguments that do not go together; it names them.
    """
    typical, drawn = args.acceptance == "typical", drawing(args)
    if typical and args.do_sample:
        raise ValueError("--do-sample: expected --acceptance lossless with it, got typical, which draws nothing")
    if args.temperature == 0 and (typical or args.do_sample):
        raise ValueError("--temperature: expected above 0 with --do-sample or --acceptance typical, got 0")
    for names, met, wanted in (
        (DRAWING, drawn, "--temperature above 0 or --do-sample"),
        (TYPICAL, typical, "--acceptance typical"),
    ):
        for name in names:
            if not met and getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: expected {wanted} with it, got none")
    taken = ("acceptance", "repetition_penalty", "seed", *DRAWING, *TYPICAL)
    given = {name: getattr(args, name) for name in taken}
    if drawn or typical:
        given["temperature"] = args.temperature
    if drawn:
        given["do_sample"] = True
    return {name: value for name, value in given.items() if value is not None}


def drawing(args: argparse.Namespace) -> bool:
    """Return whether tokens are drawn."""
    return args.acceptance == "lossless" and (args.do_sample or bool(args.temperature))


def add_template(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a chat template."""
    parser.add_argument(
        "--template",
        metavar="FILE",
        help="a chat template in Jinja, as tokenizers have one, in place of the tokenizer's; vicuna: that of Vicuna "
        "models, as in training; plain: a simple one for models without (`User: ..`, `Assistant: ..`)",
    )


def check_device(args: argparse.Namespace) -> None:
    """Raise `ValueError` where CUDA is asked for and torch sees none."""
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: expected cpu, because torch sees no CUDA device, got {args.device}")


def load_tokenizer(args: argparse.Namespace) -> Any:
    """Return the base model's tokenizer, of the revision that the model itself is loaded at.

    Raises:
        ValueError: no base model known, or none with a tokenizer there.
    """
    base, revision = _base_model(args), find_base_revision(_heads(args), base_model=args.base_model or None)
    return pretrained.load_tokenizer(base, revision, argument="base model (--base-model names another)")


def load_model(args: argparse.Namespace, **placed: Any) -> MedusaModel:
    """Load heads and base model.

    Args:
        args: of `add_model` and `add_decoding`.
        placed: where to, for transformers' `from_pretrained`; by default the device asked for.

    Raises:
        ValueError: see `MedusaModel.from_pretrained`; no base model known.
    """
    placed = placed or {"device_map": None if args.device == "cpu" else args.device}
    dtype = DTYPES[args.dtype] if args.dtype else "auto" if args.device != "cpu" else DTYPES["float32"]
    return MedusaModel.from_pretrained(
        _heads(args), _base_model(args), dtype=dtype, tree=args.tree, backend=args.backend, **placed
    )


def _heads(args: argparse.Namespace) -> str:
    return args.model or str(CHECKPOINT / "heads")


def _base_model(args: argparse.Namespace) -> str:
    base = args.base_model or find_base_model(_heads(args))
    if base is None:
        raise ValueError(f"--base-model: expected a folder or hub id, because {_heads(args)} names none, got none")
    return str(base)
