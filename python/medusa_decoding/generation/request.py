"""Request: one call of `generate`, checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.tensor_parallel import Peers
from medusa_decoding.checks import check_truth, shown
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.selection.processors import Processor
from medusa_decoding.generation import settings
from medusa_decoding.generation.inputs import check_streamer, plain, split_prompts, whole_seed
from medusa_decoding.generation.session import Session

logger = logging.getLogger(__name__)
# Settings that only sampling uses, with the value that changes nothing.
_OF_SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_h": None,
}  # fmt: skip


@dataclass
class Request:
    """One call of `generate`, checked.

    Attributes:
        input_ids: int64 [B, T] as given, rows repeated for `num_return_sequences`.
        prompts: int64 [T_b] per row, without padding, on the host.
        config: the generation config in force.
        limits: when rows end.
        acceptance: "lossless" or "typical".
        posterior_threshold: epsilon of typical acceptance.
        posterior_alpha: delta of typical acceptance.
        processors: the caller's own logits processors.
        prefix_fn: (row, tokens so far) to the tokens allowed next, or None.
        criteria: stopping criteria that run on the host.
        streamer: a transformers streamer or None.
        seed: of sampling. One per row gives each row the numbers that it would get in a batch of 1. None draws one from
            torch's generator on the CPU.
        metrics: whether to measure.
        session: holds the cache between calls, or None.
        top_logprobs: how many of the model's most likely tokens to keep with every new token; None for none.
    """

    input_ids: torch.Tensor
    prompts: list[torch.Tensor]
    config: GenerationConfig
    limits: Limits
    acceptance: str = "lossless"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    processors: Sequence[Processor] = ()
    prefix_fn: Callable[[int, torch.Tensor], list[int]] | None = None
    criteria: Sequence[Any] = ()
    streamer: Any = None
    seed: int | Sequence[int] | None = None
    metrics: bool = False
    session: Session | None = None
    top_logprobs: int | None = None

    def row_seeds(self, peers: Peers) -> torch.Tensor | None:
        """Return the keys of the random numbers that sampling uses, int64 [B]; None if nothing is sampled."""
        if not self.config.do_sample:
            return None
        seed = self.seed if self.seed is not None else peers.agree(int(torch.randint(2**63 - 1, ())))
        rows = range(len(self.limits.budgets))
        keys = [row_seed(seed, row) for row in rows] if isinstance(seed, int) else [row_seed(own) for own in seed]
        return torch.tensor(keys)


def row_seed(seed: int, row: int = 0) -> int:
    """Return the key, of 64 bits, of a row's random numbers: neither the batch nor the budget changes them."""
    # Neighbouring seeds and rows get unrelated keys.
    return int(np.random.SeedSequence(seed, spawn_key=(row,)).generate_state(1, np.uint64).view(np.int64)[0])


def check_request(
    backbone: Backbone,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    changes: dict[str, Any],
    *,
    acceptance: str = Request.acceptance,
    posterior_threshold: float = Request.posterior_threshold,
    posterior_alpha: float = Request.posterior_alpha,
    logits_processor: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    seed: int | None = None,
    metrics: bool = False,
    session: Session | None = None,
) -> Request:
    """Check the arguments of `MedusaModel.generate`, of which `changes` are fields of a generation config.

    A bad argument is a `ValueError` that names it.
    """
    check_streamer(streamer)
    check_truth("metrics", metrics)
    check_truth("return_dict_in_generate", changes["return_dict_in_generate"])
    if not isinstance(session, (Session, type(None))):
        raise ValueError(f"session: expected a Session or None, got {shown(session)}")
    changes = {name: plain(name, value) for name, value in changes.items()}
    changes["return_dict_in_generate"] = bool(changes["return_dict_in_generate"])
    if changes["do_sample"] is None and getattr(generation_config, "do_sample", None) is None:
        changes["do_sample"] = False
    if acceptance == "typical" and changes["temperature"] is None and generation_config is None:
        changes["temperature"] = 1.0
    config = settings.merge_configs(backbone.causal_lm.generation_config, generation_config, changes)
    for name, neutral in _OF_SAMPLING.items():
        value, lossy = changes.get(name), acceptance == "typical" and name == "temperature"
        if value is not None and value != neutral and not config.do_sample and not lossy:
            raise ValueError(f"{name}: expected {neutral} without do_sample=True, got {value}")
    threshold, alpha = plain("posterior_threshold", posterior_threshold), plain("posterior_alpha", posterior_alpha)
    processors = settings.check_callables("logits_processor", logits_processor)
    criteria = settings.check_callables("stopping_criteria", stopping_criteria)
    criteria = settings.stopping_criteria(config, criteria, tokenizer)
    seed = whole_seed(seed)
    prompts = split_prompts(input_ids, attention_mask, backbone.vocab_size)
    pad, ends = config.pad_token_id, input_ids[:, [0, -1]]
    if attention_mask is None and pad is not None and len(ends) > 1 and bool((ends == pad).any()):
        logger.warning("attention_mask: none given, so the pad token %d at an end of a row is read as text", pad)
    count = settings.rows_per_prompt(config)
    prompts = [prompt for prompt in prompts for _ in range(count)]
    if streamer is not None and len(prompts) > 1:
        raise ValueError(f"streamer: expected a batch of 1, got {len(prompts)}")
    lengths = [len(prompt) for prompt in prompts]
    limits = settings.limits_from_config(config, lengths, input_ids.shape[1], backbone.context_limit)
    return Request(
        input_ids.repeat_interleave(count, 0), prompts, config, limits, acceptance, threshold, alpha, processors,
        prefix_allowed_tokens_fn, criteria, streamer, seed, metrics, session,
    )  # fmt: skip
