"""Typical acceptance (Medusa paper, section 2.3.1): draft tokens that are likely enough are accepted.

Lossy: the text does not have the model's distribution. A draft token x is accepted if

    p(x | prefix) > min(epsilon, delta * exp(-H(p( . | prefix))))

where p is the model's distribution at the draft's parent (at a temperature) and H its entropy in nats. The root is
greedy, so that a step emits at least one token. The longest accepted path is kept; among equally long ones, the one of
the highest likelihood.
"""

from __future__ import annotations

import torch
from torch import nn

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import Nodes, TokenSelector, allowed_logits
from medusa_decoding.linears.logits import logits_projection
from medusa_kernels import tree_verify
from medusa_kernels.reference import verify_stats


class TypicalAcceptance(TokenSelector):
    """The paper's typical acceptance, expressed as next tokens that `accept` follows.

    A small epsilon accepts nearly every draft. No setting gives greedy decoding: with epsilon 1 and delta close to 1, a
    draft is accepted if its surprise -log p is below the entropy, that is, below the mean surprise; every draft of a
    uniform distribution is.

    Args:
        threshold: epsilon, above 0 and at most 1.
        alpha: delta, above 0 and below 1. (Below 1 the argmax is always accepted, as its probability is at least
            exp(-H).)
        temperature: of p; above 0.
    """

    def __init__(self, threshold: float = 0.09, alpha: float = 0.3, temperature: float = 1.0) -> None:
        if not isinstance(threshold, (int, float)) or not 0.0 < threshold <= 1.0:
            raise ValueError(f"posterior_threshold: expected above 0 and at most 1, got {threshold!r}")
        if not isinstance(alpha, (int, float)) or not 0.0 < alpha < 1.0:
            raise ValueError(f"posterior_alpha: expected above 0 and below 1, got {alpha!r}")
        if not isinstance(temperature, (int, float)) or not 0.0 < temperature < float("inf"):
            raise ValueError(f"temperature: expected above 0 and finite, got {temperature!r}")
        self.threshold, self.alpha, self.temperature = threshold, alpha, temperature
        self.key = ("typical", threshold, alpha, temperature)

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
        """Return [B, N]: along the accepted path its own tokens, then the argmax after its last node."""
        best, entropy, logprobs = self._statistics(nodes, lm_head, state, limits)
        shape = nodes.shape
        likely = shape.at_parents((self.alpha * torch.exp(-entropy)).clamp(max=self.threshold))
        # The argmax passes by definition; with alpha close to 1, rounding must not undo that.
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
        self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return argmax and entropy at every node, and the log-probability of its own token at its parent."""
        (projected, divisor, softcap), parents = logits_projection(lm_head), nodes.shape.parents
        if projected is not None and limits.min_new_tensor is None and self.temperature == 1.0:
            best, logsumexp, entropy, logprobs = tree_verify(
                nodes.hidden, projected.weight, nodes.tokens, parents,
                weight_scale=projected.scale, weight_zero=projected.zero, codes=projected.codes, divisor=divisor,
                softcap=softcap,
            )  # fmt: skip
            torch.sum(logsumexp, 1, out=state.check)
            return best, entropy, logprobs
        logits = allowed_logits(nodes, lm_head, state, limits).float() / self.temperature
        # Suppressed tokens have no share in the entropy (0 * log 0 is 0).
        finite = logits.clamp(min=torch.finfo(torch.float32).min)
        _, entropy, logprobs = verify_stats(finite, nodes.tokens, parents)
        return logits.argmax(-1), entropy, logprobs


def _lead_to(
    end: torch.Tensor, path: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor, as_deep: torch.Tensor
) -> torch.Tensor:
    """Return next tokens that make `accept` take exactly this path: end int64 [B], path int64 [B, P] padded with end.

    as_deep bool [B, N] says which nodes have the end's depth. Siblings may have the same token (a copied and a drafted
    one). Nodes next to the path get no next token; nodes next to its end get the same one as the end.
    """
    next_tokens = torch.where(as_deep, best, -1)
    next_tokens.scatter_(1, path[:, :-1], tokens.gather(1, path[:, 1:]))
    return next_tokens.scatter_(1, end[:, None], best.gather(1, end[:, None]))
