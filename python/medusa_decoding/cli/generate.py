"""Run `medusa generate`: see `cli.parsers.generate` for its arguments."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time

import torch
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from medusa_decoding.backbone.tensor_parallel import joined
from medusa_decoding.chat.template import ChatTemplate, PromptEncoder
from medusa_decoding.checks import check_text, token_list
from medusa_decoding.cli import _arguments, _display, _figures
from medusa_decoding.files import MAX_TEXT, read_text
from medusa_decoding.model import MedusaOutput


def run(args: argparse.Namespace) -> int:
    """Load, generate, print the text as it is written, then the figures."""
    if args.template is not None and not args.chat:
        raise ValueError("--template needs --chat")
    _arguments.sampling(args)
    if args.prompts is not None:
        from medusa_decoding.cli import _batch

        return _batch.run(args)
    for name in ("out", "slots", "resume"):
        if getattr(args, name):
            raise ValueError(f"--{name} needs --prompts")
    if args.tensor_parallel:
        check_tensor_parallel(args)
    _arguments.resolve_device(args)
    text = read_prompt(args)
    with joined(args.device) if args.tensor_parallel else contextlib.nullcontext(0) as rank:
        if rank > 0:  # it would repeat what the first process says
            logging.disable(logging.WARNING)
            disable_progress_bar()
        generate(args, text, prints=rank == 0)
    return 0


def generate(args: argparse.Namespace, text: str, prints: bool) -> None:
    """Load the model and continue a text; print if this process is the one that prints."""
    tokenizer = _arguments.load_tokenizer(args)
    encoder = ChatTemplate(tokenizer, args.template) if args.chat else PromptEncoder(tokenizer)
    placed = {"distributed_config": DistributedConfig(tp_plan="auto")} if args.tensor_parallel else {}
    with _arguments.load_model(args, **placed) as model:
        ids = torch.tensor([encoder.encode([{"role": "user", "content": text}])], dtype=torch.int64)
        eos = token_list(model.backbone.causal_lm.generation_config.eos_token_id)
        start = time.perf_counter()
        output = model.generate(
            ids,
            max_new_tokens=args.max_new_tokens,
            eos_token_id=encoder.ends(eos) or None,
            stop_strings=encoder.stop_strings(args.stop),
            tokenizer=tokenizer,
            streamer=_display.streamer(encoder, _display.terminal()) if prints and not args.json else None,
            metrics=args.metrics,
            **_arguments.sampling(args),
        )
        seconds = time.perf_counter() - start
    assert isinstance(output, MedusaOutput)
    if not prints:
        return
    if args.json:
        new = output.sequences[0, ids.shape[1] :]
        print(json.dumps({"text": encoder.answer(new.tolist()), **figures(output, seconds)}))
        return
    print(
        f"[{output.new_tokens[0]} tokens in {output.steps} steps, {output.tokens_per_step:.2f} per step, "
        f"{seconds:.2f} s with the prefill, tree: {output.tree_choice}]",
        file=sys.stderr,
    )
    if output.metrics is not None:
        print(_figures.as_text(output.metrics), file=sys.stderr)


def figures(output: MedusaOutput, seconds: float) -> dict[str, object]:
    """Return the figures of an output for JSON."""
    found: dict[str, object] = {
        "new_tokens": output.new_tokens[0],
        "steps": output.steps,
        "tokens_per_step": _figures.number_or_null(output.tokens_per_step),
        "seconds": seconds,
    }
    if output.tree_choice is not None:
        found |= {"tree": output.tree_choice.name, "tree_reason": output.tree_choice.reason}
    return found if output.metrics is None else found | {"metrics": _figures.as_json(output.metrics)}


def check_tensor_parallel(args: argparse.Namespace) -> None:
    """Raise `ValueError` for arguments that do not work with several processes."""
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device not in (wanted, "auto"):
        remedy = " (transformers shards over the GPUs it sees; hide them with CUDA_VISIBLE_DEVICES= for the CPU)"
        raise ValueError(f"--device: expected {wanted} with --tensor-parallel{remedy}, got {args.device}")
    if args.prompt is None and (args.file is None or str(args.file) == "-"):
        raise ValueError("prompt: expected --prompt or --file, as processes cannot share standard input, got neither")


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt's text; raise `ValueError` if there is none."""
    if args.prompt is not None:
        text = args.prompt
    elif args.file is None or str(args.file) == "-":
        text = sys.stdin.read(MAX_TEXT + 1)
        if len(text) > MAX_TEXT:
            raise ValueError(f"prompt: expected at most {MAX_TEXT:,} characters in standard input, got more")
    else:
        try:
            text = read_text(args.file)
        except ValueError as error:
            raise ValueError(f"--file: {error}") from error
    if not text:
        raise ValueError("prompt: give some text by --prompt, --file or standard input")
    check_text("prompt", text)
    return text
