"""Settings in transformers' terms: a generation config, read and checked.

A config and keyword arguments become limits and stopping criteria. What cannot work here is refused by name before any
work.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, MaxTimeCriteria, StopStringCriteria

from medusa_decoding.checks import check_truth, shown, token_list, whole
from medusa_decoding.decode.limits import Limits

DEFAULT_NEW_TOKENS = 256
logger = logging.getLogger(__name__)

# Generation config fields that request something unsupported: the neutral value (next to None), and why other values
# are refused. docs/generate.md lists them for users.
_CANNOT: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "Medusa decoding follows one sequence per row: no beam search"),
    "num_beam_groups": (1, "no beam search"),
    "diversity_penalty": (0.0, "no beam search"),
    "constraints": (None, "no beam search"),
    "force_words_ids": (None, "no beam search"),
    "penalty_alpha": (0.0, "no contrastive search"),
    "dola_layers": (None, "no DoLa: it needs every layer's logits"),
    "guidance_scale": (1.0, "no classifier-free guidance: it runs the model twice"),
    "prompt_lookup_num_tokens": (None, "it is another way of speculation"),
    "assistant_early_exit": (None, "it is another way of speculation"),
    "use_mtp": (False, "it is another way of speculation"),
    "is_assistant": (False, "a model with heads drafts for itself alone"),
    "token_healing": (False, "it changes the prompt"),
    "output_attentions": (False, "attention weights are never made"),
    "output_hidden_states": (False, "hidden states are not kept"),
}
# Fields that only tell transformers how to run its own loop: accepted and ignored, since the text is the same.
_IGNORED = (
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config",
    "disable_compile", "continuous_batching_config", "low_memory", "early_stopping", "length_penalty",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    "speculation_type", "decoder_start_token_id",
)  # fmt: skip


def merge_configs(own: GenerationConfig, given: GenerationConfig | None, changes: dict[str, Any]) -> GenerationConfig:
    """Return the generation config in force: `changes` override the given config, which overrides the model's own.

    A change of None leaves a field as it is.
    """
    if not isinstance(given, (GenerationConfig, type(None))):
        raise ValueError(f"generation_config: expected a GenerationConfig or None, got {type(given).__name__}")
    config = copy.deepcopy(own if given is None else given)
    if given is not None:
        for name, value in vars(own).items():
            if not name.startswith("_") and getattr(config, name, None) is None:
                setattr(config, name, copy.deepcopy(value))
    changes = {name: value for name, value in changes.items() if value is not None}
    for name in changes:
        if name.startswith("_") or not hasattr(config, name):
            raise ValueError(f"{name}: expected an argument of generate or of a GenerationConfig, got an unknown one")
        if name in _IGNORED:
            logger.info("%s: ignored, it only tells transformers how to run its own loop", name)
    for name, value in changes.items():
        setattr(config, name, value)
    if config.max_length == 20 and "max_length" not in changes and (given is None or given.max_length is None):
        # Old checkpoints have transformers' own default, which means "not set" there; a caller means it.
        config.max_length = None
    for name in ("do_sample", "output_scores", "output_logits"):
        check_truth(name, getattr(config, name))
    if not config.return_dict_in_generate:
        # As in transformers, only a dictionary has them.
        config.output_scores = config.output_logits = config.output_attentions = config.output_hidden_states = False
    _check_sampling(config)
    _check_forced(config)
    check_cache("cache_implementation", config.cache_implementation)
    for name, (neutral, why) in _CANNOT.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            where = name if name in changes else f"generation_config.{name}"
            raise ValueError(f"{where}: expected {neutral!r}, got {value!r}; {why}")
    return config


def check_cache(name: str, kind: Any) -> None:
    """Raise `ValueError` for a `cache_implementation` that keeps keys and values elsewhere or in fewer bits."""
    if any(other in str(kind) for other in ("offloaded", "quantized")):
        raise ValueError(
            f"{name}: expected a cache that is neither offloaded nor quantized, got {kind!r}; decoding keeps its own "
            "cache on the model's device, in its dtype or with cache_dtype='int8' of MedusaModel in 8 bits"
        )


def _check_sampling(config: GenerationConfig) -> None:
    """Raise `ValueError` for impossible values of sampling; without `do_sample` they are not checked."""
    if not config.do_sample:
        return
    bounds: dict[str, tuple[Callable[[float], bool], str]] = {
        "temperature": (lambda value: 0.0 < value <= sys.float_info.max, "above 0 and finite"),
        "top_p": (lambda value: 0.0 < value <= 1.0, "above 0 and at most 1"),
        "min_p": (lambda value: 0.0 <= value <= 1.0, "0 to 1"),
    }
    for name, (within, words) in bounds.items():
        value = getattr(config, name)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or not within(value):
            raise ValueError(f"{name}: expected {words}, got {value!r}")
        setattr(config, name, float(value))  # transformers' own processors refuse an int
    top_k = whole("top_k", config.top_k)
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k: expected at least 0, got {top_k}")
    config.top_k = top_k


def _check_forced(config: GenerationConfig) -> None:
    """Raise `ValueError` for tokens forced and suppressed at once, as transformers does: no token would remain."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        value = getattr(config, name)
        forced = set(token_list(value, name))
        if forced and forced <= set(token_list(config.suppress_tokens, "suppress_tokens")):
            raise ValueError(f"suppress_tokens: expected one of {name} = {sorted(forced)} left out, got all of them")


