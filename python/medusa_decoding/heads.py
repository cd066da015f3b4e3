"""MedusaHeads: K small heads on the last hidden state, each drafting one more token (Medusa paper, section 2.1.1).

Head k (0-based) predicts the token k + 2 positions after its input: residual blocks `h <- h + SiLU(W1 h + b1)`, then a
vocabulary projection W2. The weights of all heads are packed into one tensor per role, for one pass of one kernel.

Beyond the paper, heads may depend on tokens that the hidden state has not seen. With a root input, head k's residual
blocks start from `h + U_k D e`, where e is the root token's row of the base model's input embedding, scaled to a root
mean square of 1 (Hydra, arXiv 2402.05109, gives heads the embeddings of earlier tokens too). With a parent term, drafts
depend on the token before them, their parent in the tree, by a low-rank score that is added to the logits,
A[parent] M_k C[candidate]. Different parents then have different children.

Heads may also read states of earlier layers, as EAGLE-3's draft model does (arXiv 2503.01840, section 3.1): a linear
map of these and of the last state, each scaled to a root mean square of 1/8, is added to the last state, in front of
all heads. Their input is then the last state followed by the others, [B, (1 + F) H].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from medusa_decoding.checks import shown
from medusa_decoding.linears.logits import logits_projection
from medusa_kernels import Projection, decode_linear, heads_topk

MAX_TOP_K = 32
RMS_EPSILON = 1e-6
"""Added to the mean square of an embedding or a state before its root is taken."""
FEATURE_SIZE = 1 / 8
"""The root mean square of a state in front of the feature map: with 1, steps of AdamW would change heads too much."""
Storage = Literal["float", "int8", "fp8"]
STORED: dict[Storage, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The dtypes of own projections that are stored in 8 bits."""


class DraftTokens(NamedTuple):
    """The heads' top k tokens at one position per row, best first.

    Attributes:
        logprobs: fp32 [B, K, k].
        tokens: int64 [B, K, k].
    """

    logprobs: torch.Tensor
    tokens: torch.Tensor


class Children(NamedTuple):
    """The children of each candidate, for heads whose drafts depend on their parent.

    Attributes:
        tokens: int64 [B, K, n], each head's top n tokens regardless of a parent.
        order: int64 [B, K, n, k], the indices in `tokens[:, j]` of head j's top k drafts, best first, after each of the
            n candidates of head j - 1. Head 0 has one parent, the root: its n rows are equal.
        logprobs: fp32 [B, K, n], of `tokens`, regardless of a parent.
        scores: fp32 [B, K, n, n], the scores of all n candidates after each parent, best first.
    """

    tokens: torch.Tensor
    order: torch.Tensor
    logprobs: torch.Tensor
    scores: torch.Tensor

    def of_children(self) -> torch.Tensor:
        """Return log-probabilities fp32 [B, K, n, k] of the tokens that `order` names.

        After any parent, the n candidates together keep the probability that the head gives them without a parent:
        exact values would need the scores of all other tokens.
        """
        together = self.logprobs.logsumexp(-1, keepdim=True) - self.scores.logsumexp(-1)
        return self.scores[..., : self.order.shape[-1]] + together[..., None]


