"""Train the demo's backbone and heads together (stage 1 of the recipe in `train.py`).

Combined loss of Medusa-2 (Medusa paper, section 2.2.2): next-token cross-entropy plus lambda_0 times the sum over
heads of 0.8^k times the cross-entropy at offset k + 1. The heads share the backbone's lm_head, so the sum is made on
a random quarter of the positions: a head's target needs no more, and the step stays close to the backbone's own cost.
Crops are short for the first part of the budget, which saves much of attention's backward pass.
Data parallel over processes (gloo on the CPU): two single-threaded processes train faster than two threads.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_decoding.files import whole_file


@dataclass
class PretrainSettings:
    """Everything stage 1 depends on; written beside its checkpoint."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 4
    num_attention_heads: int = 4
    num_kv_heads: int = 2
    num_heads: int = 4
    context: int = 512
    short_context: int = 256
    short_until: float = 0.6
    batch_tokens: int = 6144
    minutes: float = 100.0
    steps: int = 1_000_000
    lr: float = 4e-3
    warmup_steps: int = 100
    decay_from: float = 0.45
    weight_decay: float = 0.1
    lambda_0: float = 0.2
    lambda_ramp: float = 0.3
    head_decay: float = 0.8
    head_positions: float = 0.25
    seed: int = 0


class BackboneWithHeads(nn.Module):
    """A Llama and its heads (one residual block each, projection shared with lm_head) as one trainable module."""

    def __init__(self, settings: PretrainSettings) -> None:
        super().__init__()
        s = settings
        self.settings = s
        self.backbone = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=s.vocab_size,
                hidden_size=s.hidden_size,
                intermediate_size=s.intermediate_size,
                num_hidden_layers=s.num_layers,
                num_attention_heads=s.num_attention_heads,
                num_key_value_heads=s.num_kv_heads,
                max_position_embeddings=s.context,
                tie_word_embeddings=False,
                bos_token_id=0,
                eos_token_id=0,
                pad_token_id=None,
            )
        )
        self.w1 = nn.Parameter(torch.zeros(s.num_heads, s.hidden_size, s.hidden_size))
        self.b1 = nn.Parameter(torch.zeros(s.num_heads, s.hidden_size))

    def head_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the residual blocks: hidden [T, H] -> [K, T, H] (Medusa paper, section 2.1.1)."""
        pre = torch.baddbmm(self.b1[:, None], hidden.expand(len(self.w1), -1, -1), self.w1.transpose(1, 2))
        return hidden + F.silu(pre)

    def forward(self, tokens: torch.Tensor, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next-token loss and the heads' losses [K]; tokens [B, T + 1 + K], picked: positions [P] < T."""
        s = self.settings
        length = tokens.shape[1] - 1 - s.num_heads
        hidden = self.backbone.model(tokens[:, :length], use_cache=False).last_hidden_state
        lm_loss = F.cross_entropy(
            self.backbone.lm_head(hidden).flatten(0, 1).float(), tokens[:, 1 : length + 1].flatten()
        )
        rows = hidden[:, picked].flatten(0, 1)
        logits = self.backbone.lm_head(self.head_states(rows))
        losses = [F.cross_entropy(logits[k].float(), tokens[:, picked + 2 + k].flatten()) for k in range(s.num_heads)]
        return lm_loss, torch.stack(losses)


def optimizers(module: nn.Module, settings: PretrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the backbone's matrices, AdamW for embeddings, projections, norms, biases and the heads' blocks."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        inner = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if inner else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=settings.lr, weight_decay=0.01, betas=(0.9, 0.95)),
    ]


