"""Decoding with heads from within transformers' own `generate`: `custom_generate=medusa_generate`.

transformers prepares token ids, logits processors and stopping criteria as for its own decoding and calls
`medusa_generate`, which makes a `Request` of them: end tokens and lengths become rules of the loop, everything else is
followed on the host. This module knows how transformers calls a decoding method; it does not know how models are kept
between calls (see `kept`) or how a step is made.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import transformers
from transformers import Cache, EosTokenCriteria, GenerationConfig, MaxLengthCriteria, QuantizedCache
from transformers.generation import logits_process as lp
from transformers.generation import utils as generation_utils

from medusa_decoding.checks import token_list, whole
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.runtime.steps import Backend
from medusa_decoding.generation import settings
from medusa_decoding.generation.inputs import split_prompts, whole_seed
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
    seed: int | None = None,
    metrics: bool = False,
    stop_strings: str | list[str] | None = None,
    inputs_tensor: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> MedusaOutput | torch.Tensor:
    """Decode for transformers: `model.generate(**inputs, custom_generate=medusa_generate, heads=heads, ...)`.

    The arguments before `heads` and behind `stop_strings` are filled in by transformers; those from `heads` to
    `stop_strings` are keywords of `generate`, next to transformers' own. Text, and with `output_scores` and
    `output_logits` scores and logits, are those of `generate` alone; with sampling they have its distribution.
    Processors and criteria, transformers' and the caller's, see each row without its padding and are called for one row
    at a time. So each row of a batch is what `generate` alone writes for that row in a batch of its own, also with
    processors that would count padding (`no_repeat_ngram_size`, say) and with prompts that are padded on the right,
    after whose padding `generate` alone goes on. A row that a criterion ends is padded behind its last token.
    docs/generate.md lists what is accepted, ignored and refused.

    The model is unpatched between calls. What a call has made (heads read from a folder, caches, compiled and captured
    steps) is kept for the next one until the model is deleted, see `kept`.

    Args:
        model: a Llama-family model, possibly within a peft model whose `generate` was called.
        input_ids: int64 [B, T].
        logits_processor: the processors that transformers has made, with the caller's own among them.
        stopping_criteria: likewise.
        generation_config: in force, as transformers has prepared it.
        heads: the heads on the model's device and in its dtype; or a folder or hub id in any supported format, which is
            read at the first call.
        tree: verified each step, or "auto", as in `MedusaModel.generate`; None for the checkpoint's `medusa_tree.json`,
            or else `default_tree`.
        acceptance: as in `MedusaModel.generate`; "typical" is LOSSY.
        posterior_threshold: epsilon of typical acceptance.
        posterior_alpha: delta of typical acceptance.
        backend: how steps run, as in `MedusaModel`.
        seed: of sampling, as in `MedusaModel.generate`.
        metrics: keep counts and times (with `return_dict_in_generate`).
        stop_strings: a row ends behind the token with which one of these appears; needs `tokenizer=` besides. Those of
            a generation config never get here, as transformers refuses them for want of a tokenizer: give them
            as an argument, or as `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.
        inputs_tensor: the prompts before they were repeated for `num_return_sequences`.
        **model_kwargs: what else transformers has prepared: attention mask, positions, an empty cache (which stays
            empty, also if it is the caller's).

    Returns:
        A `MedusaOutput` with `return_dict_in_generate`, else its sequences, int64 [B, T + new].

    Raises:
        ValueError: not called by transformers' `generate`; bad arguments; something that cannot work here, by name
            (beam search, an assistant model, a cache with content, ..). Raised before any work.
        FloatingPointError: the model's output is not finite; names the step.
        MemoryError: keys and values do not fit.
    """
    given = _lost_arguments(model)
    streamer = None if given.streamer is None else _Continued(given.streamer)
    with contextlib.nullcontext() if streamer is None else streamer.ended_on_error():
        if generation_config is None:
            raise ValueError("generation_config: expected the one that transformers has prepared, got None")
        # What the config asks for is looked at first: it explains what else is there.
        config = _checked(generation_config, given, bool(stop_strings))
        mask, positions = _mask_and_positions(model, model_kwargs)
        prompts = _prompts(input_ids, mask, model.config.vocab_size, None if given.mask else generation_config)
        _check_positions(positions, input_ids, mask, "position_ids" if given.positions else "attention_mask")
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"streamer: expected a batch of 1, got {len(input_ids)}")
        limits, criteria = _limits(generation_config, stopping_criteria, input_ids.shape[1], len(input_ids))
        own, prefix_fn = _callers_processors(
            model, generation_config, logits_processor, input_ids if inputs_tensor is None else inputs_tensor, mask
        )
        config.stop_strings, config.max_time = stop_strings, None  # transformers' criteria have the time limit
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
            criteria=settings.stopping_criteria(config, criteria, given.tokenizer),
            streamer=streamer,
            seed=whole_seed(seed),
            metrics=metrics,
        )
        with borrow_model(model, heads) as medusa:
            medusa.backend = backend
            output = medusa.run(request, tree)
    return output if config.return_dict_in_generate else output.sequences


@dataclass(frozen=True)
class _Lost:
    """Arguments of `generate` that transformers does not hand to a `custom_generate` callable.

    Attributes:
        streamer, assistant_model, synced_gpus, tokenizer: as in `generate`.
        mask, positions: whether the caller gave an attention mask and positions; if not, transformers makes them.
    """

    streamer: Any
    assistant_model: Any
    synced_gpus: bool | None
    tokenizer: Any
    mask: bool
    positions: bool


def _lost_arguments(model: Any) -> _Lost:
    """Find the arguments of `generate` that transformers does not hand on.

    From what it has extracted for a decoding method, transformers (5.17 to 5.23) gives a callable only what the
    callable's own signature names and its own decoding methods' does not: `streamer`, `assistant_model` and
    `synced_gpus` are dropped without a word, and `tokenizer` has been taken out by then. The first three are read here
    from the frame of transformers' `generate`, the tokenizer from the frame that called it: transformers' own decorator
    (`torch.no_grad`), which has all the keywords, whatever wraps it in turn. A release that names them otherwise is
    refused, since a streamer that gets nothing would leave its reader waiting.

    Raises:
        ValueError: this is no call by transformers' `generate` for this model, or one by an unknown release's.
    """
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "generate" and frame.f_globals is vars(generation_utils)):
        frame = frame.f_back
    if frame is None or frame.f_locals.get("self") is not model:
        raise ValueError(
            "medusa_generate: expected a call by transformers, model.generate(.., custom_generate=medusa_generate, "
            "heads=..), got another; MedusaModel.generate can be called directly"
        )
    names = ("streamer", "assistant_model", "synced_gpus")
    found = frame.f_locals
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(
            f"custom_generate: expected transformers' generate to have arguments {', '.join(names)}, got none named "
            f"{', '.join(unknown)} in transformers {transformers.__version__}; MedusaModel.generate does not depend "
            "on it"
        )
    tokenizer = _arguments(frame.f_back).get("tokenizer")
    mask, positions = (_arguments(frame).get(name) is not None for name in ("attention_mask", "position_ids"))
    return _Lost(found["streamer"], found["assistant_model"], found["synced_gpus"], tokenizer, mask, positions)


def _arguments(frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments by name that a function was called with, those of its `**` among them."""
    if frame is None:
        return {}
    names, _, keywords, values = inspect.getargvalues(frame)
    return {name: values[name] for name in names if name in values} | values.get(keywords or "", {})


class _Continued:
    """A streamer that transformers has given the prompt already; it is ended once, also where the call fails."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._has_prompt = self._ended = False

    def put(self, value: torch.Tensor) -> None:
        """Hand tokens on, but not the prompt, which comes first."""
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True

    def end(self) -> None:
        """End the streamer unless it has been."""
        if not self._ended:
            self._ended = True
            self._streamer.end()

    @contextlib.contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """End the streamer where something fails: a thread may be waiting for it."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self.end()
            raise


def _checked(config: GenerationConfig, given: _Lost, stop_strings: bool) -> GenerationConfig:
    """Return a copy of the config in force, if it and the other arguments ask for nothing impossible.

    Raises:
        ValueError: they do; names what.
    """
    if given.assistant_model is not None:
        raise ValueError(
            f"assistant_model: expected None, got {type(given.assistant_model).__name__}; it is another way of "
            "speculation"
        )
    if given.synced_gpus:
        raise ValueError(
            "synced_gpus: expected False, got True; processes of FSDP or ZeRO-3 do not decode in step here"
        )
    if stop_strings and given.tokenizer is None:
        raise ValueError(
            "tokenizer: expected the model's tokenizer with stop_strings, got None; or give "
            "stopping_criteria=[StopStringCriteria(tokenizer, strings)]"
        )
    copied = settings.merge_configs(config, config, {})
    settings.rows_per_prompt(copied)
    return copied


def _mask_and_positions(model: Any, model_kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, Any]:
    """Return the attention mask and the positions, each None if there is none.

    Raises:
        ValueError: the model is to be given something else that matters: a cache with content, embeddings, ..
    """
    method = getattr(model, "prepare_inputs_for_generation", None)
    if getattr(method, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            f"model: expected {type(model).__name__}'s own prepare_inputs_for_generation, got a replaced one (virtual "
            "tokens of prompt learning, say); decoding does not call it"
        )
    rest = {name: value for name, value in model_kwargs.items() if value is not None}
    # The config has the first three as well, every node's logits are needed, and labels, which batches of a data loader
    # have, change no text.
    for name in ("use_cache", "output_attentions", "output_hidden_states", "logits_to_keep", "labels"):
        rest.pop(name, None)
    mask, positions, cache = (rest.pop(name, None) for name in ("attention_mask", "position_ids", "past_key_values"))
    for name, value in rest.items():
        raise ValueError(
            f"{name}: expected None, got {type(value).__name__}; decoding goes by token ids and mask alone"
        )
    if cache is not None:
        _check_cache(cache)
    return mask, positions


def _check_cache(cache: Any) -> None:
    """Raise `ValueError` for a cache that is more than an empty one, which is what transformers makes itself."""
    length = int(cache.get_seq_length()) if isinstance(cache, Cache) else "none of transformers' Cache"
    if length != 0:
        raise ValueError(
            f"past_key_values: expected None or an empty cache, got {type(cache).__name__} (length: {length}); "
            "decoding keeps its own. Give the whole text as input_ids, or use MedusaModel.generate(session=Session())"
        )
    kind = "quantized" if isinstance(cache, QuantizedCache) else "offloaded" if cache.offloading else None
    settings.check_cache("past_key_values", kind)


def _prompts(
    input_ids: torch.Tensor, mask: torch.Tensor | None, vocab_size: int, made: GenerationConfig | None
) -> list[torch.Tensor]:
    """Split the prompts into rows without padding, see `split_prompts`.

    Args:
        input_ids: int64 [B, T].
        mask: [B, T] or None.
        vocab_size: V.
        made: the config whose pad token transformers has made the mask from, if the caller gave none.

    Raises:
        ValueError: as `split_prompts`; it says where a mask comes from that the caller has not given.
    """
    try:
        return split_prompts(input_ids, mask, vocab_size)
    except ValueError as error:
        name, _, words = str(error).partition(": ")
        if name != "attention_mask" or made is None:
            raise
        pad = token_list(made._pad_token_tensor)
        raise ValueError(
            f"attention_mask: none was given, so transformers takes token {pad[0]} (pad_token_id) for padding; "
            f"{words}. Give attention_mask=torch.ones_like(input_ids) if nothing is padded"
        ) from error


def _check_positions(positions: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, source: str) -> None:
    """Raise `ValueError` for positions of tokens [B, T] other than those that the mask gives them.

    Args:
        positions: int64 [B or 1, T], or None.
        input_ids: int64 [B, T].
        mask: [B, T] or None.
        source: the argument they come from.
    """
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
    """Make rules of the criteria that are known to be such, and return the others, which the host evaluates.

    Args:
        config: as transformers has prepared it: lengths count the padded prompt.
        criteria: as transformers has made them.
        width: T, of the padded prompt.
        rows: B.

    Raises:
        ValueError: criteria of the caller's own that contradict the config.
    """
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
    # transformers looks at lengths behind each token: there is always one.
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
    """Find the caller's own processors: those that the config alone does not explain.

    They are handed to transformers again when each row's processors are made, which is why the config's must not be
    among them. transformers puts a processor of the caller's in the place of the config's of the same type, or else
    behind them, and adds what shapes sampling behind all of these.

    Returns:
        The processors in order, and the caller's `prefix_allowed_tokens_fn` or None.
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

    configs = made(do_sample=False, watermarking_config=None, renormalize_logits=None)
    behind = len(made()) - len(configs)
    merged = list(prepared)[: len(prepared) - behind]
    types = {type(processor) for processor in merged}
    callers = {kind for kind in types if not _alike(_of(kind, merged), _of(kind, configs))}
    own = [processor for processor in merged if type(processor) in callers]
    prefixed = [processor for processor in own if type(processor) is lp.PrefixConstrainedLogitsProcessor]
    if len(prefixed) > 1:
        raise ValueError(f"prefix_allowed_tokens_fn: expected at most one, got {len(prefixed)}")
    prefix_fn = prefixed[0]._prefix_allowed_tokens_fn if prefixed else None
    return [processor for processor in own if processor not in prefixed], prefix_fn


def _of(kind: type, processors: list[Any]) -> list[Any]:
    return [processor for processor in processors if type(processor) is kind]


def _alike(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists of processors of one type have the same settings."""
    return len(some) == len(others) and all(
        vars(one).keys() == vars(other).keys()
        and all(_equal(value, vars(other)[name]) for name, value in vars(one).items())
        for one, other in zip(some, others, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.device == other.device and torch.equal(one, other)
    return bool(one == other)


__all__ = ["medusa_generate"]