class MedusaHeads(nn.Module):
    """K Medusa heads with packed weights.

    Args:
        hidden_size: H, the base model's hidden size.
        vocab_size: V, the base model's vocabulary size (the range of proposed token ids).
        num_heads: K, at least 1.
        num_layers: residual blocks per head, at least 1.
        shared_projection: use the base model's lm_head instead of own projections; pass it to `propose`.
        bias: whether the residual blocks have a bias.
        token_map: int64 [V'] token ids of a trimmed vocabulary's rows, without repetition; None for all of V.
        storage: of own projections. "int8" and "fp8" (e4m3) have one scale per row, are made by `quantized` or read
            from a checkpoint, and cannot be trained.
        parent_rank: r, rank of the term by which drafts depend on their parent token; 0 for none.
        root_rank: rank of every head's input from the root token's embedding, at most H; 0 for none.
        feature_layers: after how many of the base model's layers states are read besides the last one, ascending, each
            at least 1; as in transformers' `hidden_states`.
        all_parents: give every parent token its own row of the term. Otherwise, with a token_map, all tokens outside it
            share one: they are rare, and drafts are always inside it, so only the root can be one of them.
        dtype: of the weights. Converting the module (`to`, `half`) leaves 8-bit projections and scales alone.
        device: of the weights.

    Attributes:
        w1: [K, L, H, H] residual weights, initially zero (a new head repeats the base model's own prediction).
        b1: [K, L, H] residual biases or None.
        w2: [K, V', H] projections, a parameter, or a buffer in 8 bits; None with a shared projection.
        w2_scale: fp32 [K, V'], the factor of each row of w2 in 8 bits, else None.
        token_map: int64 [V'] or None.
        parent_tokens: A [V, r], initially random (from torch's generator on the CPU), or None. With a token_map and
            without all_parents [V' + 1, r]: its tokens in their order, and last all others (if these are several).
        candidate_tokens: C [V', r], initially zero (so the term is zero), or None.
        parent_mix: M [K, r, r], initially the identity, or None.
        root_down: D [root_rank, H], initially random (from torch's generator on the CPU), or None.
        root_up: U [K, H, root_rank], initially zero (so the root makes no difference), or None.
        feature_map: [H, (1 + F) H] of the last state and those of F feature_layers, initially zero, or None.

    Raises:
        MemoryError: weights of these sizes do not fit.
        ValueError: a count below 1 (ranks: below 0), a root_rank above H, feature_layers out of order, a token_map with
            repeated ids or ids outside [0, V), an unknown storage, or storage in 8 bits with a shared projection.
    """

    w1: nn.Parameter
    b1: nn.Parameter | None
    w2: torch.Tensor | None
    w2_scale: torch.Tensor | None
    token_map: torch.Tensor | None
    parent_tokens: nn.Parameter | None
    candidate_tokens: nn.Parameter | None
    parent_mix: nn.Parameter | None
    root_down: nn.Parameter | None
    root_up: nn.Parameter | None
    feature_map: nn.Parameter | None
    _map_rows: torch.Tensor | None

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
        storage: Storage = "float",
        parent_rank: int = 0,
        root_rank: int = 0,
        feature_layers: Sequence[int] = (),
        all_parents: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("hidden_size", hidden_size, 1), ("vocab_size", vocab_size, 1), ("num_heads", num_heads, 1),
            ("num_layers", num_layers, 1), ("parent_rank", parent_rank, 0), ("root_rank", root_rank, 0),
        ):  # fmt: skip
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
                raise ValueError(f"{name}: expected at least {least}, got {shown(value)}")
        if root_rank > hidden_size:
            raise ValueError(f"root_rank: expected at most {hidden_size} (the hidden size), got {root_rank}")
        if not isinstance(storage, str) or storage not in ("float", *STORED):
            raise ValueError(f"storage: expected 'float', 'int8' or 'fp8', got {shown(storage)}")
        if storage != "float" and shared_projection:
            raise ValueError(f"storage: expected 'float' with a shared projection (none is owned), got {storage!r}")
        for name, flag in (("shared_projection", shared_projection), ("bias", bias), ("all_parents", all_parents)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name}: expected True or False, got {shown(flag)}")
        listed = isinstance(feature_layers, (list, tuple)) and all(type(n) is int and n > 0 for n in feature_layers)
        if not listed or sorted({*feature_layers}) != [*feature_layers]:
            raise ValueError(f"feature_layers: expected ascending numbers of layers, got {shown(feature_layers)}")
        if token_map is not None:
            _check_token_map(token_map, vocab_size)
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers = num_heads, num_layers
        self.storage: Storage = storage
        self.parent_rank, self.root_rank, self.all_parents = parent_rank, root_rank, all_parents
        self.feature_layers = tuple(feature_layers)

        def zeros(*shape: int) -> nn.Parameter:
            try:
                return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device))
            except RuntimeError as error:  # also torch.OutOfMemoryError
                if not any(word in str(error) for word in ("memory", "overflow")):
                    raise
                raise MemoryError(f"heads: expected sizes that fit in memory, got a tensor {list(shape)}") from error

        self.w1 = zeros(num_heads, num_layers, hidden_size, hidden_size)
        self.b1 = zeros(num_heads, num_layers, hidden_size) if bias else None
        self.register_buffer("token_map", None if token_map is None else token_map.to(device, copy=True))
        projections = num_heads, self.num_candidates, hidden_size
        if storage == "float":
            self.w2 = None if shared_projection else zeros(*projections)
            self.register_buffer("w2_scale", None)
        else:
            self.register_buffer("w2", torch.zeros(projections, dtype=STORED[storage], device=device))
            self.register_buffer("w2_scale", torch.zeros(projections[:2], dtype=torch.float32, device=device))
        self.register_buffer("_map_rows", None, persistent=False)
        self.parent_tokens = self.candidate_tokens = self.parent_mix = None
        if parent_rank:
            parents = vocab_size if all_parents else min(vocab_size, self.num_candidates + 1)
            self.parent_tokens = zeros(parents, parent_rank)
            self.candidate_tokens = zeros(projections[1], parent_rank)
            self.parent_mix = zeros(num_heads, parent_rank, parent_rank)
            with torch.no_grad():
                # Drawn on the CPU, so that all devices begin with the same numbers; rows have a norm of about 1.
                self.parent_tokens.copy_(torch.randn(parents, parent_rank, device="cpu") * parent_rank**-0.5)
                self.parent_mix.copy_(torch.eye(parent_rank))
        self.root_down = self.root_up = None
        if root_rank:
            self.root_down = zeros(root_rank, hidden_size)
            self.root_up = zeros(num_heads, hidden_size, root_rank)
            with torch.no_grad():  # e has the norm H^0.5, so the elements of D e are about 1
                self.root_down.copy_(torch.randn(root_rank, hidden_size, device="cpu") * hidden_size**-0.5)
        self.feature_map = zeros(hidden_size, self.input_size) if self.feature_layers else None
        self._find_map_rows()

    @property
    def input_size(self) -> int:
        """(1 + F) H, the size of what heads read at a position: the last state and those of F feature layers."""
        return (1 + len(self.feature_layers)) * self.hidden_size

    @property
    def shared_projection(self) -> bool:
        """Whether the heads project with the base model's lm_head."""
        return self.w2 is None

    @property
    def num_candidates(self) -> int:
        """V', how many tokens a head can propose: V, or the size of the trimmed vocabulary."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    @property
    def parent_term(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        """A, M and C, see the class; raises `ValueError` if the heads have none."""
        if self.parent_tokens is None or self.parent_mix is None or self.candidate_tokens is None:
            raise ValueError("heads: expected some whose drafts depend on their parent, got parent_rank 0")
        return self.parent_tokens, self.parent_mix, self.candidate_tokens

    def parent_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which rows of A parent tokens have: int64 ids in [0, V), of any shape -> int64 of that shape."""
        if self._map_rows is None or len(self.parent_term[0]) == self.vocab_size:
            return tokens
        return self._map_rows[tokens]

    def residual(self, hidden: torch.Tensor, root_embedding: torch.Tensor | None = None) -> torch.Tensor:
        """Run the residual blocks: hidden [B, (1 + F) H] -> [B, K, H]; `root_embedding` as in `forward`."""
        return self._states(hidden, root_embedding).transpose(0, 1)

    def _read(self, hidden: torch.Tensor, linear: Callable[..., torch.Tensor] = F.linear) -> torch.Tensor:
        """Return what the heads start from, [B, H]: the last state and the map of all states."""
        if hidden.shape[-1] != self.input_size:
            raise ValueError(f"hidden: expected [B, {self.input_size}], got {list(hidden.shape)}")
        if self.feature_map is None:
            return hidden
        states = hidden.unflatten(-1, (-1, self.hidden_size))
        scaled = _scaled(states, hidden.dtype).flatten(-2) * FEATURE_SIZE
        return states[..., 0, :] + linear(scaled, self.feature_map)

    def _root(
        self, hidden: torch.Tensor, embedding: torch.Tensor | None, linear: Callable[..., torch.Tensor] = F.linear
    ) -> torch.Tensor | None:
        """Return D e of each row's root, [B, root_rank] in the dtype of hidden, or None without a root input."""
        if (embedding is not None) != (self.root_rank > 0):
            wanted = "the root tokens' (the heads have a root_rank)" if self.root_rank else "None (root_rank 0)"
            raise ValueError(f"root_embedding: expected {wanted}, got {type(embedding).__name__}")
        if embedding is None or self.root_down is None:
            return None
        if embedding.shape != hidden.shape:
            raise ValueError(f"root_embedding: expected {list(hidden.shape)}, got {list(embedding.shape)}")
        return linear(_scaled(embedding, hidden.dtype), self.root_down)

    def _states(self, hidden: torch.Tensor, root_embedding: torch.Tensor | None) -> torch.Tensor:
        # Heads first, [K, B, H]: every product is then one batched matrix product of contiguous blocks.
        hidden = self._read(hidden)
        states, root = hidden.expand(self.num_heads, -1, -1), self._root(hidden, root_embedding)
        if root is not None and self.root_up is not None:
            states = states + torch.bmm(root.expand(self.num_heads, -1, -1), self.root_up.transpose(1, 2))
        for layer in range(self.num_layers):
            update = torch.bmm(states, self.w1[:, layer].transpose(1, 2))
            if self.b1 is not None:
                update = update + self.b1[:, layer, None]
            states = states + F.silu(update)
        return states

    def forward(
        self,
        hidden: torch.Tensor,
        lm_head: nn.Module | None = None,
        parents: torch.Tensor | None = None,
        root_embedding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return all logits: hidden [B, (1 + F) H] -> [B, K, V'], for training and as a reference.

        `propose` never makes this tensor.

        Args:
            hidden: [B, (1 + F) H], states after the base model's final norm, followed by those after each of
                `feature_layers`.
            lm_head: the base model's lm_head; needed exactly when the projection is shared.
            parents: int64 [B, K], the token before each head's draft; without it the logits lack the parent's term.
            root_embedding: floats [B, H], the root tokens' rows of the base model's input embedding, of any scale;
                needed exactly if the heads have a root_rank.

        Raises:
            ValueError: a missing lm_head, a misshapen hidden, or a missing, superfluous or misshapen root_embedding.
        """
        states = self._states(hidden, root_embedding)
        if self.w2 is not None:
            w2 = self.w2
            if self.w2_scale is not None:
                w2 = (w2.float() * self.w2_scale[..., None]).to(states.dtype)
            logits = torch.bmm(states, w2.transpose(1, 2))
        elif lm_head is None:
            raise ValueError("lm_head: expected the base model's lm_head (the heads share it), got None")
        else:
            logits = lm_head(states)
            logits = logits if self.token_map is None else logits[..., self.token_map]
        if parents is not None:
            tokens, mix, candidates = self.parent_term
            logits = logits + torch.bmm(tokens[self.parent_rows(parents.t())], mix) @ candidates.t()
        return logits.transpose(0, 1)

    def stored_logits(self, lm_head: nn.Module | None) -> int:
        """Return how many logits `propose` stores for each sequence: all heads' if it calls a module, else 0."""
        return 0 if self._projected(lm_head)[0] else self.num_heads * self.vocab_size

    def _projected(self, lm_head: nn.Module | None) -> tuple[Projection | None, float, float | None]:
        """Return what `heads_topk` projects with, or None (call the module), and the logits' divisor and softcap."""
        if self.w2 is not None:
            return Projection(self.w2, scale=self.w2_scale), 1.0, None
        return logits_projection(lm_head)

    def propose(
        self,
        hidden: torch.Tensor,
        k: int,
        lm_head: nn.Module | None = None,
        *,
        root_embedding: torch.Tensor | None = None,
        temperature: float = 1.0,
        noise: torch.Tensor | None = None,
    ) -> DraftTokens:
        """Return each head's top k tokens at one position per row, best first, by the op `heads_topk`.

        The parents' term is not included: see `propose_children`.

        Args:
            hidden: [B, (1 + F) H], as in `forward`, of each row's last accepted token.
            k: tokens per head, 1 to 32.
            lm_head: the base model's lm_head; needed exactly when the projection is shared. What the op cannot read
                (see `linears.reading`), such as one wrapped by peft, is called as a module.
            root_embedding: as in `forward`.
            temperature: divides the logits, above 0.
            noise: fp32 [B, at least K, V], added to the logits of head j and token t: noise[:, j, t]. With the numbers
                that sampling adds at the same place, tokens are ranked by how likely they are to be drawn there.
        """
        projected, divisor, softcap = self._projected(lm_head)
        if projected is None:
            logits = self.forward(hidden, lm_head, root_embedding=root_embedding).float() / temperature
            if noise is not None:
                of_heads = noise[:, : self.num_heads]
                logits = logits + (of_heads if self.token_map is None else of_heads[..., self.token_map])
            values, tokens = logits.topk(k, dim=-1)
            if self.token_map is not None:
                tokens = self.token_map[tokens]
            return DraftTokens(values - logits.logsumexp(-1, keepdim=True), tokens)
        gather = self.w2 is None and self.token_map is not None
        # On a CPU by the threads of the op beside it: those of OpenMP would wait, busily, on the cores that it needs.
        on_cpu = hidden.device.type == "cpu"
        linear = _decode_linear if on_cpu else F.linear
        hidden = self._read(hidden, linear)
        root = self._root(hidden, root_embedding, linear)
        best = heads_topk(
            hidden, self.w1, self.b1, projected.weight, k,
            w2_scale=projected.scale, token_map=self.token_map, gather=gather,
            root=root, w_root=self.root_up, noise=noise,
            temperature=temperature, w2_zero=projected.zero, codes=projected.codes, divisor=divisor, softcap=softcap,
        )  # fmt: skip
        return DraftTokens(*best)

    def propose_children(
        self,
        hidden: torch.Tensor,
        root: torch.Tensor,
        k: int,
        lm_head: nn.Module | None = None,
        *,
        root_embedding: torch.Tensor | None = None,
        temperature: float = 1.0,
        noise: torch.Tensor | None = None,
    ) -> Children:
        """Return each head's top tokens, and the top k of them after each token of the previous head.

        The top 32 of `propose` (all, in a smaller vocabulary) are ranked again by log-probability plus the parents'
        term over the temperature, in fp32. Equal scores keep the order of `propose`. For heads with a parent_rank.

        Args:
            hidden: [B, (1 + F) H], as in `forward`.
            root: int64 [B], the token before the drafts of head 0: the model's own next token.
            k: drafts after each token, 1 to min(32, V').
            lm_head: as in `propose`.
            root_embedding: as in `forward`.
            temperature: as in `propose`.
            noise: as in `propose`.
        """
        of_parents, mix, of_candidates = self.parent_term
        size = min(MAX_TOP_K, self.num_candidates)
        logprobs, tokens = self.propose(
            hidden, size, lm_head, root_embedding=root_embedding, temperature=temperature, noise=noise
        )
        rows = tokens if self._map_rows is None else self._map_rows[tokens]
        before = torch.cat([root[:, None, None].expand(-1, 1, size), tokens[:, :-1]], dim=1)
        # [B, K, parents, r], then [B, K, parents, candidates].
        with _one_thread(hidden):
            mixed = of_parents[self.parent_rows(before)].float() @ mix.float()
            scores = mixed @ of_candidates[rows].float().transpose(-1, -2) / temperature + logprobs[:, :, None]
            ranked = scores.sort(dim=-1, descending=True, stable=True)
        return Children(tokens, ranked.indices[..., :k], logprobs, ranked.values)

    def quantized(self, storage: Storage) -> MedusaHeads:
        """Return a copy, for decoding, whose own projections are stored in 8 bits.

        Quantisation is symmetric, with one scale per row: its largest magnitude becomes 127 (int8) or 448 (fp8).

        The copy is in eval mode and without gradients; all other weights are copied. `storage` is "int8" or "fp8".

        Raises:
            ValueError: an unknown storage, a shared projection, projections already in 8 bits, NaN or Inf.
        """
        if storage not in STORED:
            raise ValueError(f"storage: expected 'int8' or 'fp8', got {storage!r}")
        if self.w2 is None or self.storage != "float":
            kind = "a shared one" if self.w2 is None else f"one in {self.storage}"
            raise ValueError(f"heads: expected an own projection in floats, got {kind}")
        found = self.remade(storage=storage)
        stored, scale = found.get_buffer("w2"), found.get_buffer("w2_scale")
        for head in range(self.num_heads):
            _quantise(f"w2[{head}]", self.w2[head].detach(), stored[head], scale[head])
        return found

    def place(self, device: torch.device, dtype: torch.dtype) -> MedusaHeads:
        """Move the heads to a base model's device and dtype, and return them.

        Projections in 8 bits and their scales keep their dtype, as with `to`.

        Raises:
            ValueError: weights that are not finite in this dtype; the heads have been converted and are unusable.
        """
        before = self.w1.dtype
        self.to(device=device, dtype=dtype)
        names = not_finite(dict(self.named_parameters())) if dtype != before else []
        if names:
            raise ValueError(
                f"heads: expected weights that are finite in {dtype}, got larger ones in {', '.join(names)}; load the "
                f"model in {before}"
            )
        return self

    def remade(self, **changes: Any) -> MedusaHeads:
        """Return a copy for decoding with other settings: all weights are copied but own projections, which are zero.

        Args:
            **changes: arguments of the class that replace these heads' own (storage is "float" by default).
        """
        own = {
            "shared_projection": self.shared_projection,
            "bias": self.b1 is not None,
            "token_map": self.token_map,
            "parent_rank": self.parent_rank,
            "root_rank": self.root_rank,
            "feature_layers": self.feature_layers,
            "all_parents": self.all_parents,
            "dtype": self.w1.dtype,
            "device": self.w1.device,
        }
        # Low-rank terms draw random numbers, which are then overwritten: the caller's generator must not change.
        with torch.random.fork_rng(devices=[]):
            found = MedusaHeads(self.hidden_size, self.vocab_size, self.num_heads, self.num_layers, **(own | changes))
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                if name != "w2":
                    parameter.copy_(self.get_parameter(name))
        return found.requires_grad_(False).eval()

    def extra_repr(self) -> str:
        """Describe the heads in one line for `print(model)`."""
        projection = "shared" if self.w2 is None else f"own [{self.w2.shape[1]}]"
        stored = "" if self.storage == "float" else f", storage={self.storage}"
        parents = f", parent_rank={self.parent_rank}" if self.parent_rank else ""
        sizes = f"heads={self.num_heads}, layers={self.num_layers}, hidden={self.hidden_size}"
        root = f", root_rank={self.root_rank}" if self.root_rank else ""
        features = f", feature_layers={list(self.feature_layers)}" if self.feature_layers else ""
        return f"{sizes}, projection={projection}{stored}{parents}{root}{features}"

    def _find_map_rows(self) -> None:
        # The index of each token in a trimmed vocabulary's token_map, V' for tokens outside it.
        if self.token_map is not None and self.parent_rank:
            shape = (self.vocab_size,), len(self.token_map)
            rows = torch.full(*shape, dtype=torch.int64, device=self.token_map.device)
            rows[self.token_map] = torch.arange(len(self.token_map), device=rows.device)
            self._map_rows = rows

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MedusaHeads:
        # 8-bit projections and their scales move with the module as raw bits, without a conversion to another dtype.
        held = () if self.w2_scale is None else (id(self.w2), id(self.w2_scale))

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in held:
                return fn(tensor)
            words = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int32)
            result = fn(words)
            return (result if result.dtype == words.dtype else words.to(result.device)).view(tensor.dtype)

        return super()._apply(moved, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Copying from another dtype would convert silently, and converted 8-bit values are meaningless.
        stored = STORED.get(self.storage)
        given = state_dict.get(prefix + "w2")
        if given is not None and given.dtype != stored and (stored is not None or given.dtype in STORED.values()):
            wanted = "a floating type" if stored is None else stored
            raise ValueError(f"{prefix}w2: expected {wanted} (storage {self.storage!r}), got {given.dtype}")
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._find_map_rows()


def not_finite(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of those tensors, of 16 or 32 bits, that hold NaN or infinity."""
    weights = {name: weight for name, weight in weights.items() if weight.numel()}
    if not weights:
        return []
    # Both extremes are finite exactly when all values are. All tensors need only one copy to the host.
    extremes = [torch.stack(torch.aminmax(weight.detach())) for weight in weights.values()]
    finite = torch.stack([pair.to(extremes[0].device) for pair in extremes]).isfinite().all(dim=1).tolist()
    return [name for name, held in zip(weights, finite, strict=True) if not held]


@contextlib.contextmanager
def _one_thread(tensor: torch.Tensor) -> Iterator[None]:
    """Run small products of a CPU on the calling thread.

    They take microseconds, but a barrier of OpenMP's threads takes tens of milliseconds where another program runs on
    the core of one of them: longer than the rest of the step.
    """
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _scaled(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale vectors [.., H] to a root mean square of 1, in at least float32."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return F.rms_norm(wide, states.shape[-1:], eps=RMS_EPSILON).to(dtype)


def _decode_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return decode_linear(x, [weight])


def _check_token_map(token_map: torch.Tensor, vocab_size: int) -> None:
    if not isinstance(token_map, torch.Tensor):
        raise ValueError(f"token_map: expected int64 [V'], got {type(token_map).__name__}")
    if token_map.ndim != 1 or token_map.dtype != torch.int64:
        raise ValueError(f"token_map: expected int64 [V'], got {token_map.dtype} {list(token_map.shape)}")
    if token_map.numel() == 0 or token_map.is_meta:
        raise ValueError(f"token_map: expected at least one id, got {list(token_map.shape)} on {token_map.device}")
    if int(token_map.min()) < 0 or int(token_map.max()) >= vocab_size:
        raise ValueError(
            f"token_map: expected ids in [0, {vocab_size}), got {int(token_map.min())} to {int(token_map.max())}"
        )
    if len(torch.unique(token_map)) != len(token_map):
        raise ValueError(f"token_map: expected ids without repetition, got {len(token_map)} ids with repetitions")


def _quantise(name: str, weight: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> None:
    """Write weight [V', H] in 8 bits into `stored`, and the scale of each row into `scale`."""
    weight = weight.float()
    largest = weight.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise ValueError(f"{name}: expected finite weights, got NaN or Inf")
    limit = 127.0 if stored.dtype == torch.int8 else torch.finfo(stored.dtype).max
    # A row of zeros also needs a scale.
    scale.copy_((largest / limit).clamp(min=torch.finfo(torch.float32).tiny))
    multiples = (weight / scale[:, None]).clamp(-limit, limit)
    stored.copy_(multiples.round() if stored.dtype == torch.int8 else multiples)
