"""Arguments shared by several commands: model, decoding, sampling and chat template.

Only the functions that load something import torch, so that --help and typing errors answer at once.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medusa_decoding.options import ACCEPTANCES, ACTIVATION_DTYPES, BACKENDS, CACHE_DTYPES, DTYPES, PROMPT_TOKENS, TURNS
from medusa_decoding.serving.loading import find_model, heads_of
from medusa_decoding.serving.loading import load_model as load_model
from medusa_decoding.serving.loading import load_tokenizer as load_tokenizer
from medusa_decoding.serving.loading import resolve_device as resolve_device
from medusa_decoding.trees.parsing import parse_tree
from medusa_decoding.trees.tree import Tree

if TYPE_CHECKING:
    import torch


def text(value: str) -> str:
    """Parse text as UTF-8 whatever the locale says.

    Python keeps command line bytes that the locale cannot decode as lone surrogates.
    """
    try:
        return value if value.isascii() else os.fsencode(value).decode("utf-8")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"expected UTF-8 text, got {ascii(value)[:60]}") from error


def path(value: str) -> Path:
    """Parse a path, with the home folder for `~`, which the shell does not replace after `=`."""
    return Path(os.path.expanduser(value))


def model(value: str) -> str:
    """Parse the name of a model, see `serving.loading.find_model`."""
    try:
        return find_model(text(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def at_least_one(text: str) -> int:
    """Parse a count of at least 1."""
    return _count(text, 1)


def at_least_zero(text: str) -> int:
    """Parse a count of at least 0."""
    return _count(text, 0)


def _count(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from error
    if value < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
    return value


def number(words: str, within: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser for numbers that `within` accepts; `words` describe them in errors."""

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


def counts(text: str) -> list[int]:
    """Parse different counts of at least 1, separated by commas, into ascending order."""
    return sorted({at_least_one(part) for part in text.split(",")})


def tree(text: str) -> Tree | Literal["auto"]:
    """Parse a tree, see `trees.parsing.parse_tree`."""
    try:
        return parse_tree(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    name: str,
    parse: Callable[[str], Any],
    words: str,
    default: Any = None,
) -> None:
    """Add an option that takes one value; its name has the metavariable, as in "--limit N".

    The default is added to the words of the help unless it is None.
    """
    flag, metavar = name.split()
    if default is not None:
        words += f" (default: {','.join(map(str, default)) if isinstance(default, (list, tuple)) else default})"
    parser.add_argument(flag, type=parse, metavar=metavar, default=default, help=words)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the model, its dtype and its device."""
    words = (
        "folder or hub id of the heads, smollm2 for those in this package, or a model without heads, as for "
        "--base-model (default: the embedded demo)"
    )
    add_option(parser, "--model HEADS", model, words)
    words = "the base model: a folder, a hub id or a GGUF file (default: the one the heads name)"
    add_option(parser, "--base-model BASE", model, words)
    add_placement(parser)


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Add `--dtype` and `--device`."""
    words = (
        "dtype of the weights (default: the checkpoint's, as in Python); in float32 greedy text is exactly the model's"
    )
    parser.add_argument("--dtype", choices=DTYPES, help=words)
    words = "cpu, cuda or cuda:1; auto: cuda if there is a GPU that torch can use, else cpu (default)"
    parser.add_argument("--device", default="auto", help=words)


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add `--prompts`, `--limit`, `--turns` and `--prompt-tokens`."""
    words = "files, folders or hub names; a prompt's category is its own, or else its file's name; repeats are left out"
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help=words)
    add_option(parser, "--limit N", at_least_one, "first N prompts per category (default: all)")
    add_option(parser, "--turns N", at_least_one, "at most N turns per prompt", TURNS)
    words = "of a plain text, the first N tokens are the prompt"
    add_option(parser, "--prompt-tokens N", at_least_one, words, PROMPT_TOKENS)


def add_backend(parser: argparse.ArgumentParser, words: str = "how steps run, as in medusa generate") -> None:
    """Add `--backend`."""
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help=words)


def add_dtypes(parser: argparse.ArgumentParser) -> None:
    """Add `--cache-dtype` and `--activation-dtype`."""
    words = (
        "int8: keys and values in 8 bits, about half the memory of bfloat16; LOSSY (default: the dtype of the weights)"
    )
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, help=words)
    words = "int8: layers in int8 or int4 round their inputs to 8 bits, faster on a CPU; LOSSY (default: they do not)"
    parser.add_argument("--activation-dtype", choices=ACTIVATION_DTYPES, help=words)


def add_decoding(parser: argparse.ArgumentParser, new_tokens: int | str) -> None:
    """Add the arguments of decoding; `new_tokens` is the default limit, or says what it is where None stands for it."""
    if isinstance(new_tokens, str):
        add_option(parser, "--max-new-tokens N", at_least_one, f"new tokens at most (default: {new_tokens})")
    else:
        add_option(parser, "--max-new-tokens N", at_least_one, "new tokens at most", new_tokens)
    add_option(
        parser,
        "--tree TREE",
        tree,
        "a JSON file, chain:4, cartesian:7,6 or root (plain decoding); dynamic:16,4 verifies the 16 most likely nodes "
        "of each step, at most 4 deep (a third number: draft tokens per head); +lookup:8 after any of them adds a "
        "branch of 8 tokens copied from the text; auto picks a tree for each step from measured step times and "
        "acceptance (default: the tree that medusa tune has stored for this device, else auto; on a CPU also tokens "
        "copied from the text, where that promises more)",
    )
    add_backend(
        parser,
        "how steps run: eager; compiled: through torch.compile (takes seconds; needs a C++ compiler on a CPU); graph: "
        "as a captured CUDA graph; auto: graph on CUDA, else eager (default)",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON, one object per line")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of token selection, which `sampling` turns into arguments of `generate`."""
    group = parser.add_argument_group(
        "token selection",
        "Greedy unless --temperature is above 0 or --do-sample is given.\n"
        "When sampling, settings that are not given come from the base model's generation config.",
    )
    words = "above 0: sample at this temperature (implies --do-sample); 0: greedy, the default"
    add_option(group, "--temperature T", temperature, words)
    group.add_argument("--do-sample", action="store_true", help="sample tokens from the model's distribution")
    add_option(group, "--top-p P", share, "sample from the most likely tokens whose probabilities add up to P")
    add_option(group, "--top-k K", at_least_zero, "sample from the K most likely tokens; 0 for all")
    add_option(group, "--min-p P", share_or_none, "sample from tokens at least P times as likely as the most likely")
    add_option(group, "--seed N", at_least_zero, "seed of sampling; the same seed gives the same text")
    words = "above 1: makes tokens that are already in the text less likely"
    add_option(group, "--repetition-penalty X", factor, words)
    words = "stop after the token that completes TEXT; may be repeated"
    group.add_argument("--stop", type=text, action="append", metavar="TEXT", help=words)
    group.add_argument(
        "--acceptance",
        choices=ACCEPTANCES,
        default="lossless",
        help="lossless: the base model's own text (default); typical: the paper's typical acceptance, which is LOSSY: "
        "it keeps draft tokens that are likely enough, even if the model alone would write other ones",
    )
    add_option(group, "--posterior-threshold E", share, "epsilon of typical acceptance (default: 0.09)")
    add_option(group, "--posterior-alpha D", proper_share, "delta of typical acceptance (default: 0.3)")


