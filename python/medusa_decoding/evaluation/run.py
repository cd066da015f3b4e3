"""Write every prompt's texts by each way of decoding, in turn within one process, and compare them.

The ways are Medusa, this package's plain loop (`Tree([])`) and transformers' `generate` with the model's own attention
modules. The plain loop's text, which is the base model's own, is what the next turn follows and what heads are measured
on. Its answers do not go through `serving.answers`: they are timed here, one text alone as Medusa's are, and an engine
that runs several at once would time another thing. What it shares with those that do is `prompts.Conversations`.

The order of the ways is shuffled for each text, so that none always runs after the same one. All of them run once
before anything is timed; if steps are compiled or captured, ours also run once on each text.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from medusa_decoding.chat.template import ChatTemplate
from medusa_decoding.checks import check_count
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.evaluation.own_text import own_text_accuracy
from medusa_decoding.evaluation.prompts import Conversations, Prompt
from medusa_decoding.evaluation.report import MEDUSA, PLAIN, TRANSFORMERS, Evaluation, Measured
from medusa_decoding.generation.session import common_length
from medusa_decoding.generation.tree_choice import TreeChoice
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.options import PROMPT_TOKENS
from medusa_decoding.progress import Progress
from medusa_decoding.provenance import versions
from medusa_decoding.trees.tree import Tree

# Arguments that only one kind of decoding takes.
_OF_TYPICAL = ("acceptance", "posterior_threshold", "posterior_alpha")
_OF_DRAWING = ("temperature", "top_p", "top_k", "min_p")


def evaluate(
    model: MedusaModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    template: str | None = None,
    tree: Tree | Literal["auto"] | None = None,
    rounds: int = 1,
    transformers: bool = True,
    prompt_tokens: int = PROMPT_TOKENS,
    stop_strings: Sequence[str] | None = None,
    progress: bool = False,
    **generation: Any,
) -> Evaluation:
    """Measure tokens per step, speedups, equal texts and the accuracy of heads on prompts, one at a time.

    Args:
        model: the model with its heads, or without (a tree of copied tokens needs none).
        tokenizer: of the base model.
        prompts: see `read_prompts`.
        max_new_tokens: of each text.
        template: a file with a Jinja template, "plain", or None: the tokenizer's own template, or plain text if it
            has none.
        tree: as in `MedusaModel.generate`.
        rounds: how often each text is written and timed by each way.
        transformers: whether transformers' `generate` is measured as well.
        prompt_tokens: how many tokens at the start of a text to continue are the prompt.
        stop_strings: a text ends after the token with which one of these appears.
        progress: show a progress bar on standard error, if that is a terminal.
        **generation: further arguments of `MedusaModel.generate` (do_sample, temperature, seed, acceptance, ..). When
            sampling, the plain loop draws the same tokens, but transformers draws others: its texts are timed, not
            compared. The seed is 0 by default, and each text adds its number to it. With typical acceptance, the
            baselines are greedy.

    Raises:
        ValueError: bad arguments; no prompt that fits the model's context.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("rounds", rounds), ("prompt_tokens", prompt_tokens)):
        check_count(name, value)
    if not prompts:
        raise ValueError("prompts: give at least one")
    conversations = Conversations(model, tokenizer, template, prompt_tokens)
    run = _Run(model, conversations, max_new_tokens, tree, rounds, transformers, stop_strings, generation)
    turns = sum(len(prompt.turns) for prompt in prompts)
    with Progress(turns, "text", shown=progress) as bar:
        for number, prompt in enumerate(prompts):
            for _ in run.answer(number, prompt):
                bar.update()
    if not run.measured:
        first = run.left_out[0]
        raise ValueError(
            f"prompts: expected fewer than {model.backbone.context_limit} tokens (the model's context), got "
            f"{first['prompt_tokens']} in {first['where']}"
            + (" and too many in all others" if len(prompts) > 1 else "")
        )
    return Evaluation.of(
        run.measured,
        rounds=rounds,
        settings=run.described(),
        versions=versions("torch", "transformers", "medusa-kernels"),
        left_out=run.left_out,
    )


@dataclass(frozen=True)
class _Written:
    """New tokens of one text, their time in seconds, and how many tokens each of our steps accepted."""

    new: list[int]
    seconds: float
    accepted: list[int] = field(default_factory=list)


