"""A draft model for speculative decoding: the embedded demo model's first layer, trained to predict the whole model.

It learns the demo model's greedy answers to requests of the training side: at each token of an answer it minimises
KL(demo model, draft), as in DistillSpec (Zhou et al. 2023). So it is trained for what the heads are trained for, the
model's own next tokens. The tokenizer is the demo model's. This module knows no other base model: for one of your own,
name a draft that shares its tokenizer.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM

from benchmarks import harness
from benchmarks.ablations import writing
from benchmarks.ablations.setup import NEW, prompts
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.cli import _arguments
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.files import write_json
from medusa_decoding.model import MedusaModel
from recipes.demo.card import answers

NAME = "draft"
BASE = CHECKPOINT / "base"


@dataclass(frozen=True)
class DraftSettings:
    """Everything the draft depends on.

    Attributes:
        steps: gradient steps; the rate falls to zero towards their end.
        layers: of the demo model that it begins with, and with its embedding, last norm and lm_head.
        requests: that the demo model answers.
        new_tokens: of an answer at most.
        rows: answers per step.
    """

    steps: int = 500
    layers: int = 1
    requests: int = 1024
    new_tokens: int = NEW
    rows: int = 16
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
        help=f"gradient steps of {DraftSettings.rows} answers (default: %(default)s, about ten minutes on one core)",
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
    asked = prompts(held_out=False, count=settings.requests, seed=settings.seed)
    with MedusaModel(base) as plain:
        written = answers(plain, asked, settings.new_tokens)
    texts = [(torch.cat([ids[0], torch.tensor(new)]), ids.shape[1]) for ids, new in zip(asked, written, strict=True)]
    draft = new_draft(base, settings)
    learnt = _train(base, draft, texts, settings)
    out.mkdir(parents=True, exist_ok=True)
    draft.eval().save_pretrained(out)
    pretrained.load_tokenizer(BASE).save_pretrained(out)
    said = {
        "settings": asdict(settings),
        "parameters": sum(p.numel() for p in draft.parameters()),
        **learnt,
        "seconds": round(time.monotonic() - begun),
        **harness.provenance(),
        "command": writing.command(NAME, ["--steps", str(settings.steps)]),
    }
    write_json(out / "draft.json", said)
    return said


def _train(
    base: Any, draft: LlamaForCausalLM, texts: list[tuple[torch.Tensor, int]], settings: DraftSettings
) -> dict[str, Any]:
    """Fit the draft to texts int64 [T], each with the length of its prompt.

    Returns the tokens learnt from in all steps, and the mean loss of the last steps.
    """
    chooser, tokens = random.Random(settings.seed), 0
    optimizer = torch.optim.AdamW(draft.parameters(), lr=settings.learning_rate, weight_decay=0.05, betas=(0.9, 0.95))
    losses: list[float] = []
    for step in (bar := tqdm(range(settings.steps), unit="step", disable=None)):
        rate = min((step + 1) / settings.warmup_steps, 1.0, (1 - step / settings.steps) / 0.7)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate
        chosen = chooser.choices(texts, k=settings.rows)
        rows = pad_sequence([text for text, _ in chosen], batch_first=True)
        # Each token of an answer is predicted at the position before it.
        place = torch.arange(rows.shape[1])
        learnt = torch.stack([(place >= prompt - 1) & (place < len(text) - 1) for text, prompt in chosen])
        with torch.no_grad():
            wanted = base(rows, use_cache=False).logits[learnt].log_softmax(-1)
        said = draft(rows, use_cache=False).logits[learnt]
        loss = F.kl_div(said.log_softmax(-1), wanted, reduction="batchmean", log_target=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += len(wanted)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"expected a finite loss, got {losses[-1]} at step {step + 1}")
        bar.set_postfix(kl=f"{losses[-1]:.3f}")
    last = losses[-20:]
    return {"tokens": tokens, "last_kl": round(sum(last) / len(last), 4)}