def crops(data: np.ndarray, length: int, count: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw `count` random windows of `length` tokens as int64 [count, length]."""
    starts = rng.integers(0, len(data) - length, size=count)
    return torch.from_numpy(np.stack([data[i : i + length] for i in starts]).astype(np.int64))


@torch.no_grad()
def evaluate(model: BackboneWithHeads, data: np.ndarray, device: torch.device, batches: int = 8) -> dict:
    """Loss and top-1 accuracy of the backbone and of each head on fixed crops of held-out text."""
    s = model.settings
    rng = np.random.default_rng(1234)
    model.eval()
    loss, hits = 0.0, torch.zeros(1 + s.num_heads)
    for _ in range(batches):
        tokens = crops(data, s.context + 1 + s.num_heads, 16, rng).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = model.backbone.model(tokens[:, : s.context], use_cache=False).last_hidden_state
            logits = model.backbone.lm_head(hidden)
            loss += F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1 : s.context + 1].flatten()).item()
            hits[0] += (logits.argmax(-1) == tokens[:, 1 : s.context + 1]).float().mean().item()
            states = model.head_states(hidden[:, ::4].flatten(0, 1))
            for k in range(s.num_heads):
                target = tokens[:, 2 + k : s.context + 2 + k][:, ::4].flatten()
                hits[1 + k] += (model.backbone.lm_head(states[k]).argmax(-1) == target).float().mean().item()
    model.train()
    return {"loss": loss / batches, "top1": [round(float(h) / batches, 4) for h in hits]}


def learning_rate_scale(step: int, progress: float, settings: PretrainSettings) -> float:
    """Linear warm-up, plateau, linear decay to zero over the last part of the budget."""
    return min((step + 1) / settings.warmup_steps, 1.0, max(0.0, (1 - progress) / (1 - settings.decay_from)))


def save_atomically(path: Path, state: dict) -> None:
    """Write a torch checkpoint so that a kill never leaves half a file under its name."""
    with whole_file(path) as scratch:
        torch.save(state, scratch)


def pretrain(
    train: np.ndarray, held_out: np.ndarray, out: Path, settings: PretrainSettings, device: torch.device
) -> None:
    """Run stage 1 until `minutes` or `steps` are used up; checkpoints and a JSON-lines log go to `out`."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(settings.seed)
    model = BackboneWithHeads(settings).to(device)
    rng = np.random.default_rng([settings.seed, rank])
    opts = optimizers(model, settings)
    parameters = list(model.parameters())
    log = (out / "pretrain.jsonl").open("a") if rank == 0 else None
    if log:
        log.write(json.dumps({"settings": asdict(settings), "parameters": sum(p.numel() for p in parameters)}) + "\n")
    start = last_save = time.monotonic()
    step, seen, progress = 0, 0, 0.0
    while progress < 1.0:
        length = settings.short_context if progress < settings.short_until else settings.context
        batch = settings.batch_tokens // length
        tokens = crops(train, length + 1 + settings.num_heads, batch, rng).to(device)
        picked = torch.from_numpy(rng.permutation(length)[: int(length * settings.head_positions)])
        with torch.autocast(device.type, dtype=torch.bfloat16):
            lm_loss, head_losses = model(tokens, picked.to(device))
        weights = settings.head_decay ** torch.arange(1, settings.num_heads + 1, device=device)
        ramp = settings.lambda_0 * math.sin(math.pi / 2 * min(1.0, progress / settings.lambda_ramp))
        (lm_loss + ramp * (weights * head_losses).sum()).backward()
        mine = max(step / settings.steps, (time.monotonic() - start) / (60 * settings.minutes))
        progress = synchronise(parameters, mine, lm_loss.item(), world)
        scale = learning_rate_scale(step, progress, settings)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = settings.lr * scale
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        seen += world * batch * length
        if log and (step % 20 == 0 or progress >= 1.0):
            row: dict[str, Any] = {
                "step": step,
                "progress": round(progress, 4),
                "seconds": round(time.monotonic() - start, 1),
            }
            row |= {"tokens": seen, "loss": round(lm_loss.item(), 4)}
            row |= {"head_losses": [round(x, 3) for x in head_losses.tolist()]}
            if step % 400 == 0 or progress >= 1.0:
                row["held_out"] = evaluate(model, held_out, device)
            log.write(json.dumps(row) + "\n")
            log.flush()
        if rank == 0 and (time.monotonic() - last_save > 300 or progress >= 1.0):
            save_atomically(
                out / "pretrain.pt", {"model": model.state_dict(), "settings": asdict(settings), "step": step}
            )
            last_save = time.monotonic()


def synchronise(parameters: list[nn.Parameter], progress: float, loss: float, world: int) -> float:
    """Average gradients (and progress, so that all ranks stop together) over processes; raise on a NaN loss."""
    if world > 1:
        grads = [p.grad for p in parameters if p.grad is not None]
        device = grads[0].device
        flat = torch.cat([grad.flatten() for grad in grads] + [torch.tensor([progress, loss], device=device)])
        dist.all_reduce(flat)
        flat /= world
        offset = 0
        for grad in grads:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()
        progress, loss = flat[-2].item(), flat[-1].item()
    if not math.isfinite(loss):
        raise FloatingPointError(f"expected a finite loss, got {loss}; the last checkpoint is still whole")
    return progress
