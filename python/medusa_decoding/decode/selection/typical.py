"""Typical acceptance (Medusa paper, section 2.3.1): drafts that are likely enough are kept, likeliest or not.

Lossy: the text has another distribution than the model's. A guess x is accepted where

    p(x | prefix) > min(epsilon, delta * exp(-H(p( . | prefix))))

p being the model's distribution at the guess's parent (at a temperature) and H its entropy in nats. The root is
greedy, so that a step emits at least one token; the longest accepted path is kept, among equals the one of the
highest likelihood.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from medusa_decoding.decode.verify import Nodes, allowed_logits
from medusa_decoding.heads import plain_weight
from medusa_kernels import tree_verify
from medusa_kernels.reference import verify_stats

if TYPE_CHECKING:
    from medusa_decoding.decode.state import DecodeState, Rules


class Typical:
    """The paper's acceptance rule, as a choice of next tokens that `accept` follows.

    A small epsilon keeps nearly every guess. No setting gives greedy decoding: with epsilon 1 and delta next to 1, a
    guess is kept whose surprise -log p is below the entropy, that is, below the mean surprise; all drafts of a
    uniform distribution are.

    Args:
        threshold: epsilon, above 0 and at most 1.
        alpha: delta, above 0 and below 1. (Below 1 the likeliest token is always accepted, as its probability is at
            least exp(-H).)
        temperature: of p; above 0.

    Raises:
        ValueError: a value outside of its range.
    """

    on_host = False

    def __init__(self, threshold: float = 0.09, alpha: float = 0.3, temperature: float = 1.0) -> None:
        if not isinstance(threshold, (int, float)) or not 0.0 < threshold <= 1.0:
            raise ValueError(f"posterior_threshold: expected above 0 and at most 1, got {threshold!r}")
        if not isinstance(alpha, (int, float)) or not 0.0 < alpha < 1.0:
            raise ValueError(f"posterior_alpha: expected above 0 and below 1, got {alpha!r}")
        if not isinstance(temperature, (int, float)) or not 0.0 < temperature < float("inf"):
            raise ValueError(f"temperature: expected above 0 and finite, got {temperature!r}")
        self.threshold, self.alpha, self.temperature = threshold, alpha, temperature
        self.key = ("typical", threshold, alpha, temperature)

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, rules: Rules) -> torch.Tensor:
        """Return [B, N]: along the accepted path its own tokens, behind its last node the likeliest."""
        best, entropy, logprobs = self._statistics(nodes, lm_head, state, rules)
        shape = nodes.shape
        likely = shape.at_parents((self.alpha * torch.exp(-entropy)).clamp(max=self.threshold))
        # The likeliest token passes by definition; with alpha next to 1, rounding must not undo that.
        greedy = nodes.tokens == shape.at_parents(best)
        accepted = (torch.exp(logprobs) > likely) | greedy | (shape.depths == 0)
        whole_path = shape.along_paths(accepted).all(-1)
        # The padding of `paths` repeats the last node, whose likelihood counts once.
        on_path = torch.arange(shape.depth + 1, device=best.device) <= shape.depths[..., None]
        likelihood = torch.where(on_path, shape.along_paths(logprobs), 0.0).sum(-1)
        reached = torch.where(whole_path, shape.depths, -1)
        longest = reached == reached.amax(1, keepdim=True)
        end = torch.where(longest, likelihood, float("-inf")).argmax(1)
        depth, path = shape.at(end)
        return _lead_to(end, path, nodes.tokens, best, shape.depths == depth[:, None])

    def _statistics(
        self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, rules: Rules
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Likeliest token and entropy at every node, and the log-probability of its own token at its parent."""
        weight, parents = plain_weight(lm_head), nodes.shape.parents
        if weight is not None and rules.min_new is None and self.temperature == 1.0:
            best, logsumexp, entropy, logprobs = tree_verify(nodes.hidden, weight, nodes.tokens, parents)
            torch.sum(logsumexp, 1, out=state.check)
            return best, entropy, logprobs
        logits = allowed_logits(nodes, lm_head, state, rules).float() / self.temperature
        # Tokens that may not be chosen have no share in the entropy (0 * log 0 is 0).
        finite = logits.clamp(min=torch.finfo(torch.float32).min)
        _, entropy, logprobs = verify_stats(finite, nodes.tokens, parents)
        return logits.argmax(-1), entropy, logprobs


def _lead_to(
    end: torch.Tensor, path: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor, as_deep: torch.Tensor
) -> torch.Tensor:
    """Next tokens that make `accept` take exactly this path: end int64 [B], path int64 [B, P] padded with end.

    as_deep bool [B, N] says which nodes have the end's depth.

    Siblings may carry one token (a copied branch beside a guess). Nothing leads on from those beside the path; beside
    its end they are as good as the end itself.
    """
    next_tokens = torch.where(as_deep, best, -1)
    next_tokens.scatter_(1, path[:, :-1], tokens.gather(1, path[:, 1:]))
    return next_tokens.scatter_(1, end[:, None], best.gather(1, end[:, None]))