SAMPLING_ONLY = ("top_p", "top_k", "min_p")
TYPICAL_ONLY = ("posterior_threshold", "posterior_alpha")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Turn the arguments of `add_sampling`, except stop strings, into arguments of `MedusaModel.generate`."""
    typical, sampled = args.acceptance == "typical", samples(args)
    if typical and args.do_sample:
        raise ValueError("--do-sample needs --acceptance lossless; typical does not sample")
    if args.temperature == 0 and (typical or args.do_sample):
        raise ValueError("--temperature: expected above 0 with --do-sample or --acceptance typical, got 0")
    for names, given_too, wanted in (
        (SAMPLING_ONLY, sampled, "--temperature above 0 or --do-sample"),
        (TYPICAL_ONLY, typical, "--acceptance typical"),
    ):
        for name in names:
            if not given_too and getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs {wanted}")
    taken = ("acceptance", "repetition_penalty", "seed", *SAMPLING_ONLY, *TYPICAL_ONLY)
    given = {name: getattr(args, name) for name in taken}
    if sampled or typical:
        given["temperature"] = args.temperature
    if sampled:
        given["do_sample"] = True
    return {name: value for name, value in given.items() if value is not None}


def samples(args: argparse.Namespace) -> bool:
    """Return whether tokens are sampled (not greedy, not typical acceptance)."""
    return args.acceptance == "lossless" and (args.do_sample or bool(args.temperature))


def add_template(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a chat template."""
    add_option(
        parser,
        "--template FILE",
        str,
        "a Jinja chat template to use instead of the tokenizer's, or the name of one of several that the tokenizer "
        "has; vicuna: the template of Vicuna models, as in training; plain: a simple one for models without any "
        "(`User: ..`, `Assistant: ..`)",
    )


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name of `options.DTYPES`."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def heads_folder(args: argparse.Namespace) -> Path:
    """Return the folder of the heads; raise `ValueError` for a model without heads, before anything is loaded."""
    from medusa_decoding.checkpoints.reading import fetch_folder, is_plain, without_heads

    folder = fetch_folder(heads_of(args), None, "--model")
    if is_plain(folder):
        raise ValueError(f"--model: expected a checkpoint of Medusa heads, but {without_heads(folder)}")
    return folder
