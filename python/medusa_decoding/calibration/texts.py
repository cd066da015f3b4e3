"""The texts that a model writes to the user's prompts, turn by turn, and the steps that took.

Texts are greedy, or drawn at a temperature; whatever else the model's own generation config says (repetition penalty,
least length, top-p, ..) applies as in any generation. Either way they are the model's own with any tree, but for
rounding in half precision: drawn numbers belong to a text and a place in it (see `MedusaModel.generate`). This module
does not know what the texts are wanted for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_decoding.chat.template import ChatTemplate, Message, PromptEncoder, prompt_encoder
from medusa_decoding.checks import token_list
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.evaluation.run import PROMPT_TOKENS
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.provenance import fingerprint, versions
from medusa_decoding.trees.tree import Tree

OF_SAMPLING = ("top_k", "top_p", "min_p")
"""What a model's own generation config may say of drawing, besides the temperature."""
SHOWN: list[Message] = [
    {"role": "user", "content": "Which one is it?"},
    {"role": "assistant", "content": "The first one."},
    {"role": "user", "content": "And why?"},
]
"""By what a template makes of this, templates are told apart."""


@dataclass(frozen=True)
class Settings:
    """What decides a text, besides model and prompt.

    Attributes:
        max_new_tokens: of each text.
        prompt_tokens: of a prompt that is a text to continue, so many tokens at its start are asked.
        template: a file with a Jinja template, "plain", or None: the tokenizer's own, and text as it stands where it
            has none.
        temperature: above 0, tokens are drawn at it; 0: greedy. All else is as the model's own generation config says.
        seed: of drawing.

    Raises:
        ValueError: a number that cannot be.
    """

    max_new_tokens: int = 256
    prompt_tokens: int = PROMPT_TOKENS
    template: str | None = None
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("prompt_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected a whole number from {least}, got {value!r}")
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not number or not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a number from 0, got {self.temperature!r}")


@dataclass(frozen=True)
class Written:
    """One text.

    Attributes:
        prompt: its tokens.
        new: the tokens behind it.
        accepted: drafts that each step accepted.
    """

    prompt: list[int]
    new: list[int]
    accepted: list[int]


