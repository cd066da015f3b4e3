"""Distil the demo's heads on the backbone's own greedy text (stage 2 of the recipe in `train.py`).

Self-distillation (Medusa paper, section 2.3.2) with the backbone frozen: what a greedy decoder writes is not the text
it was trained on, and it is the former that the heads must guess. Hidden states are computed once and reused in every
epoch; the loss is Medusa-1's, the sum over heads of 0.8^k times the cross-entropy at offset k + 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree


@dataclass
class DistillSettings:
    """Everything stage 2 depends on."""

    prompts: int = 7168
    prompt_tokens: int = 128
    new_tokens: int = 160
    generate_batch: int = 64
    head_layers: int = 2
    epochs: int = 4
    batch: int = 4096
    lr: float = 2e-3
    head_decay: float = 0.8
    seed: int = 1


def random_prompts(data: np.ndarray, count: int, length: int, seed: int) -> torch.Tensor:
    """Draw `count` windows of `length` tokens as int64 [count, length], none of them across a file's start."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    while len(found) < count:
        start = int(rng.integers(0, len(data) - length))
        window = data[start : start + length]
        if not (window[1:] == 0).any():
            found.append(window.astype(np.int64))
    return torch.from_numpy(np.stack(found))


def continuations(base: PreTrainedModel, prompts: torch.Tensor, new_tokens: int, batch: int) -> Iterator[torch.Tensor]:
    """Yield int64 [b, prompt + new_tokens] greedy continuations; rows that reach EOS go on, so that none is padded."""
    with MedusaModel(base) as plain:
        for rows in prompts.split(batch):
            output = plain.generate(rows, max_new_tokens=new_tokens, eos_token_id=[], tree=Tree([]))
            assert isinstance(output, MedusaOutput)
            yield output.sequences


@torch.no_grad()
def hidden_states(base: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the states after the final norm: int64 [b, T] -> [b, T, H]."""
    return base.get_decoder()(tokens, use_cache=False).last_hidden_state


@dataclass
class HeadData:
    """Inputs and targets of the heads, one row a position.

    Attributes:
        states: [R, H] hidden states.
        targets: int64 [R, K], head k's target (the token k + 2 places later).
    """

    states: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, base: PreTrainedModel, sequences: list[torch.Tensor], start: int, num_heads: int) -> HeadData:
        """Collect every position from `start` (the last prompt token) whose targets are all known."""
        states, targets = [], []
        for tokens in sequences:
            last = tokens.shape[1] - 1 - num_heads
            states.append(hidden_states(base, tokens)[:, start:last].flatten(0, 1))
            shifted = [tokens[:, start + 2 + k : last + 2 + k].flatten() for k in range(num_heads)]
            targets.append(torch.stack(shifted, dim=1))
        return cls(torch.cat(states), torch.cat(targets))


def train_heads(heads: MedusaHeads, lm_head: nn.Linear, data: HeadData, settings: DistillSettings, log: Path) -> None:
    """Fit the heads' residual blocks to the targets in place; the shared projection stays as it is."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=settings.lr, weight_decay=0.01, betas=(0.9, 0.98))
    per_epoch = len(data.states) // settings.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=settings.lr, total_steps=settings.epochs * per_epoch, pct_start=0.05
    )
    weights = settings.head_decay ** torch.arange(1, heads.num_heads + 1)
    start = time.monotonic()
    with log.open("a") as lines:
        for epoch in range(settings.epochs):
            order = torch.randperm(len(data.states), generator=generator)
            for step in range(per_epoch):
                rows = order[step * settings.batch : (step + 1) * settings.batch]
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logits = heads(data.states[rows].float(), lm_head)
                losses = torch.stack(
                    [F.cross_entropy(logits[:, k].float(), data.targets[rows, k]) for k in range(heads.num_heads)]
                )
                (losses * weights).sum().backward()
                nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
                if step % 25 == 0 or step == per_epoch - 1:
                    top1 = (logits.argmax(-1) == data.targets[rows]).float().mean(0)
                    row: dict[str, Any] = {
                        "epoch": epoch,
                        "step": step,
                        "of": per_epoch,
                        "seconds": round(time.monotonic() - start),
                    }
                    row |= {"losses": [round(x, 3) for x in losses.tolist()]}
                    row |= {"top1": [round(x, 3) for x in top1.tolist()]}
                    lines.write(json.dumps(row) + "\n")
                    lines.flush()
