"""Decode with heads inside transformers' own `generate`: `custom_generate=medusa_generate`.

transformers prepares token ids, logits processors and stopping criteria as for its own decoding. `medusa_generate`
turns them into a `Request`: end tokens and lengths become limits of the loop, all others run on the host.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from transformers import Cache, EosTokenCriteria, GenerationConfig, MaxLengthCriteria, QuantizedCache
from transformers.generation import logits_process as lp
from transformers.generation import utils as generation_utils

from medusa_decoding.checks import token_list, whole
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.runtime.steps import Backend
from medusa_decoding.decode.runtime.streaming import end_step
from medusa_decoding.decode.selection.sampling import settings_of
from medusa_decoding.generation import settings
from medusa_decoding.generation.inputs import ended_on_error, split_prompts, whole_seed
from medusa_decoding.generation.output import MedusaOutput
from medusa_decoding.generation.request import Request
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.huggingface.model_cache import borrow_model
from medusa_decoding.trees.tree import Tree


def medusa_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    generation_config: GenerationConfig | None = None,
    *,
    heads: MedusaHeads | str | Path | None = None,
    tree: Tree | Literal["auto"] | None = None,
    acceptance: Literal["lossless", "typical"] = "lossless",
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    backend: Backend = "auto",
    cache_dtype: Literal["int8"] | None = None,
    activation_dtype: Literal["int8"] | None = None,
    seed: int | None = None,
    metrics: bool = False,
    stop_strings: str | list[str] | None = None,
    inputs_tensor: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> MedusaOutput | torch.Tensor:
    """Decode for transformers: `model.generate(**inputs, custom_generate=medusa_generate, heads=heads, ...)`.

    transformers fills in the arguments before `heads` and after `stop_strings`; those between are keywords of
    `generate`, next to transformers' own. Text, scores and logits are those of `generate` alone; sampling has its
    distribution. Processors and criteria see one row at a time, without its padding. So each row of a batch is what
    `generate` alone writes for that row in a batch of its own. This also holds for processors that would count padding
    (such as `no_repeat_ngram_size`), and for prompts padded on the right, where `generate` alone continues after the
    padding. A row that a criterion ends is padded after its last token. docs/generate.md lists what is accepted,
    ignored and refused.

    The model is not patched between calls. Heads read from a folder, caches, and compiled and captured steps are cached
    for the next call until the model is deleted, see `model_cache`.

    Args:
        model: a Llama-family model, possibly inside a peft model whose `generate` was called.
        input_ids: int64 [B, T].
        logits_processor: the processors that transformers has made, including the caller's own.
        stopping_criteria: likewise.
        generation_config: the one in force, as prepared by transformers.
        heads: on the model's device and in its dtype; or a folder or hub id in any supported format, read at the first
            call.
        tree: verified in each step, or "auto", as in `MedusaModel.generate`. None for what `medusa tune` has stored for
            these heads if they are given by name and it holds here, else "auto".
        acceptance: as in `MedusaModel.generate`; "typical" is LOSSY.
        posterior_threshold: epsilon of typical acceptance.
        posterior_alpha: delta of typical acceptance.
        backend: how steps run, as in `MedusaModel`.
        cache_dtype: of keys and values, as in `MedusaModel`; "int8" is LOSSY.
        activation_dtype: of the inputs of quantised layers, as in `MedusaModel`; "int8" is LOSSY.
        seed: of sampling, as in `MedusaModel.generate`.
        metrics: record counts and times (with `return_dict_in_generate`).
        stop_strings: a row ends after the token that completes one of these; also needs `tokenizer=`. transformers
            refuses those of a generation config before this is called: give them as an argument, or as
            `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.
        inputs_tensor: the prompts before they were repeated for `num_return_sequences`.
        **model_kwargs: what else transformers has prepared: attention mask, positions, an empty cache (which stays
            empty, even if it is the caller's).

    Returns:
        A `MedusaOutput` with `return_dict_in_generate`, else its sequences, int64 [B, T + new].

    Raises:
        ValueError: not called by transformers' `generate`; bad arguments; anything that cannot work here, by name
            (beam search, an assistant model, a cache with content, ..). Raised before any work.
        FloatingPointError: the model's output is not finite; the message names the step.
        MemoryError: keys and values do not fit.
    """
    given = _generate_arguments(model)
    streamer = None if given["streamer"] is None else _AfterPrompt(given["streamer"])
    with ended_on_error(streamer):
        if generation_config is None:
            raise ValueError("generation_config: expected the one that transformers has prepared, got None")
        # The config is checked first: its messages explain more than those about the other arguments.
        config = _checked(generation_config, given)
        mask, positions = _mask_and_positions(model, model_kwargs)
        prompts = split_prompts(input_ids, mask, model.config.vocab_size)
        source = "attention_mask" if given.get("position_ids") is None else "position_ids"
        _check_positions(positions, input_ids, mask, source)
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"streamer: expected a batch of 1, got {len(input_ids)}")
        limits, criteria = _limits(generation_config, stopping_criteria, input_ids.shape[1], len(input_ids))
        own, prefix_fn = _callers_processors(
            model, generation_config, logits_processor, input_ids if inputs_tensor is None else inputs_tensor, mask
        )
        config.stop_strings, config.max_time = stop_strings, None  # transformers' criteria include the time limit
        request = Request(
            input_ids,
            prompts,
            config,
            limits,
            acceptance,
            posterior_threshold,
            posterior_alpha,
            own,
            prefix_fn,
            criteria=settings.stopping_criteria(config, criteria, given["tokenizer"]),
            streamer=streamer,
            seed=whole_seed(seed),
            metrics=metrics,
        )
        with borrow_model(model, heads, backend, cache_dtype, activation_dtype) as medusa:
            output = medusa.run(request, tree)
    return output if config.return_dict_in_generate else output.sequences


def _generate_arguments(model: Any) -> dict[str, Any]:
    """Return the arguments of the call of transformers' `generate`, by name, as they are now.

    transformers (5.17 to 5.24) silently drops `streamer`, `assistant_model` and `synced_gpus`, which are read from the
    frame of its `generate`, and removes `tokenizer`, which is read from the frame that called it: transformers' own
    decorator (`torch.no_grad`), which has all keywords.
    """
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "generate" and frame.f_globals is vars(generation_utils)):
        frame = frame.f_back
    if frame is None or frame.f_locals.get("self") is not model:
        raise ValueError(
            "medusa_generate: expected a call by transformers, model.generate(.., custom_generate=medusa_generate, "
            "heads=..), got another; MedusaModel.generate can be called directly"
        )
    dropped = {name: frame.f_locals[name] for name in ("streamer", "assistant_model", "synced_gpus")}
    return _arguments(frame) | dropped | {"tokenizer": _arguments(frame.f_back).get("tokenizer")}


def _arguments(frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments that a function was called with by name, including those of its `**`."""
    if frame is None:
        return {}
    names, _, keywords, values = inspect.getargvalues(frame)
    return {name: values[name] for name in names if name in values} | values.get(keywords or "", {})


class _AfterPrompt:
    """Wraps a streamer that already has the prompt from transformers; ends it once, even if the call fails."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._has_prompt = self._ended = False

    def put(self, value: torch.Tensor) -> None:
        """Pass tokens on, except for the prompt, which comes first."""
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True

    def end_step(self) -> None:
        """Tell a streamer with a method `end_step` that a step ends."""
        end_step(self._streamer)

    def end(self) -> None:
        """End the streamer unless it has ended."""
        if not self._ended:
            self._ended = True
            self._streamer.end()


def _checked(config: GenerationConfig, given: dict[str, Any]) -> GenerationConfig:
    """Return a copy of the config; anything impossible in it or the other arguments is a `ValueError`."""
    assistant = given["assistant_model"]
    if assistant is not None:
        raise ValueError(
            f"assistant_model: expected None, got {type(assistant).__name__}; it is another way of speculation"
        )
    if given["synced_gpus"]:
        raise ValueError(
            "synced_gpus: expected False, got True; processes of FSDP or ZeRO-3 do not decode in step here"
        )
    copied = settings.merge_configs(config, config, {})
    settings.rows_per_prompt(copied)
    return copied


def _mask_and_positions(model: Any, model_kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, Any]:
    """Return the attention mask and the positions, or None; any other input that matters is a `ValueError`."""
    method = getattr(model, "prepare_inputs_for_generation", None)
    if getattr(method, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            f"model: expected {type(model).__name__}'s own prepare_inputs_for_generation, got a replaced one (virtual "
            "tokens of prompt learning, say); decoding does not call it"
        )
    rest = {name: value for name, value in model_kwargs.items() if value is not None}
    # The config also has the first three, every node's logits are needed, and labels of a data loader's batches do not
    # change the text.
    for name in ("use_cache", "output_attentions", "output_hidden_states", "logits_to_keep", "labels"):
        rest.pop(name, None)
    mask, positions = (rest.pop(name, None) for name in ("attention_mask", "position_ids"))
    # transformers 5.24 has renamed past_key_values to cache, also where the caller gives it by its old name.
    caches = [rest.pop(name) for name in ("past_key_values", "cache") if name in rest]
    for name, value in rest.items():
        raise ValueError(
            f"{name}: expected None, got {type(value).__name__}; decoding goes by token ids and mask alone"
        )
    for cache in caches:  # transformers itself makes an empty one
        length = int(cache.get_seq_length()) if isinstance(cache, Cache) else "none of transformers' Cache"
        if length != 0:
            raise ValueError(
                f"past_key_values: expected None or an empty cache, got {type(cache).__name__} (length: {length}); "
                "decoding keeps its own. Give the whole text as input_ids, or use "
                "MedusaModel.generate(session=Session())"
            )
        kind = "quantized" if isinstance(cache, QuantizedCache) else "offloaded" if cache.offloading else None
        settings.check_cache("past_key_values", kind)
    return mask, positions


def _check_positions(positions: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, source: str) -> None:
    """Raise `ValueError` for other positions [B or 1, T] than the mask's; `source` is the argument they come from."""
    if positions is None:
        return
    rows, width = input_ids.shape
    if not isinstance(positions, torch.Tensor) or positions.shape not in ((1, width), (rows, width)):
        got = f"shape {list(positions.shape)}" if isinstance(positions, torch.Tensor) else type(positions).__name__
        raise ValueError(f"{source}: expected one column per token, shape {[rows, width]}, got {got}")
    kept = torch.ones_like(input_ids) if mask is None else mask.to(input_ids)
    if bool(((positions - kept.cumsum(-1) + 1) * kept).any()):
        raise ValueError(f"{source}: expected each row's positions from 0 on, got others")


def _limits(config: GenerationConfig, criteria: Sequence[Any], width: int, rows: int) -> tuple[Limits, list[Any]]:
    """Turn known criteria into limits, and return the others, which run on the host. Lengths include the padding."""
    lengths, ends, others = [], set(), []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            ends.update(token_list(criterion.eos_token_id))
        else:
            others.append(criterion)
    eos = token_list(getattr(config, "_eos_token_tensor", None))
    if not ends.issuperset(eos):
        raise ValueError(
            f"stopping_criteria: expected EosTokenCriteria that end at eos_token_id = {eos}, got {sorted(ends)}"
        )
    if ends.difference(eos):
        others.append(EosTokenCriteria(sorted(ends.difference(eos))))
    longest = whole("max_length", min(lengths, default=config.max_length))
    if longest is None or (config.forced_eos_token_id is not None and longest != config.max_length):
        raise ValueError(f"stopping_criteria: expected max_length {config.max_length} as in the config, got {longest}")
    # transformers checks lengths after each token: there is always one.
    budget = max(longest - width, 1)
    minimum = max(whole("min_new_tokens", config.min_new_tokens) or 0, (config.min_length or 0) - width, 0)
    pad = token_list(getattr(config, "_pad_token_tensor", None))
    return Limits([budget] * rows, [minimum] * rows, eos, pad[0] if pad else 0), others


def _callers_processors(
    model: Any,
    config: GenerationConfig,
    prepared: Sequence[Any],
    inputs: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[list[Any], Any]:
    """Return the caller's own processors in order, and its `prefix_allowed_tokens_fn` or None.

    These are the processors that the config alone does not explain. transformers gets them again when it makes each
    row's processors, so the config's must not be among them. A processor of the caller replaces the config's of the
    same type, or else follows them; those that shape sampling come after all of these.
    """

    def made(**changes: Any) -> list[Any]:
        changed = copy.copy(config)
        for name, value in changes.items():
            setattr(changed, name, value)
        return list(
            model._get_logits_processor(
                generation_config=changed,
                input_ids_seq_length=inputs.shape[1],
                encoder_input_ids=inputs,
                prefix_allowed_tokens_fn=None,
                logits_processor=lp.LogitsProcessorList(),
                device=inputs.device,
                model_kwargs={"attention_mask": mask},
            )
        )

    def of_type(kind: type, processors: Sequence[Any]) -> list[Any]:
        return [settings_of(processor) for processor in processors if type(processor) is kind]

    configs = made(do_sample=False, watermarking_config=None, renormalize_logits=None)
    sampling = len(made()) - len(configs)
    merged = list(prepared)[: len(prepared) - sampling]
    types = {type(processor) for processor in merged}
    callers = {kind for kind in types if of_type(kind, merged) != of_type(kind, configs)}
    own = [processor for processor in merged if type(processor) in callers]
    prefixed = [processor for processor in own if type(processor) is lp.PrefixConstrainedLogitsProcessor]
    if len(prefixed) > 1:
        raise ValueError(f"prefix_allowed_tokens_fn: expected at most one, got {len(prefixed)}")
    others = [processor for processor in own if processor not in prefixed]
    asked, rows = (prefixed[0]._prefix_allowed_tokens_fn, prefixed[0]._num_beams) if prefixed else (None, 1)
    if not callable(asked):
        return others, asked  # None, or else refused later
    # With num_return_sequences, transformers 5.24 passes the number of the prompt, earlier versions that of the row.
    return others, lambda row, text: asked(row // rows, text)
