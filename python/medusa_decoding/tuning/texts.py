"""Have a model answer the user's prompts, turn by turn, and keep the steps that each text took.

Answers run in the engine of `medusa serve` (`serving.answers`), several at once. Texts are greedy, or sampled at a
temperature; the rest of the model's own generation config (repetition penalty, least length, top-p, ..) applies as in
any generation. With any tree, and whatever runs beside them, the texts are those that the model writes alone, except
for rounding in half precision: random numbers belong to a text and a position in it (see `MedusaModel.generate`). This
module does not know what the texts are for.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_decoding.chat.streaming import AnswerText
from medusa_decoding.chat.template import ChatTemplate
from medusa_decoding.checks import check_count
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.evaluation.prompts import Conversations, Prompt
from medusa_decoding.model import MedusaModel
from medusa_decoding.options import PROMPT_TOKENS, SLOTS
from medusa_decoding.provenance import fingerprint, versions
from medusa_decoding.serving.answers import Answer, Answers
from medusa_decoding.serving.rows import own_stop_strings
from medusa_decoding.trees.tree import Tree

SAMPLING = ("top_k", "top_p", "min_p")
"""Fields of a model's generation config that, in addition to the temperature, affect sampling."""


@dataclass(frozen=True)
class Settings:
    """What a text depends on, apart from model and prompt; `collect.calibrate` has the same arguments and errors."""

    max_new_tokens: int = 256
    prompt_tokens: int = PROMPT_TOKENS
    template: str | None = None
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("prompt_tokens", 1), ("seed", 0)):
            check_count(name, getattr(self, name), least)
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not number or not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a number from 0, got {self.temperature!r}")


@dataclass(frozen=True)
class Written:
    """One text: the tokens of the prompt, the new ones, and how many draft tokens each step accepted.

    `seed` is that of `MedusaModel.generate` for a sampled text, None for a greedy one.
    """

    prompt: list[int]
    new: list[int]
    accept_lengths: list[int]
    seed: int | None


@dataclass(eq=False)
class Conversation:
    """A prompt and the model's answers to its turns.

    Attributes:
        number: the prompt's index among all; random numbers depend on it.
        prompt: the prompt.
        turns: see `Conversations.turns`.
        ids: tokens of the turn that is to be answered.
        written: the answers so far.
    """

    number: int
    prompt: Prompt
    turns: Generator[list[int], list[int] | None, None]
    ids: list[int]
    written: list[Written] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        """How many turns have no answer: once all has been written, those that did not fit the context."""
        return len(self.prompt.turns) - len(self.written)


class Writer:
    """Has a model answer prompts; every turn follows the model's own answer to the previous one."""

    def __init__(self, model: MedusaModel, tokenizer: Any, settings: Settings, slots: int = SLOTS) -> None:
        self.model, self.settings, self.slots = model, settings, slots
        self._conversations = Conversations(model, tokenizer, settings.template, settings.prompt_tokens)
        self._chat, self.encode = self._conversations.chat, self._conversations.encode

    def describe(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return everything that the texts and the heads' ranks in them depend on, as JSON values."""
        model, settings = self.model, self.settings
        assert model.heads is not None
        digest = hashlib.blake2b(digest_size=8)
        each: list[str] = []
        for prompt in prompts:
            # The tokens of the first turn depend on the tokenizer and the template.
            ids = self.encode(prompt)
            digest.update((json.dumps([ids, prompt.system, prompt.turns, prompt.is_text]) + "\n").encode())
            each.append(_hash(ids if prompt.is_text else prompt.messages, 6))
        device, own = model.backbone.device, model.backbone.causal_lm.generation_config
        sampling = {"seed": settings.seed} | {name: getattr(own, name, None) for name in SAMPLING}
        ends, stops = self._chat.ends(self._conversations.eos), self._chat.stop_strings(None)
        return {
            "heads": fingerprint(model.heads),
            "base_model": fingerprint(model.backbone.causal_lm),
            "prompts": {"count": len(prompts), "hash": digest.hexdigest(), "each": each},
            "settings": {
                "max_new_tokens": settings.max_new_tokens,
                "prompt_tokens": settings.prompt_tokens,
                "temperature": settings.temperature,
                **(sampling if settings.temperature else {}),
                "generation": _hash([own.to_json_string(ignore_metadata=True), ends, stops], 8),
                "template": _hash(self._chat.text, 8) if isinstance(self._chat, ChatTemplate) else "none",
                "dtype": str(model.backbone.dtype).removeprefix("torch."),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "backend": str(resolve_backend(model.backend, device, model.backbone.peers.size)),
            },
            "versions": versions("torch", "transformers", "medusa-kernels"),
        }

    def answers(
        self, prompts: Iterable[tuple[int, Prompt]], tree: Tree | None = None
    ) -> Generator[Conversation, None, None]:
        """Yield each prompt, given with its number, when its last answer has ended; steps verify the tree, if any.

        A turn that does not fit the context ends its conversation.
        """
        limit = self.model.backbone.context_limit
        asked = [
            Conversation(number, one, turns := self._conversations.turns(one), next(turns)) for number, one in prompts
        ]
        waiting = [one for one in asked if len(one.ids) < limit]
        yield from (one for one in asked if len(one.ids) >= limit)
        while waiting:
            context, later = min(limit, max(map(self._reach, waiting))), []
            slots = min(self.slots, len(waiting))
            with Answers(self.model, slots, context, tree=Tree([]) if tree is None else tree) as answers:
                for answer in answers.each(iter(waiting), functools.partial(self._ask, answers)):
                    one: Conversation = answer.asked
                    one.written.append(Written(one.ids, answer.tokens, answer.accepted, self._seed(one)))
                    if one.left_out:
                        one.ids = one.turns.send(answer.tokens)
                    if not one.left_out or len(one.ids) >= limit:
                        yield one
                    elif self._end(one) <= context:
                        self._ask(answers, one)
                    else:  # its answers were longer in the template than expected
                        later.append(one)
            waiting = later

    def _ask(self, answers: Answers, one: Conversation) -> None:
        ending = self._conversations.ending(one.prompt)
        stops = ending.get("stop_strings") or own_stop_strings(self.model)
        answer = Answer(one, one.prompt.where, AnswerText(self._chat.tokenizer, stops) if stops else None)
        sampling: dict[str, Any] = {"do_sample": False}
        if self.settings.temperature:
            sampling = {"do_sample": True, "temperature": self.settings.temperature, "seed": self._seed(one)}
        new_tokens = self._end(one) - len(one.ids)
        answers.ask(answer, one.ids, ends=ending.get("eos_token_id", ()), max_new_tokens=new_tokens, **sampling)

    def _seed(self, one: Conversation) -> int | None:
        """Return the seed of the next text: each has its own random numbers, also in a run that continues another."""
        if not self.settings.temperature:
            return None
        name = json.dumps([self.settings.seed, one.number, len(one.written)]).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")

    def _end(self, one: Conversation) -> int:
        """Return the most tokens that a turn has with its answer."""
        return min(len(one.ids) + self.settings.max_new_tokens, self.model.backbone.context_limit)

    def _reach(self, one: Conversation) -> int:
        """Return about how many tokens a conversation has in the end."""
        further = (self.encode(Prompt((turn,))) for turn in one.prompt.turns[len(one.written) + 1 :])
        return self._end(one) + sum(len(ids) + self.settings.max_new_tokens for ids in further)


def _hash(content: Any, size: int) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=size).hexdigest()
