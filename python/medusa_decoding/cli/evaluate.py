"""Run `medusa eval`: see `cli.parsers.evaluate` for its arguments."""

from __future__ import annotations

import argparse
import json
import sys

from medusa_decoding.checkpoints.tuning_paths import check_writable
from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation import Evaluation, evaluate, read_prompts
from medusa_decoding.evaluation.report import as_text
from medusa_decoding.files import only_writer, write_text


def run(args: argparse.Namespace) -> int:
    """Read, load, measure, print."""
    _arguments.resolve_device(args)
    if args.out is None:
        return _run(args)
    check_writable("--out", args.out)
    with only_writer("--out", args.out):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    chosen = _arguments.sampling(args)
    prompts = read_prompts(args.prompts, categories=args.categories, limit=args.limit, turns=args.turns, distinct=True)
    tokenizer = _arguments.load_tokenizer(args)
    with _arguments.load_model(args) as model:
        evaluation = evaluate(
            model,
            tokenizer,
            prompts,
            max_new_tokens=args.max_new_tokens,
            template=args.template,
            rounds=args.rounds,
            transformers=not args.no_transformers,
            prompt_tokens=args.prompt_tokens,
            stop_strings=args.stop,
            progress=True,
            **chosen,
        )
    figures = {"model": args.model or "the embedded demo checkpoint", "prompts": args.prompts} | evaluation.to_json()
    print(json.dumps(figures) if args.json else as_text(evaluation))
    warn(evaluation)
    if args.out is not None:
        write_text(args.out, json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    return 0


def warn(evaluation: Evaluation) -> None:
    """Warn about texts that differ although they must not: in float32 every text is the base model's own."""
    settings = evaluation.settings
    lossy = {"cache_dtype", "activation_dtype"} & settings.keys()
    lossless = settings.get("acceptance", "lossless") == "lossless" and not lossy
    if evaluation.different and lossless and settings["dtype"] == "float32":
        first = evaluation.different[0]
        print(
            f"medusa: {len(evaluation.different)} texts differ from a baseline's, which in float32 must not happen "
            f"unless the base model is quantised: the first is {first['where']}, turn {first['turn']}, from new token "
            f"{first['token']} on ({first['baseline']})",
            file=sys.stderr,
        )
