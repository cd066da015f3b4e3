"""Continue a prompt with a model and its Medusa heads.

The prompt comes from --prompt, --file or standard input; heads and base model from --model and --base-model (default:
the embedded demo checkpoint). The text is the base model's own greedy text.

    medusa generate --prompt "def main(" --max-new-tokens 64
    medusa generate --model FasterDecoding/medusa-vicuna-7b-v1.3 --dtype float16 --device cuda --file prompt.txt
    torchrun --nproc-per-node 2 -m medusa_decoding generate --tensor-parallel --prompt "def main("
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, TextStreamer
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from medusa_decoding.checkpoints import find_base_model
from medusa_decoding.cli._arguments import DTYPES, add_decoding
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.parallel import joined


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt itself")
    source.add_argument("--file", type=Path, help="a UTF-8 file with the prompt; - for standard input")
    parser.add_argument("--model", help="folder or hub id of the heads (default: the embedded demo checkpoint)")
    parser.add_argument("--base-model", help="folder or hub id of the base model (default: the one the heads name)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's; float32 on a CPU)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="shard the base model over the processes that torchrun started (with --device cuda: a GPU each); every "
        "process keeps whole heads, the first one prints",
    )
    add_decoding(parser, new_tokens=256)


def run(args: argparse.Namespace) -> int:
    """Load, generate, print the text as it comes, and the figures behind it."""
    if args.tensor_parallel:
        check_shareable(args)
    text = read_prompt(args)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: expected cpu, because torch sees no CUDA device, got {args.device}")
    with joined(args.device) if args.tensor_parallel else contextlib.nullcontext(0) as rank:
        if rank > 0:  # it does what the first process does, and would say the same
            logging.disable(logging.WARNING)
            disable_progress_bar()
        generate(args, text, speak=rank == 0)
    return 0


def generate(args: argparse.Namespace, text: str, speak: bool) -> None:
    """Load the model and continue a text; print if this process is the one to speak."""
    heads = args.model or str(CHECKPOINT / "heads")
    dtype = DTYPES[args.dtype] if args.dtype else "auto" if args.device != "cpu" else DTYPES["float32"]
    base = args.base_model or find_base_model(heads)
    if base is None:
        raise ValueError(f"--base-model: expected a folder or hub id, because {heads} names none, got none")
    tokenizer = AutoTokenizer.from_pretrained(base)
    placed: dict[str, object] = {"device_map": None if args.device == "cpu" else args.device}
    if args.tensor_parallel:
        placed = {"distributed_config": DistributedConfig(tp_plan="auto")}
    with MedusaModel.from_pretrained(heads, base, dtype=dtype, tree=args.tree, backend=args.backend, **placed) as model:
        ids = tokenizer(text, return_tensors="pt").input_ids
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        start = time.perf_counter()
        output = model.generate(
            ids, max_new_tokens=args.max_new_tokens, streamer=streamer if speak and not args.json else None
        )
        seconds = time.perf_counter() - start
    assert isinstance(output, MedusaOutput)
    if not speak:
        return
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


def check_shareable(args: argparse.Namespace) -> None:
    """Raise `ValueError` for arguments that several processes cannot follow together."""
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device != wanted:
        remedy = " (transformers shards over the GPUs it sees; hide them with CUDA_VISIBLE_DEVICES= for the CPU)"
        raise ValueError(f"--device: expected {wanted} with --tensor-parallel{remedy}, got {args.device}")
    if args.prompt is None and (args.file is None or str(args.file) == "-"):
        raise ValueError("prompt: expected --prompt or --file, as processes cannot share standard input, got neither")


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
