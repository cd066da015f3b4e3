"""Read prompts to measure on, from the same files as training (docs/data.md).

From a conversation only the system message and the user's turns are used, because the model writes the answers. A text
is continued from its beginning. A record that cannot be read is an error, so that figures cover all prompts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_decoding.chat.template import Message, PromptEncoder, prompt_encoder
from medusa_decoding.checks import shown, token_list
from medusa_decoding.files import MAX_TEXT
from medusa_decoding.model import MedusaModel
from medusa_decoding.options import PROMPT_TOKENS, TURNS
from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data.records import before_results, interpret
from medusa_decoding.training.data.sources import BadRecordError, raw_records

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        turns: the user's messages; each follows the model's own answer to the previous one.
        category: the group that it is counted in.
        where: its file and line, for messages.
        system: a system message, or None.
        is_text: whether it is a text whose beginning is to be continued, without a chat template.
        tools: definitions of the tools that the model may call, for the chat template.
    """

    turns: tuple[str, ...]
    category: str = "prompts"
    where: str = "prompt"
    system: str | None = None
    is_text: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def messages(self) -> list[Message]:
        """The messages of the first turn."""
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.turns[0]}]


class Conversations:
    """Encodes prompts for a model, turn by turn, by a template as in `prompt_encoder`.

    Of a text to continue, the first `prompt_tokens` are the prompt.

    Attributes:
        eos: the model's tokens that end a text.
        chat: encodes all prompts that are not texts to continue.
    """

    def __init__(
        self, model: MedusaModel, tokenizer: Any, template: str | None = None, prompt_tokens: int = PROMPT_TOKENS
    ) -> None:
        own = model.backbone.causal_lm.generation_config
        self.eos, self._own_stops = token_list(own.eos_token_id), bool(own.stop_strings)
        self.chat = prompt_encoder(tokenizer, template, self.eos)
        self._plain, self._prompt_tokens = PromptEncoder(tokenizer, self.eos), prompt_tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt's first turn."""
        return next(self.turns(prompt))

    def turns(self, prompt: Prompt) -> Generator[list[int], list[int] | None, None]:
        """Yield the tokens of each turn; send the new tokens of its answer, or None if it was not answered."""
        encoder, messages = self._encoder(prompt), prompt.messages[:-1]
        known: list[int] = []
        for question in prompt.turns:
            messages = [*messages, {"role": "user", "content": question}]
            ids = encoder.encode(messages, known, prompt.tools)[: self._prompt_tokens if prompt.is_text else None]
            new = yield ids
            if new is not None:
                known = ids + new
                messages = [*messages, {"role": "assistant", "content": encoder.answer(new)}]

    def ending(self, prompt: Prompt | None = None, stop_strings: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the arguments of `MedusaModel.generate` that end an answer to a prompt; without one, to a chat."""
        encoder = self.chat if prompt is None else self._encoder(prompt)
        ends, stops = encoder.ends(self.eos), encoder.stop_strings(stop_strings)
        found: dict[str, Any] = {"eos_token_id": ends} if ends else {}
        found |= {"stop_strings": stops} if stops else {}
        return found | ({"tokenizer": encoder.tokenizer} if stops or self._own_stops else {})

    def _encoder(self, prompt: Prompt) -> PromptEncoder:
        return self._plain if prompt.is_text else self.chat


def read_prompts(
    paths: Sequence[str | Path],
    *,
    categories: Sequence[str] | None = None,
    limit: int | None = None,
    turns: int = TURNS,
    distinct: bool = False,
) -> list[Prompt]:
    """Read prompts from files, in their order.

    Args:
        paths: files, folders or hub names; a record's category is its own, or else its file's name.
        categories: only these; None for all.
        limit: how many prompts of each category to use at most, the first ones.
        turns: how many turns of a prompt to use at most.
        distinct: whether to leave out prompts that came before, and log how many. Their answers would be the same, and
            intervals over prompts too narrow.

    Raises:
        ValueError: a file that cannot be read, a record of another kind (with its line and keys), a category that no
            prompt has, no prompt at all.
        ModuleNotFoundError: a parquet file or a hub name without the `datasets` library.
    """
    for name, value in (("limit", limit), ("turns", turns)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    notes: Counter[str] = Counter()
    found = [
        _prompt(raw, where, name, turns, notes)
        for path in paths
        for name in [Path(path).name.split(".")[0]]
        for where, raw in raw_records(SourceConfig(str(path)))
    ]
    if not found:
        raise ValueError(f"prompts: no prompt found in {', '.join(map(str, paths))}")
    for note, count in (+notes).items():
        logger.warning("in %d of %d prompts %s", count, len(found), note)
    known = list(dict.fromkeys(prompt.category for prompt in found))
    for category in categories or ():
        if category not in known:
            raise ValueError(f"categories: expected some of {', '.join(known)}, got {category}")
    if distinct:
        first: dict[Any, Prompt] = {}
        for prompt in found:
            first.setdefault((prompt.system, prompt.turns, repr(prompt.tools)), prompt)
        if repeats := len(found) - len(first):
            logger.warning("%d of %d prompts are left out, which repeat others", repeats, len(found))
        found = list(first.values())
    chosen = known if categories is None else categories
    taken: Counter[str] = Counter()
    wanted = []
    for prompt in found:
        taken[prompt.category] += 1
        if prompt.category in chosen and (limit is None or taken[prompt.category] <= limit):
            wanted.append(prompt)
    return wanted


def _prompt(raw: Any, where: str, file: str, turns: int, notes: Counter[str]) -> Prompt:
    try:
        content = interpret(raw)
    except BadRecordError as error:
        raise ValueError(f"prompts: expected a record with a prompt in {where}, got: {error}") from error
    category = raw.get("category")
    if category is not None and not (isinstance(category, str) and category.strip()):
        raise ValueError(f"prompts: expected a name as category in {where}, got {shown(category)}")
    messages = before_results(content.messages)
    system, *further = [turn["content"] for turn in messages if turn["role"] == "system"] or [None]
    asked = [turn["content"] for turn in messages if turn["role"] == "user"]
    content.note_unread(notes)
    notes["a further system message is not read"] += bool(further)
    notes["what follows the first result of a tool is not read"] += len(messages) < len(content.messages)
    if content.text is not None:
        asked = [content.prompt]
    for turn in asked:
        if len(turn) > MAX_TEXT:
            raise ValueError(f"prompts: expected at most {MAX_TEXT:,} characters in {where}, got {len(turn):,}")
    if not asked:
        raise ValueError(f"prompts: {where} has no turn of the user")
    return Prompt(tuple(asked[:turns]), category or file, where, system, content.text is not None, content.tools)