class Writer:
    """Has a model answer prompts, each turn behind the model's own answer to the one before.

    Args:
        model: the model.
        tokenizer: of the base model.
        settings: see there.
    """

    def __init__(self, model: MedusaModel, tokenizer: Any, settings: Settings) -> None:
        self._eos = token_list(model.backbone.causal.generation_config.eos_token_id)
        self.model, self._settings = model, settings
        self._chat = prompt_encoder(tokenizer, settings.template, self._eos)
        self._as_it_stands = PromptEncoder(tokenizer, self._eos)

    def described(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return all that decides the texts and the heads' ranks in them, as JSON has it."""
        model, settings = self.model, self._settings
        assert model.heads is not None
        digest = hashlib.blake2b(digest_size=8)
        each: list[str] = []
        for prompt in prompts:
            # Tokens of what is asked first tell tokenizers and templates apart as well.
            first = _messages(prompt)[: 1 if prompt.system is None else 2]
            ids = self._ids(prompt, first, [])
            digest.update((json.dumps([ids, prompt.system, prompt.turns, prompt.is_text]) + "\n").encode())
            each.append(_hash(ids if prompt.is_text else first, 6))
        device, own = model.backbone.device, model.backbone.causal.generation_config
        drawn = {"seed": settings.seed} | {name: getattr(own, name, None) for name in OF_SAMPLING}
        ends, stops = self._chat.ends(self._eos), self._chat.stop_strings(None)
        return {
            "heads": fingerprint(model.heads),
            "base_model": fingerprint(model.backbone.causal),
            "prompts": {"count": len(prompts), "hash": digest.hexdigest(), "each": each},
            "settings": {
                "max_new_tokens": settings.max_new_tokens,
                "prompt_tokens": settings.prompt_tokens,
                "temperature": settings.temperature,
                **(drawn if settings.temperature else {}),
                "generation": _hash([own.to_json_string(ignore_metadata=True), ends, stops], 8),
                "template": "chat" if isinstance(self._chat, ChatTemplate) else "none",
                "rendered": self._rendered(),
                "dtype": str(model.backbone.dtype).removeprefix("torch."),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "backend": str(resolve_backend(model.backend, device, model.backbone.peers.size)),
            },
            "versions": versions("torch", "transformers", "medusa-kernels"),
        }

    def answers(self, prompt: Prompt, number: int, tree: Tree) -> Iterator[Written | None]:
        """Write the text of each turn of a prompt.

        Args:
            prompt: what is asked.
            number: the prompt's place among all, on which drawn numbers depend.
            tree: that steps verify.

        Yields:
            The texts; None for each turn left without room in the context.
        """
        chat, asked = self._conversation(prompt), _messages(prompt)
        messages: list[Message] = [message for message in asked if message["role"] == "system"]
        known: list[int] = []
        turns = asked[len(messages) :]
        for turn, question in enumerate(turns):
            messages = [*messages, question]
            ids = self._ids(prompt, messages, known)
            room = self.model.backbone.context_limit - len(ids)
            if room < 1:
                yield from [None] * (len(turns) - turn)
                return
            written = self._answer(ids, min(self._settings.max_new_tokens, room), chat, tree, (number, turn))
            known = ids + written.new
            messages = [*messages, {"role": "assistant", "content": chat.answer(written.new)}]
            yield written

    def _rendered(self) -> str:
        """Return a hash of what the template and the tokenizer make of a conversation."""
        try:
            return _hash(self._chat.encode(SHOWN), 8)
        except ValueError as error:  # a template for single questions, say
            return _hash([self._chat.encode(SHOWN[:1]), str(error)], 8)

    def _conversation(self, prompt: Prompt) -> PromptEncoder:
        return self._as_it_stands if prompt.is_text else self._chat

    def _ids(self, prompt: Prompt, messages: Sequence[Message], known: Sequence[int]) -> list[int]:
        ids = self._conversation(prompt).encode(messages, known)
        return ids[: self._settings.prompt_tokens] if prompt.is_text else ids

    def _answer(
        self, ids: list[int], new_tokens: int, chat: PromptEncoder, tree: Tree, place: tuple[int, int]
    ) -> Written:
        ends, stops = chat.ends(self._eos), chat.stop_strings(None)
        more: dict[str, Any] = {"eos_token_id": ends} if ends else {}
        if stops:
            more |= {"stop_strings": stops, "tokenizer": chat.tokenizer}
        if self._settings.temperature:
            # Each text draws numbers of its own, also behind a run that was stopped before it.
            name = json.dumps([self._settings.seed, *place]).encode()
            seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
            more |= {"do_sample": True, "temperature": self._settings.temperature, "seed": seed}
        output = self.model.generate(torch.tensor([ids]), max_new_tokens=new_tokens, tree=tree, **more)
        assert isinstance(output, MedusaOutput)
        return Written(ids, output.sequences[0, len(ids) :].tolist(), output.accept_lengths[0])


def _messages(prompt: Prompt) -> list[Message]:
    system: list[Message] = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return system + [{"role": "user", "content": turn} for turn in prompt.turns]


def _hash(content: Any, size: int) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=size).hexdigest()


def shared_prompts(one: Any, other: Any) -> int | None:
    """Count the prompts of a set that another has too; None where one of them does not tell.

    Args:
        one: `prompts` of what `Writer.described` returned, or what else a file may say there.
        other: likewise.
    """
    if not (isinstance(one, dict) and isinstance(other, dict) and one and other):
        return None
    if one == other:
        return int(one.get("count", 1))
    first, second = one.get("each"), other.get("each")
    if not (isinstance(first, list) and isinstance(second, list)):  # of files from before these were kept
        return None
    known = set(map(str, second))
    return sum(str(name) in known for name in first)
