"""The objective of a step: heads and backbone as one module whose forward is the loss (paper, 2.2 and 2.3.2).

Medusa-1 trains heads on the states of a frozen backbone. Medusa-2 adds the model's own next-token loss to the heads'
(equation 2). Self-distillation replaces that loss by the divergence from the model without its adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from medusa_decoding.heads import MedusaHeads
from medusa_decoding.training.config import Config
from medusa_decoding.training.data.packing import TEXTS, Texts
from medusa_decoding.training.data.targets import IGNORE, draft_labels, number_segments, shifted_labels
from medusa_decoding.training.loop.backbone import TrainingBackbone
from medusa_decoding.training.loss.language import distillation_loss, language_loss
from medusa_decoding.training.loss.medusa import head_weights, medusa_loss

HIDDEN = "hidden"
"""Name in a batch of states [B, T, (1 + F) H] that are computed already."""


def count_targets(batch: dict[str, Any], num_heads: int, token_map: Tensor | None) -> Tensor:
    """Return how many targets of a batch the model itself has, and each head; int64 [1 + K]."""
    labels, segments = batch["labels"].flatten(), number_segments(batch["position_ids"])
    own = shifted_labels(labels, [1], segments=segments) != IGNORE  # the model's vocabulary is not trimmed
    drafts = draft_labels(labels, num_heads, segments=segments, token_map=token_map) >= 0
    return torch.cat([own, drafts]).sum(1)


class Objective(nn.Module):
    """The loss of a batch, as a module of the heads and the model (whose weights are this module's too).

    Attributes:
        joint: whether the backbone (its adapter) is trained now too.
        token_map: the heads' own on the CPU, for batches with `Texts` there; None without one.
    """

    def __init__(self, backbone: TrainingBackbone, heads: MedusaHeads, config: Config) -> None:
        super().__init__()
        self.heads = heads
        self.model = backbone.module
        self.joint = False
        self.token_map: Tensor | None = None
        self._backbone, self._config = backbone, config
        self._weights = head_weights(heads.num_heads, config.loss.head_decay)

    def train(self, mode: bool = True) -> Objective:
        """Switch to training mode. A backbone that is not trained now stays in evaluation mode."""
        if (self.training, self.model.training) != (mode, mode and self.joint):  # not at every step: models are deep
            super().train(mode)
            self.model.train(mode and self.joint)
        return self

    def forward(
        self, batch: dict[str, Any], normalisers: Tensor | None = None, lambda_0: float = 1.0, top: int = 1
    ) -> dict[str, Tensor]:
        """Return the loss and the counts that it is made of.

        The batch is as `packing.collate` makes it, on the model's device; with `HIDDEN`, the model is not run. With its
        `Texts` on the CPU, nothing is read back from the device. `normalisers` are `count_targets` of the whole step,
        or None to measure, under `torch.no_grad()`: then the model's own loss is counted too. `lambda_0` is the weight
        of the heads' loss next to the model's own. See `Loss` for the shapes.
        """
        measuring = normalisers is None
        joint = self.joint and not measuring
        backbone, heads = self._backbone, self.heads
        states = batch.get(HIDDEN)
        if states is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and joint):
                states = backbone.hidden(batch)
        states, texts = states.flatten(0, 1), batch.get(TEXTS) or Texts.of(batch)
        hidden = states[:, : heads.hidden_size]
        labels, segments = texts.labels, texts.segments
        of_heads = medusa_loss(
            states,
            heads,
            labels,
            tokens=texts.tokens if heads.parent_rank or heads.root_rank else None,
            embed_tokens=backbone.causal.get_input_embeddings() if heads.root_rank else None,
            segments=segments,
            token_map=self.token_map,
            lm_head=backbone.to_logits() if heads.shared_projection else None,
            teacher_lm_head=backbone.to_logits() if self._config.loss.targets == "kl" and not measuring else None,
            weights=self._weights,
            normaliser=None if normalisers is None else normalisers[1:],
            through_backbone=joint,
            top=top,
        )
        loss, found = of_heads.loss, {}
        if joint or measuring:
            own = None if normalisers is None else normalisers[:1]
            options: dict[str, Any] = {"segments": segments, "normaliser": own}
            if joint and self._config.method == "self-distillation":
                with torch.no_grad(), backbone.original():
                    teacher = backbone.hidden(batch).flatten(0, 1)[:, : heads.hidden_size]
                original_head = backbone.to_logits(adapted=False)
                model = distillation_loss(hidden, backbone.to_logits(), teacher, original_head, labels, **options)
            else:
                model = language_loss(hidden, backbone.to_logits(), labels, top=min(top, 1), **options)
            found = {"model_sum": model.sums, "model_count": model.counts}
            if model.hits.numel():
                found["model_hits"] = model.hits
            if joint:
                loss = model.loss + lambda_0 * loss  # equation 2
        return found | {
            "loss": loss,
            "head_sums": of_heads.sums,
            "head_counts": of_heads.counts,
            "head_outside": of_heads.outside,
            "head_hits": of_heads.hits,
        }
