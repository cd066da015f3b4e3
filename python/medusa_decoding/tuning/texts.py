"""Have a model answer the user's prompts, turn by turn, and keep the steps that each text took.

Texts are greedy, or sampled at a temperature; the rest of the model's own generation config (repetition penalty, least
length, top-p, ..) applies as in any generation. With any tree the texts are the model's own, except for rounding in
half precision: random numbers belong to a text and a position in it (see `MedusaModel.generate`). This module does not
know what the texts are for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_decoding.chat.template import ChatTemplate, Message
from medusa_decoding.checks import check_count
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.evaluation.prompts import Conversations, Prompt
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.options import PROMPT_TOKENS
from medusa_decoding.provenance import fingerprint, versions
from medusa_decoding.trees.tree import Tree

SAMPLING = ("top_k", "top_p", "min_p")
"""Fields of a model's generation config that, in addition to the temperature, affect sampling."""
RANKED = "with the noise of the draws"
"""How heads rank candidates for sampled texts; files of earlier versions, which ranked without it, do not say."""
SAMPLE_CHAT: list[Message] = [
    {"role": "user", "content": "Which one is it?"},
    {"role": "assistant", "content": "The first one."},
    {"role": "user", "content": "And why?"},
]
"""Two templates count as the same if they encode this to the same tokens."""


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


class Writer:
    """Has a model answer prompts; every turn follows the model's own answer to the previous one."""

    def __init__(self, model: MedusaModel, tokenizer: Any, settings: Settings) -> None:
        self.model, self.settings = model, settings
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
        sampling = {"seed": settings.seed, "ranked": RANKED} | {name: getattr(own, name, None) for name in SAMPLING}
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
                "template": "chat" if isinstance(self._chat, ChatTemplate) else "none",
                "rendered": self._hash_of_template(),
                "dtype": str(model.backbone.dtype).removeprefix("torch."),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "backend": str(resolve_backend(model.backend, device, model.backbone.peers.size)),
            },
            "versions": versions("torch", "transformers", "medusa-kernels"),
        }

    def answers(self, prompt: Prompt, number: int, tree: Tree) -> Iterator[Written | None]:
        """Yield the text of each turn of a prompt, or None for a turn that does not fit the context.

        Random numbers depend on `number`, the prompt's index among all. Steps verify the tree.
        """
        settings, turns, new = self.settings, self._conversations.turns(prompt), None
        for turn in range(len(prompt.turns)):
            ids = turns.send(new)
            room = self.model.backbone.context_limit - len(ids)
            if room < 1:
                yield from [None] * (len(prompt.turns) - turn)
                return
            sampling: dict[str, Any] = {}
            seed: int | None = None
            if settings.temperature:
                # Each text has its own random numbers, also in a run that goes on after a stop.
                name = json.dumps([settings.seed, number, turn]).encode()
                seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
                sampling = {"do_sample": True, "temperature": settings.temperature, "seed": seed}
            output = self.generate(prompt, ids, tree, min(settings.max_new_tokens, room), **sampling)
            new = output.sequences[0, len(ids) :].tolist()
            yield Written(ids, new, output.accept_lengths[0], seed)

    def generate(self, prompt: Prompt, ids: list[int], tree: Tree, max_new_tokens: int, **more: Any) -> MedusaOutput:
        """Continue the tokens of a prompt up to the end of an answer; `more` arguments as in `MedusaModel.generate`."""
        ending = self._conversations.ending(prompt)
        output = self.model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, tree=tree, **ending, **more)
        assert isinstance(output, MedusaOutput)
        return output

    def _hash_of_template(self) -> str:
        try:
            return _hash(self._chat.encode(SAMPLE_CHAT), 8)
        except ValueError as error:  # such as a template for single questions
            return _hash([self._chat.encode(SAMPLE_CHAT[:1]), str(error)], 8)


def _hash(content: Any, size: int) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=size).hexdigest()
