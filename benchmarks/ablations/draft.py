"""A draft model for speculative decoding: the embedded demo model's first layer, taught to foretell the whole model.

Half of what it reads are pieces of the demo model's training files, half are texts that the demo model wrote greedily;
it minimises KL(demo model, draft) at every place (as in DistillSpec, Zhou et al. 2023), so that it is trained for what
the heads are trained for: the model's own next tokens. The tokenizer is the demo model's. This module knows no other
base model: for one of your own, name a draft that shares its tokenizer.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM

from benchmarks import harness
from benchmarks.ablations import writing
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.cli import _arguments
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.files import write_json
from medusa_decoding.model import MedusaModel
from recipes.demo import corpus
from recipes.demo.card import continuations

NAME = "draft"
BASE = CHECKPOINT / "base"


@dataclass(frozen=True)
class DraftSettings:
    """Everything the draft depends on.

    Attributes:
        steps: gradient steps; the rate falls to zero towards their end.
        layers: of the demo model that it begins with, and with its embedding, last norm and lm_head.
        own_texts: that the demo model writes; each has `prompt_tokens` + `new_tokens`.
        every: training file that is read.
        rows, length: of a step.
    """

    steps: int = 500
    layers: int = 1
    own_texts: int = 512
    prompt_tokens: int = 96
    new_tokens: int = 160
    every: int = 4
    rows: int = 16
    length: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    seed: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--out", type=Path, default=Path("runs/ablations/draft"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=_arguments.at_least_one,
        default=DraftSettings.steps,
        help="gradient steps of 4,096 tokens (default: %(default)s, about five minutes on one core)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the draft."""
    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"--out: expected a new folder, got {args.out}, which holds something")
    said = make(DraftSettings(steps=args.steps), args.out)
    print(json.dumps(said, indent=1))
    return 0


def new_draft(base: Any, settings: DraftSettings) -> LlamaForCausalLM:
    """Return an untrained draft: the base model without its upper layers."""
    config = copy.deepcopy(base.config)
    config.num_hidden_layers = settings.layers
    draft = LlamaForCausalLM(config)
    known = base.state_dict()
    draft.load_state_dict({name: known[name] for name in draft.state_dict()})
    return draft


def make(settings: DraftSettings, out: Path) -> dict[str, Any]:
    """Train a draft and write it with its tokenizer and what it was made with; return the latter."""
    begun = time.monotonic()
    base = pretrained.load_model(BASE, dtype=torch.float32).eval()
    files, tokenizer = corpus.split(), Tokenizer.from_file(str(BASE / "tokenizer.json"))
    stream = corpus.encode(files, files.train[:: settings.every], tokenizer)
    prompts = corpus.random_prompts(stream, settings.own_texts, settings.prompt_tokens, settings.seed)
    with MedusaModel(base) as plain:
        own = continuations(plain, prompts, settings.new_tokens)
    draft = new_draft(base, settings)
    loss = _train(base, draft, stream, own, settings)
    out.mkdir(parents=True, exist_ok=True)
    draft.eval().save_pretrained(out)
    pretrained.load_tokenizer(BASE).save_pretrained(out)
    said = {
        "settings": asdict(settings),
        "parameters": sum(p.numel() for p in draft.parameters()),
        "tokens": settings.steps * settings.rows * settings.length,
        "last_kl": loss,
        "seconds": round(time.monotonic() - begun),
        **harness.provenance(),
        "command": writing.command(NAME, ["--steps", str(settings.steps)]),
    }
    write_json(out / "draft.json", said)
    return said


def _train(base: Any, draft: LlamaForCausalLM, stream: np.ndarray, own: torch.Tensor, settings: DraftSettings) -> float:
    """Fit the draft; return the mean loss of the last steps."""
    rng = np.random.default_rng(settings.seed)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=settings.learning_rate, weight_decay=0.05, betas=(0.9, 0.95))
    losses: list[float] = []
    for step in (bar := tqdm(range(settings.steps), unit="step", disable=None)):
        rate = min((step + 1) / settings.warmup_steps, 1.0, (1 - step / settings.steps) / 0.7)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate
        rows = _rows(stream, own, settings, rng)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = base(rows, use_cache=False).logits.float().log_softmax(-1)
            said = draft(rows, use_cache=False).logits
        loss = F.kl_div(said.float().log_softmax(-1), wanted, reduction="sum", log_target=True) / rows.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"expected a finite loss, got {losses[-1]} at step {step + 1}")
        bar.set_postfix(kl=f"{losses[-1]:.3f}")
    last = losses[-20:]
    return round(sum(last) / len(last), 4)


def _rows(stream: np.ndarray, own: torch.Tensor, settings: DraftSettings, rng: np.random.Generator) -> torch.Tensor:
    """Draw int64 [rows, length]: half of them files' text, half the model's own."""
    half = settings.rows // 2
    starts = rng.integers(0, len(stream) - settings.length, settings.rows - half)
    files = np.stack([stream[start : start + settings.length] for start in starts]).astype(np.int64)
    picked = own[torch.from_numpy(rng.integers(0, len(own), half))]
    return torch.cat([torch.from_numpy(files), picked[:, : settings.length]])
