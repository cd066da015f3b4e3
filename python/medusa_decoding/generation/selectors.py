"""Which token selector a request needs; transformers itself makes the logits processors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import logits_process as lp

from medusa_decoding.checks import shown, token_list
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_decoding.decode.selection.processors import LogitsProcessors, Processor
from medusa_decoding.decode.selection.sampling import CONTEXT_FREE, Sampling
from medusa_decoding.decode.selection.typical import TypicalAcceptance
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.generation.request import Request
from medusa_decoding.options import ACCEPTANCES

_MINIMUM = (lp.MinLengthLogitsProcessor, lp.MinNewTokensLengthLogitsProcessor)


def token_selector(causal: Any, request: Request, prompts: Sequence[torch.Tensor]) -> TokenSelector:
    """Return the selector that a request needs; settings that do not go together are a `ValueError`.

    `causal`, transformers' model, makes the processors; `prompts` are int64 [T_b] per row, on its device.
    """
    config, limits = request.config, request.limits
    threshold, alpha = request.posterior_threshold, request.posterior_alpha
    if request.acceptance not in ACCEPTANCES:
        raise ValueError(f"acceptance: expected 'lossless' or 'typical', got {shown(request.acceptance)}")
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"):
        for token in token_list(getattr(config, name), name):
            if not 0 <= token < causal.config.vocab_size:
                raise ValueError(f"{name}: expected tokens in [0, {causal.config.vocab_size}), got {token}")
    defaults = Request.posterior_threshold, Request.posterior_alpha
    if request.acceptance == "lossless" and (threshold, alpha) != defaults:
        raise ValueError(
            f"posterior_threshold, posterior_alpha: expected {defaults[0]} and {defaults[1]} with "
            f"acceptance='lossless', which does not use them, got {threshold} and {alpha}"
        )
    sample = bool(config.do_sample)
    keep_scores, keep_logits = bool(config.output_scores), bool(config.output_logits)
    if request.prefix_fn is not None and not callable(request.prefix_fn):
        raise ValueError(f"prefix_allowed_tokens_fn: expected a callable or None, got {shown(request.prefix_fn)}")
    try:
        processors = [_processors(causal, request, prompt, row) for row, prompt in enumerate(prompts)]
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        # transformers checks few of the values that it makes processors of.
        raise ValueError(
            f"generation_config: expected values that logits processors can be made of, got {type(error).__name__}: "
            f"{error}"
        ) from error
    # Limits enforce the minimum; a processor for it that the caller made is like any other.
    callers = {id(processor) for processor in request.processors}
    listed = [processor for processor in processors[0] if type(processor) not in _MINIMUM or id(processor) in callers]
    if listed and type(listed[0]) is lp.InfNanRemoveLogitsProcessor:
        # First in the list it sees the model's own logits, which it leaves unchanged: if not finite they are an error.
        del listed[0]
    if request.acceptance == "typical":
        if sample:
            raise ValueError("do_sample: expected False with acceptance='typical', which draws nothing, got True")
        if listed or keep_scores or keep_logits or request.top_logprobs is not None:
            kept = "top_logprobs" if request.top_logprobs is not None else "output_scores or output_logits"
            got = type(listed[0]).__name__ if listed else kept
            raise ValueError(f"acceptance: expected 'lossless' with {got}, got 'typical'")
        return TypicalAcceptance(threshold, alpha, 1.0 if config.temperature is None else config.temperature)
    keeps = keep_scores or keep_logits or request.top_logprobs is not None
    if keeps or not all(type(processor) in CONTEXT_FREE for processor in listed):
        return LogitsProcessors(
            prompts, processors, limits.budgets, limits.eos, sample,
            keep_logits=keep_logits, keep_scores=keep_scores, top_logprobs=request.top_logprobs,
        )  # fmt: skip
    return Sampling(listed, sample) if sample or listed else Greedy()


def _processors(causal: Any, request: Request, prompt: torch.Tensor, row: int) -> list[Processor]:
    """Have transformers make one row's processors, as for a batch of that row alone."""
    config, limits, device = copy.copy(request.config), request.limits, prompt.device
    config.max_new_tokens = None
    config.max_length = len(prompt) + limits.budgets[row]
    config.min_length, config.min_new_tokens = None, limits.min_new[row]
    config.num_beams = config.num_return_sequences = 1
    # transformers' own `generate` sets this field before it makes processors.
    config._eos_token_tensor = torch.tensor(limits.eos, dtype=torch.int64, device=device) if limits.eos else None
    prefix_fn = request.prefix_fn
    try:
        return causal._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=prompt[None],
            # A row is alone in its calls, and number 0 there.
            prefix_allowed_tokens_fn=None if prefix_fn is None else lambda _, text: prefix_fn(row, text),
            logits_processor=lp.LogitsProcessorList(request.processors),
            device=device,
            model_kwargs={},
        )
    except (TypeError, LookupError) as error:  # a model's generation config may hold anything
        raise ValueError(
            f"generation_config: expected settings that transformers accepts, got others ({error})"
        ) from error
