"""Propose a chain of draft tokens by Medusa heads, one token per head, for vLLM to verify."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from medusa_decoding.checkpoints.pretrained import at, read_file
from medusa_decoding.checkpoints.reading import HeadsCheckpoint, read_heads
from medusa_vllm.runner import wrap_runner

_log = logging.getLogger("vllm.medusa")

OPTION = "medusa_heads"
"""The key of `additional_config` that names the heads."""
SIZES = ("num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Fields of a model's config in which the heads' base model must not differ from the model that is served."""
LOGITS = 2**25
"""At most this many logits are made at once (128 MB in fp32): vLLM does not count them when it sizes its KV cache."""


class Projection(nn.Module):
    """The served model's own projection to the vocabulary, however it is quantised or sharded."""

    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.compute_logits = compute_logits

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of states [..., H]."""
        logits = self.compute_logits(states.reshape(-1, states.shape[-1]))
        return logits.view(*states.shape[:-1], logits.shape[-1])


class MedusaProposer:
    """vLLM's proposer for Medusa heads: `{"method": "custom_class", "model": "medusa_vllm.MedusaProposer"}`.

    The heads are read before the served model is. They are on every tensor-parallel rank as a whole.

    Args:
        vllm_config: vLLM's configuration. Its `additional_config["medusa_heads"]` is the folder or hub id of the heads,
            in any format of `medusa_decoding.checkpoints.read_heads`; `num_speculative_tokens` is the length of the
            chain, at most the number of heads.

    Raises:
        RuntimeError: vLLM's model runner is not as expected, see `wrap_runner`.
        ValueError: no heads are named, they are of another model, or there are too few of them.
    """

    def __init__(self, vllm_config: Any) -> None:
        wrap_runner()
        options, model = vllm_config.additional_config, vllm_config.model_config
        path = options.get(OPTION) if isinstance(options, dict) else None
        if not isinstance(path, str):
            raise ValueError(
                f"additional_config: expected the folder or hub id of Medusa heads as {OPTION!r}, got {options!r}; "
                f'on the command line: --additional-config \'{{"{OPTION}": "HEADS"}}\''
            )
        checkpoint = read_heads(path, hidden_size=model.get_hidden_size(), vocab_size=model.get_vocab_size())
        check_base_model(checkpoint, model)
        self.heads, self.dtype = checkpoint.heads, model.dtype
        if self.heads.feature_layers:
            raise ValueError(
                f"{OPTION}: expected heads that read the last hidden state alone, which is all that vLLM hands to "
                f"Medusa heads, got feature_layers {list(self.heads.feature_layers)}"
            )
        self.length = vllm_config.speculative_config.num_speculative_tokens
        if self.length > self.heads.num_heads:
            raise ValueError(
                f"num_speculative_tokens: expected at most {self.heads.num_heads}, the number of heads in "
                f"{checkpoint.path}, got {self.length}"
            )
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if self.heads.root_rank and stages > 1:
            raise ValueError(
                f"pipeline_parallel_size: expected 1 for heads with a root input, got {stages}: the last stage has no "
                "input embedding"
            )
        self.lm_head: Projection | None = None
        self.embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.noted: tuple[torch.Tensor, Sequence[int] | None, int] | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Place the heads on the served model's device, in its dtype, and run them once.

        Args:
            target_model: the model, with vLLM's `compute_logits` and `embed_input_ids`.
        """
        target: Any = target_model
        device = next(target_model.parameters()).device
        self.heads.place(device, self.dtype)
        if self.heads.shared_projection:
            self.lm_head = Projection(target.compute_logits)
        if self.heads.root_rank:
            self.embed = target.embed_input_ids
        if device.type == "cpu":
            _log.warning(
                "vLLM on a CPU draws wrong tokens above temperature 0 with any draft tokens: "
                "https://github.com/vllm-project/vllm/issues/55005"
            )
            # The heads ask for one thread in small products, which vLLM refuses with a warning each time.
            logging.getLogger("vllm.v1.worker.cpu_worker").addFilter(lambda record: "num_threads" not in record.msg)
        # Errors show and kernels are compiled before the first request.
        hidden = torch.zeros(1, self.heads.hidden_size, device=device, dtype=self.dtype)
        self.chain(hidden, torch.zeros(1, device=device, dtype=torch.int64))
        _log.info("Medusa heads draft %d tokens per step: %s", self.length, self.heads.extra_repr())

    def note_states(self, states: torch.Tensor, drafted: Sequence[int] | None, length: int) -> None:
        """Keep a step's hidden states for `propose`, which vLLM calls next.

        Args:
            states: [rows, H], after the final norm, at every position whose next token was sampled: for each request
                its draft tokens and one position before them.
            drafted: draft tokens that the step verified per request; None for none at all.
            length: draft tokens that the scheduler wants next.
        """
        self.noted = states, drafted, length

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return draft tokens for each request of the step; none for a request that is still in its prompt.

        Args:
            sampled_token_ids: for each request the accepted draft tokens and the model's own next token. An empty list
                if the request is still in its prompt.

        Raises:
            RuntimeError: the hidden states of the step are missing, or have other rows than the requests.
        """
        states, drafted, length = self.noted or (None, None, 0)
        self.noted = None
        counts = [0] * len(sampled_token_ids) if drafted is None else drafted
        if states is None or len(states) != sum(counts) + len(counts) or len(counts) != len(sampled_token_ids):
            got = "none" if states is None else f"{len(states)} and draft tokens {list(counts)}"
            raise RuntimeError(
                f"expected hidden states of {len(sampled_token_ids)} requests and their draft tokens, got {got} "
                "(medusa_vllm wraps the V1 model runner only)"
            )
        rows, roots, live, first = [], [], [], 0
        for request, (tokens, count) in enumerate(zip(sampled_token_ids, counts, strict=True)):
            if tokens:  # n accepted draft tokens and the next one: the last accepted position is n rows further
                rows.append(first + len(tokens) - 1)
                roots.append(tokens[-1])
                live.append(request)
            first += count + 1
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if live and length:
            on_device = torch.tensor([rows, roots], device=states.device)
            for request, chain in zip(live, self.chain(states[on_device[0]], on_device[1]).tolist(), strict=True):
                drafts[request] = chain[: min(self.length, length)]
        return drafts

    @torch.inference_mode()
    def chain(self, hidden: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """Return the most likely draft token of each head after the one of the head before it.

        Args:
            hidden: [B, H], final hidden state of each request's last accepted token.
            root: int64 [B], the model's own next token.

        Returns:
            int64 [B, K], for all K heads.
        """
        at_once = max(1, LOGITS // (self.heads.num_heads * self.heads.vocab_size))
        parts = zip(hidden.split(at_once), root.split(at_once), strict=True)
        return torch.cat([self._chain(*part) for part in parts])

    def _chain(self, hidden: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        embedding = None if self.embed is None else self.embed(root)
        if not self.heads.parent_rank:
            return self.heads.propose(hidden, 1, self.lm_head, root_embedding=embedding).tokens[:, :, 0]
        children = self.heads.propose_children(hidden, root, 1, self.lm_head, root_embedding=embedding)
        chosen, place = [], root.new_zeros(len(root), 1)  # all parents of the first head are the root
        for tokens, best in zip(children.tokens.unbind(1), children.order[..., 0].unbind(1), strict=True):
            place = best.gather(1, place)
            chosen.append(tokens.gather(1, place))
        return torch.cat(chosen, dim=1)


def check_base_model(checkpoint: HeadsCheckpoint, served: Any) -> None:
    """Refuse heads of a model with other sizes than the served one's; warn if only the names differ.

    Args:
        checkpoint: the heads.
        served: vLLM's `model_config`.

    Raises:
        ValueError: the config of the heads' base model, if it can be read, has other sizes.
    """
    named, revision = checkpoint.base_model, checkpoint.base_revision
    if named is None or os.path.realpath(named) == os.path.realpath(served.model):
        if named is not None and revision not in (None, getattr(served, "revision", None)):
            _log.warning("The heads in %s belong to revision %s of %s (--revision)", checkpoint.path, revision, named)
        return
    try:
        theirs = read_file(named, **at(revision))
    except ValueError:
        theirs = {}  # not within reach
    differ = [
        f"{name} {theirs[name]} instead of {ours}"
        for name in SIZES
        if name in theirs and (ours := getattr(served.hf_text_config, name, None)) not in (None, theirs[name])
    ]
    if differ:
        raise ValueError(f"{OPTION}: expected heads of {served.model}, got heads of {named} ({', '.join(differ)})")
    _log.warning("The heads in %s are of %s. %s must be the same model", checkpoint.path, named, served.model)
