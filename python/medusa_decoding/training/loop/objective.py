"""What a step minimises: heads and backbone as one module whose forward is the loss (paper, sections 2.2 and 2.3.2).

Medusa-1 takes the states of a frozen backbone without their gradient; Medusa-2 adds the model's own next-token loss to
the heads' (equation 2); self-distillation replaces that by the divergence from the model without its adapter. Means are
over a whole step, whose counts of targets the caller has added up. This module does not know optimisers or processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medusa_decoding.heads import MedusaHeads
from medusa_decoding.training.config import Config
from medusa_decoding.training.data.targets import IGNORE, number_segments, target_counts
from medusa_decoding.training.loop.backbone import TrainingBackbone
from medusa_decoding.training.loss.losses import (
    TOP,
    Loss,
    combined_loss,
    distillation_loss,
    head_weights,
    language_loss,
    medusa_loss,
    without_adapter,
)

HIDDEN = "hidden"
"""Name in a batch of states [B, T, H] that need not be computed any more."""


@dataclass(frozen=True)
class Normalisers:
    """Targets of a whole step: of each head, int64 [K], and of the model itself, int64 [1]."""

    heads: Tensor
    model: Tensor

    @classmethod
    def count(cls, batches: list[dict[str, Any]], heads: MedusaHeads) -> Normalisers:
        """Count the targets of batches on the CPU."""
        of_heads = torch.zeros(heads.num_heads, dtype=torch.int64)
        of_model = torch.zeros(1, dtype=torch.int64)
        for batch in batches:
            labels, segments = batch["labels"].flatten(), number_segments(batch["position_ids"])
            of_heads += target_counts(labels, heads, segments)
            follows = (labels[1:] != IGNORE) & (segments[1:] == segments[:-1])
            of_model += follows.sum()
        return cls(of_heads, of_model)

    def to(self, device: torch.device) -> Normalisers:
        """Copy to a device."""
        return Normalisers(self.heads.to(device), self.model.to(device))


class Objective(nn.Module):
    """The loss of a batch.

    Args:
        backbone: the model; its weights are this module's too.
        heads: the heads, in float32.
        config: of the run.

    Attributes:
        heads, model: the submodules.
        joint: whether the backbone (its adapter) is trained now, or the heads alone.
    """

    def __init__(self, backbone: TrainingBackbone, heads: MedusaHeads, config: Config) -> None:
        super().__init__()
        self.heads = heads
        self.model = backbone.module
        self.joint = False
        self._backbone, self._config = backbone, config
        self._weights = head_weights(heads.num_heads, config.loss.head_decay)

    def train(self, mode: bool = True) -> Objective:
        """Switch to training; a backbone that is not trained now stays as it is used."""
        super().train(mode)
        self.model.train(mode and self.joint)
        return self

    def forward(
        self, batch: dict[str, Any], normalisers: Normalisers | None = None, lambda_0: float = 1.0, top: int = 1
    ) -> dict[str, Tensor]:
        """Return the loss and what is counted of it.

        Args:
            batch: as `packing.collate` makes it, on the model's device; with `HIDDEN`, the model is not run.
            normalisers: of the whole step; None to measure: the model's own loss is counted then, and whatever has a
                gradient is left alone.
            lambda_0: weight of the heads' loss beside the model's own.
            top: accuracies counted.

        Returns:
            `loss` scalar with gradient; `head_sums` [K], `head_counts`, `head_outside` int64 [K], `head_hits` int64
            [K, top]; where the model's own loss is part of it (or measured) `model_sum` [1], `model_count` int64 [1],
            and unless distilled `model_hits` int64 [1, 1].
        """
        measured = normalisers is None
        joint = self.joint and not measured
        found: dict[str, Tensor] = {}
        hidden = batch.get(HIDDEN)
        if hidden is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and joint):
                hidden = self._backbone.hidden(batch)
        hidden = hidden.flatten(0, 1)
        labels, ids = batch["labels"].flatten(), batch["input_ids"].flatten()
        segments = number_segments(batch["position_ids"])
        heads = self._heads_loss(hidden, labels, ids, segments, normalisers, joint, top)
        loss = heads.loss
        if joint or measured:
            model = self._model_loss(batch, hidden, labels, segments, normalisers, joint, min(top, 1))
            found |= {"model_sum": model.sums, "model_count": model.counts}
            if model.hits.numel():
                found["model_hits"] = model.hits
            if joint:
                loss = combined_loss(model.loss, loss, lambda_0)
        return found | {
            "loss": loss,
            "head_sums": heads.sums,
            "head_counts": heads.counts,
            "head_outside": heads.outside,
            "head_hits": heads.hits,
        }

    def _heads_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        ids: Tensor,
        segments: Tensor,
        normalisers: Normalisers | None,
        joint: bool,
        top: int,
    ) -> Loss:
        heads = self.heads
        options: dict[str, Any] = {"tokens": ids} if heads.parent_rank else {}
        return medusa_loss(
            hidden,
            heads,
            labels,
            segments=segments,
            lm_head=self._backbone.lm_head if heads.shared_projection else None,
            weights=self._weights,
            normaliser=None if normalisers is None else normalisers.heads,
            through_backbone=joint,
            chunk=self._config.loss.chunk,
            top=min(top, TOP),
            **options,
        )

    def _model_loss(
        self,
        batch: dict[str, Any],
        hidden: Tensor,
        labels: Tensor,
        segments: Tensor,
        normalisers: Normalisers | None,
        joint: bool,
        top: int,
    ) -> Loss:
        backbone, chunk = self._backbone, self._config.loss.chunk
        divisor = None if normalisers is None else normalisers.model
        if not joint or self._config.method != "self-distillation":
            return language_loss(
                hidden, backbone.lm_head, labels, segments=segments, normaliser=divisor, chunk=chunk, top=top
            )
        with torch.no_grad(), backbone.original():
            teacher = backbone.hidden(batch).flatten(0, 1)
        return distillation_loss(
            hidden,
            backbone.lm_head,
            teacher,
            without_adapter(backbone.lm_head),
            labels,
            segments=segments,
            normaliser=divisor,
            chunk=chunk,
        )
