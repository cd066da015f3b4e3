"""Continue a prompt with a model and its Medusa heads.

The prompt comes from --prompt, --file or standard input; heads and base model from --model and --base-model (default:
the embedded demo checkpoint). The text is the base model's own greedy text.

    medusa generate --prompt "def main(" --max-new-tokens 64
    medusa generate --model FasterDecoding/medusa-vicuna-7b-v1.3 --dtype float16 --device cuda --file prompt.txt
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, TextStreamer

from medusa_decoding.checkpoints import find_base_model
from medusa_decoding.cli._arguments import DTYPES, add_decoding
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel, MedusaOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt itself")
    source.add_argument("--file", type=Path, help="a UTF-8 file with the prompt; - for standard input")
    parser.add_argument("--model", help="folder or hub id of the heads (default: the embedded demo checkpoint)")
    parser.add_argument("--base-model", help="folder or hub id of the base model (default: the one the heads name)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's; float32 on a CPU)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add_decoding(parser, new_tokens=256)


def run(args: argparse.Namespace) -> int:
    """Load, generate, print the text as it comes, and the figures behind it."""
    text = read_prompt(args)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: expected cpu, because torch sees no CUDA device, got {args.device}")
    heads = args.model or str(CHECKPOINT / "heads")
    dtype = DTYPES[args.dtype] if args.dtype else "auto" if args.device != "cpu" else DTYPES["float32"]
    base = args.base_model or find_base_model(heads)
    if base is None:
        raise ValueError(f"--base-model: expected a folder or hub id, because {heads} names none, got none")
    tokenizer = AutoTokenizer.from_pretrained(base)
    device_map = None if args.device == "cpu" else args.device
    with MedusaModel.from_pretrained(
        heads, base, dtype=dtype, device_map=device_map, tree=args.tree, backend=args.backend
    ) as model:
        ids = tokenizer(text, return_tensors="pt").input_ids
        streamer = None if args.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        start = time.perf_counter()
        output = model.generate(ids, max_new_tokens=args.max_new_tokens, streamer=streamer)
        seconds = time.perf_counter() - start
    assert isinstance(output, MedusaOutput)
    figures = {
        "new_tokens": output.new_tokens[0],
        "steps": output.steps,
        "tokens_per_step": output.tokens_per_step,
        "seconds": seconds,
    }
    if args.json:
        new = output.sequences[0, ids.shape[1] :]
        print(json.dumps({"text": tokenizer.decode(new, skip_special_tokens=True), **figures}))
    else:
        print(
            f"[{figures['new_tokens']} tokens in {figures['steps']} steps, {output.tokens_per_step:.2f} a step, "
            f"{seconds:.2f} s with the prefill]",
            file=sys.stderr,
        )
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt's text; raise `ValueError` if there is none."""
    if args.prompt is not None:
        text = args.prompt
    elif args.file is None or str(args.file) == "-":
        text = sys.stdin.read()
    else:
        try:
            text = args.file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--file: expected UTF-8 text in {args.file}, got {error}") from error
    if not text:
        raise ValueError("prompt: expected some text in --prompt, --file or standard input, got none")
    return text