@dataclass
class _Run:
    """Writes and measures texts, and lists turns without room in the context; see `evaluate` for the settings."""

    model: MedusaModel
    conversations: Conversations
    max_new_tokens: int
    tree: Tree | Literal["auto"] | None
    rounds: int
    transformers: bool
    stop_strings: Sequence[str] | None
    generation: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Each takes a prompt's tokens, and the arguments that all ways share.
        self._ways: dict[str, Callable[[list[int], dict[str, Any]], _Written]] = {
            MEDUSA: lambda ids, common: self._ours(ids, common, self.tree, self.generation),
            PLAIN: lambda ids, common: self._ours(ids, common, Tree([]), self._of_baselines()),
            TRANSFORMERS: self._transformers,
        }
        self._order = [MEDUSA, PLAIN, *([TRANSFORMERS] if self.transformers else [])]
        self._shuffler = random.Random(0)
        self._backend = resolve_backend(self.model.backend, self.model.backbone.device, self.model.backbone.peers.size)
        self._drawn = bool(self.generation.get("do_sample"))

    def answer(self, number: int, prompt: Prompt) -> Iterator[None]:
        """Measure a prompt's turns, each after the plain loop's answer to the previous one; yield after each."""
        turns, new, limit = self.conversations.turns(prompt), None, self.model.backbone.context_limit
        ending, fits = self.conversations.ending(prompt, self.stop_strings), True
        for turn in range(1, len(prompt.turns) + 1):
            ids = turns.send(new)
            fits, new = fits and len(ids) < limit, None
            if fits:
                one = Measured(number, prompt.category, prompt.where, turn)
                common = {"max_new_tokens": min(self.max_new_tokens, limit - len(ids)), **ending}
                new = self._measure(one, ids, common)
                self.measured.append(one)
            else:
                self.left_out.append({"where": prompt.where, "turn": turn, "prompt_tokens": len(ids)})
            yield

    def described(self) -> dict[str, Any]:
        """Return how it was measured."""
        model = self.model
        tree = model.tree if self.tree is None else self.tree
        device = model.backbone.device
        return {
            "tree": TreeChoice(tree, "").name,
            "max_new_tokens": self.max_new_tokens,
            "rounds": self.rounds,
            "dtype": str(model.backbone.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "backend": self._backend,
            "threads": torch.get_num_threads(),
            "template": "chat" if isinstance(self.conversations.chat, ChatTemplate) else "none",
            **model.lossy_dtypes,
        } | self.generation

    def _measure(self, one: Measured, ids: list[int], common: dict[str, Any]) -> list[int]:
        """Write a text by every way; return the plain loop's."""
        for name in self._order:
            if not self.measured or (self._backend != "eager" and name != TRANSFORMERS):
                self._ways[name](ids, common)  # not timed
        texts: dict[str, _Written] = {}
        for _ in range(self.rounds):
            self._shuffler.shuffle(self._order)
            for name in self._order:
                written = self._ways[name](ids, common)
                one.tokens[name] += len(written.new)
                one.seconds[name] = one.seconds.get(name, 0.0) + written.seconds
                texts.setdefault(name, written)
        one.accepted = texts[MEDUSA].accepted
        compared = (PLAIN,) if self._drawn or TRANSFORMERS not in texts else (PLAIN, TRANSFORMERS)
        one.departs = {name: departure(texts[MEDUSA].new, texts[name].new) for name in compared}
        own = texts[PLAIN].new
        if self.model.heads is not None:
            one.accuracy = own_text_accuracy(self.model, ids + own, len(ids))
        return own

    def _seed(self) -> int:
        return (self.generation.get("seed") or 0) + len(self.measured)

    def _ours(
        self, ids: list[int], common: dict[str, Any], tree: Tree | Literal["auto"] | None, generation: dict[str, Any]
    ) -> _Written:
        if self._drawn:
            generation = generation | {"seed": self._seed()}
        prompt = torch.tensor([ids])
        start = time.perf_counter()
        output = self.model.generate(prompt, tree=tree, **common, **generation)
        assert isinstance(output, MedusaOutput)
        new = output.sequences[0, len(ids) :].tolist()
        return _Written(new, time.perf_counter() - start, output.accept_lengths[0])

    def _transformers(self, ids: list[int], common: dict[str, Any]) -> _Written:
        own = self.model.backbone.causal_lm.generation_config
        generation = {name: value for name, value in self._of_baselines().items() if name != "seed"}
        generation["do_sample"] = self._drawn
        if self._drawn:
            generation.setdefault("top_k", own.top_k or 0)  # ours keeps all tokens by default
        pad = own.pad_token_id
        generation["pad_token_id"] = pad if pad is not None else (common.get("eos_token_id") or [0])[0]
        prompt = torch.tensor([ids], device=self.model.backbone.device)
        with own_attention(self.model) as base, torch.random.fork_rng(enabled=self._drawn):
            if self._drawn:
                torch.manual_seed(self._seed())
            start = time.perf_counter()
            out = base.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                return_dict_in_generate=False,
                **common,
                **generation,
            )
            new = out[0, len(ids) :].tolist()
            return _Written(new, time.perf_counter() - start)

    def _of_baselines(self) -> dict[str, Any]:
        """Return the arguments of the baselines."""
        dropped = _OF_TYPICAL if self._drawn else (*_OF_TYPICAL, *_OF_DRAWING)
        return {name: value for name, value in self.generation.items() if name not in dropped}


@contextlib.contextmanager
def own_attention(model: MedusaModel) -> Iterator[Any]:
    """Give the base model its own attention modules within the block; compiled and captured steps stay valid."""
    held = model.base, model.backbone.causal_lm  # the model drops its references
    model.suspend()
    try:
        yield held[1]
    finally:
        model.resume()


def departure(text: list[int], other: list[int]) -> int | None:
    """Return the first place in which two texts differ, their lengths included, or None."""
    return None if text == other else common_length(text, other)
