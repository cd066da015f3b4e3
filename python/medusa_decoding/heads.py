"""MedusaHeads: K small heads on the last hidden state, each guessing one further token (Medusa paper, section 2.1.1).

Head k (0-based) predicts the token k + 2 places after its input position: residual blocks
`h <- h + SiLU(W1 h + b1)`, then a vocabulary projection W2, which may be the base model's own lm_head (version 2 of the
paper's checkpoints), and may cover a trimmed vocabulary through `token_map`. The weights of all heads are packed into
one tensor a role, so that one kernel reads them in one pass. This module does not know trees, caches or base models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from medusa_kernels import heads_topk

MAX_TOP_K = 32


class MedusaHeads(nn.Module):
    """K Medusa heads with packed weights.

    Args:
        hidden_size: H, the base model's hidden size.
        vocab_size: V, the base model's vocabulary size (the range of proposed token ids).
        num_heads: K, at least 1.
        num_layers: residual blocks a head, at least 1.
        shared_projection: use the base model's lm_head instead of own projections; pass its weight to `propose`.
        bias: whether the residual blocks have a bias.
        token_map: int64 [V'] real token ids of a trimmed vocabulary's rows, without repetition; None for all of V.
        dtype, device: of the weights.

    Attributes:
        w1: [K, L, H, H] residual weights, zero at the start (a fresh head repeats the base model's own prediction).
        b1: [K, L, H] residual biases or None.
        w2: [K, V', H] projections, or None with a shared projection.
        token_map: int64 [V'] or None.

    Raises:
        ValueError: a count below 1, or a token_map with repeated ids or ids outside [0, V).
    """

    w1: nn.Parameter
    b1: nn.Parameter | None
    w2: nn.Parameter | None
    token_map: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        shared_projection: bool = False,
        bias: bool = True,
        token_map: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_heads", num_heads), ("num_layers", num_layers), ("hidden_size", hidden_size)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if token_map is not None:
            _check_token_map(token_map, vocab_size)
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers = num_heads, num_layers

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device))

        self.w1 = zeros(num_heads, num_layers, hidden_size, hidden_size)
        self.b1 = zeros(num_heads, num_layers, hidden_size) if bias else None
        self.register_buffer("token_map", None if token_map is None else token_map.to(device), persistent=True)
        self.w2 = None if shared_projection else zeros(num_heads, self.num_candidates, hidden_size)

    @property
    def shared_projection(self) -> bool:
        """Whether the heads project with the base model's lm_head."""
        return self.w2 is None

    @property
    def num_candidates(self) -> int:
        """V', the tokens a head can propose: all of V, or those of the trimmed vocabulary."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    def residual(self, hidden: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        """Run the first `layers` residual blocks (all by default): hidden [B, H] -> [B, K, H]."""
        return self._states(hidden, self.num_layers if layers is None else layers).transpose(0, 1)

    def _states(self, hidden: torch.Tensor, layers: int) -> torch.Tensor:
        # Heads first, [K, B, H]: every product is then one batched matrix product of contiguous blocks.
        states = hidden.expand(self.num_heads, -1, -1)
        for layer in range(layers):
            update = torch.bmm(states, self.w1[:, layer].transpose(1, 2))
            if self.b1 is not None:
                update = update + self.b1[:, layer, None]
            states = states + F.silu(update)
        return states

    def forward(self, hidden: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """Return all logits: hidden [B, H] -> [B, K, V'] (training and reference; `propose` never makes this tensor).

        Args:
            hidden: [B, H] hidden states after the base model's final norm.
            lm_head: the base model's lm_head; needed exactly when the projection is shared.
        """
        states = self._states(hidden, self.num_layers)
        if self.w2 is not None:
            return torch.bmm(states, self.w2.transpose(1, 2)).transpose(0, 1)
        if lm_head is None:
            raise ValueError("lm_head: expected the base model's lm_head (the heads share it), got None")
        logits = lm_head(states)
        return (logits if self.token_map is None else logits[..., self.token_map]).transpose(0, 1)

    def propose(
        self, hidden: torch.Tensor, k: int, lm_head: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each head's k best tokens at one position a row, best first, through the op `heads_topk`.

        Args:
            hidden: [B, H] hidden state of each row's last accepted token, after the base model's final norm.
            k: how many tokens a head, 1 to 32.
            lm_head: the base model's lm_head; needed exactly when the projection is shared. One that is not a plain
                Linear without bias (quantised, LoRA-wrapped) is called as the module it is.

        Returns:
            logprobs fp32 [B, K, k] and tokens int64 [B, K, k].
        """
        last = self.num_layers - 1
        states = hidden if last == 0 else self.residual(hidden, last)
        weight = self.w2 if self.w2 is not None else plain_weight(lm_head)
        if weight is None:
            return self._propose_through_module(hidden, k, lm_head)
        b1 = None if self.b1 is None else self.b1[:, last]
        gather = self.w2 is None and self.token_map is not None
        return heads_topk(states, self.w1[:, last], b1, weight, k, token_map=self.token_map, gather=gather)

    def _propose_through_module(
        self, hidden: torch.Tensor, k: int, lm_head: nn.Module | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.forward(hidden, lm_head).float()
        values, tokens = logits.topk(k, dim=-1)
        if self.token_map is not None:
            tokens = self.token_map[tokens]
        return values - logits.logsumexp(-1, keepdim=True), tokens

    def extra_repr(self) -> str:
        """Describe the heads in one line for `print(model)`."""
        projection = "shared" if self.shared_projection else f"own [{self.w2.shape[1]}]" if self.w2 is not None else ""
        return f"heads={self.num_heads}, layers={self.num_layers}, hidden={self.hidden_size}, projection={projection}"


def plain_weight(linear: nn.Module | None) -> torch.Tensor | None:
    """Return the weight of a plain bias-free `nn.Linear` without hooks, else None (call the module instead)."""
    if type(linear) is nn.Linear and linear.bias is None and not is_hooked(linear):
        # A tensor subclass (a quantised weight) is for its own module's product.
        return linear.weight if type(linear.weight) in (nn.Parameter, torch.Tensor) else None
    return None


def is_hooked(module: nn.Module) -> bool:
    """Return whether calling the module does more than its class's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or _has_another_forward(module)


def _has_another_forward(module: nn.Module) -> bool:
    own = vars(module)
    if "forward" not in own:
        return False
    # accelerate, taking its hooks off again, leaves the class's forward behind, bound to the module.
    forward = own["forward"]
    return getattr(forward, "__self__", None) is not module or forward.__func__ is not type(module).forward


def _check_token_map(token_map: torch.Tensor, vocab_size: int) -> None:
    if token_map.ndim != 1 or token_map.dtype != torch.int64:
        raise ValueError(f"token_map: expected int64 [V'], got {token_map.dtype} {list(token_map.shape)}")
    if int(token_map.min()) < 0 or int(token_map.max()) >= vocab_size:
        raise ValueError(
            f"token_map: expected ids in [0, {vocab_size}), got {int(token_map.min())} to {int(token_map.max())}"
        )
    if len(torch.unique(token_map)) != len(token_map):
        raise ValueError(f"token_map: expected ids without repetition, got {len(token_map)} ids with repetitions")