def check_callables(name: str, given: Sequence[Any] | None) -> list[Any]:
    """Return an optional list of callables; raise `ValueError` for anything else."""
    if given is not None and (not isinstance(given, Iterable) or isinstance(given, torch.Tensor)):
        raise ValueError(f"{name}: expected a list of callables, got {shown(given)}")
    listed = [] if given is None else list(given)
    for one in listed:
        if not callable(one):
            raise ValueError(f"{name}: expected callables, got {one!r}")
    return listed


def limits_from_config(config: GenerationConfig, lengths: Sequence[int], width: int, context: int) -> Limits:
    """Return the limits that a generation config sets for prompts of `lengths` tokens.

    `width` is that of the padded batch, which `max_length` counts, `context` the positions that the model declares.
    """
    longest = max(lengths)
    if longest >= context:
        raise ValueError(f"input_ids: expected fewer than {context} tokens (the model's context), got {longest}")
    new = whole("max_new_tokens", config.max_new_tokens)
    max_length = whole("max_length", config.max_length)
    if new is None and max_length is not None:
        new = max_length - width
        if new < 1:
            raise ValueError(f"input_ids: expected fewer than max_length = {max_length} tokens, got {width}")
    if new is None:
        budgets = [min(DEFAULT_NEW_TOKENS, context - length) for length in lengths]
    elif new < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {new}")
    else:
        budgets = [new] * len(lengths)
        if longest + new > context:
            logger.warning(
                "max_new_tokens: %d prompt and %d new tokens go past the model's context of %d", longest, new, context
            )
    min_new = whole("min_new_tokens", config.min_new_tokens) or 0
    if not 0 <= min_new <= max(budgets):
        raise ValueError(f"min_new_tokens: expected 0 to {max(budgets)} (max_new_tokens), got {min_new}")
    # If both are given, transformers obeys min_new_tokens alone.
    min_length = 0 if config.min_new_tokens is not None else whole("min_length", config.min_length) or 0
    eos, pad = token_list(config.eos_token_id), whole("pad_token_id", config.pad_token_id)
    pad = eos[0] if pad is None and eos else pad or 0
    return Limits(budgets, [max(min_new, min_length - length) for length in lengths], eos, pad)


def stopping_criteria(config: GenerationConfig, given: Sequence[Any], tokenizer: Any) -> list[Any]:
    """Return the stopping criteria that the host evaluates: the caller's own, a time limit, stop strings."""
    found = list(given)
    if config.max_time is not None:
        if not isinstance(config.max_time, (int, float)) or not config.max_time >= 0:
            raise ValueError(f"max_time: expected seconds, at least 0, got {config.max_time!r}")
        found.append(MaxTimeCriteria(max_time=config.max_time))
    if config.stop_strings is not None and config.stop_strings != []:
        if tokenizer is None:
            raise ValueError(
                "tokenizer: expected the model's tokenizer with stop_strings, got None; or give "
                "stopping_criteria=[StopStringCriteria(tokenizer, strings)]"
            )
        strings = [config.stop_strings] if isinstance(config.stop_strings, str) else list(config.stop_strings)
        if not strings or not all(isinstance(text, str) and text for text in strings):
            raise ValueError(f"stop_strings: expected one or more non-empty strings, got {strings!r}")
        found.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return found


def rows_per_prompt(config: GenerationConfig) -> int:
    """Return how many rows each prompt is expanded to."""
    asked = whole("num_return_sequences", config.num_return_sequences)
    count = 1 if asked is None else asked
    if count < 1:
        raise ValueError(f"num_return_sequences: expected at least 1, got {count}")
    if count > 1 and not config.do_sample:
        raise ValueError(f"num_return_sequences: expected 1 without do_sample=True (all would be equal), got {count}")
    return count
