"""Prompts to measure on, read from the files that others have published theirs in.

A record is taken by its keys: MT-Bench questions (`turns`, with `question_id` and `category`), ShareGPT's
`conversations`, `messages`, HumanEval (`prompt`, with `task_id`), GSM8K (`question`), or a plain `text`. Of a
conversation only the system message and the user's turns are kept: the answers are the model's to write. Files, folders
and hub names are those of `training.data`. A record that is not understood is an error, as figures are of all prompts
or of none. This module does not know tokenizers or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_decoding.checks import check_text, shown
from medusa_decoding.files import MAX_TEXT
from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data.records import BadRecordError, parse_turn, raw_records

TURNS = 2
KEYS = ("turns", "conversations", "messages", "prompt", "question", "text")
"""By which records are told apart, the first one that has a value."""
_ROLES = {"conversations": ("from", "value"), "messages": ("role", "content")}


@dataclass(frozen=True)
class Prompt:
    """What is asked of the model.

    Attributes:
        turns: what the user says, turn after turn; each is asked behind the model's own answer to the one before.
        category: figures are told apart by it.
        where: its file and line, or another place that a reader finds it by.
        system: a system message, or None.
        is_text: a text to continue, its beginning the prompt, which no chat template is put around.
    """

    turns: tuple[str, ...]
    category: str = "prompts"
    where: str = "prompt"
    system: str | None = None
    is_text: bool = False


def read_prompts(
    paths: Sequence[str | Path],
    *,
    categories: Sequence[str] | None = None,
    limit: int | None = None,
    turns: int = TURNS,
) -> list[Prompt]:
    """Read prompts from files, in their order.

    Args:
        paths: files, folders or hub names; a record's category is its own, or else its file's name.
        categories: only these; None for all.
        limit: at most so many prompts of each category, the first ones.
        turns: at most so many turns of a prompt.

    Raises:
        ValueError: a file that cannot be read, a record that is not understood (with its line and keys), a category
            that no prompt has, no prompt at all.
        ModuleNotFoundError: a parquet file or a hub name without the `datasets` library.
    """
    for name, value in (("limit", limit), ("turns", turns)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    found = [
        _prompt(raw, where, name, turns)
        for path in paths
        for name in [Path(path).name.split(".")[0]]
        for where, raw in raw_records(SourceConfig(str(path)))
    ]
    if not found:
        raise ValueError(f"prompts: expected at least one in {', '.join(map(str, paths))}, got none")
    known = list(dict.fromkeys(prompt.category for prompt in found))
    for category in categories or ():
        if category not in known:
            raise ValueError(f"categories: expected some of {', '.join(known)}, got {category}")
    taken: Counter[str] = Counter()
    kept = []
    for prompt in found:
        taken[prompt.category] += 1
        wanted = categories is None or prompt.category in categories
        if wanted and (limit is None or taken[prompt.category] <= limit):
            kept.append(prompt)
    return kept


def _prompt(raw: Any, where: str, file: str, turns: int) -> Prompt:
    if isinstance(raw, BadRecordError):
        raise ValueError(f"prompts: expected a record in {where}, got {raw}")
    if not isinstance(raw, Mapping):
        raise ValueError(f"prompts: expected a record with named fields in {where}, got {type(raw).__name__}")
    key = next((key for key in KEYS if raw.get(key) is not None), None)
    if key is None:
        got = ", ".join(map(str, raw)) or "no keys"
        raise ValueError(f"prompts: expected one of the keys {', '.join(KEYS)} in {where}, got {got}")
    category = raw.get("category")
    if category is not None and not (isinstance(category, str) and category.strip()):
        raise ValueError(f"prompts: expected a name as category in {where}, got {shown(category)}")
    system = None
    if key in _ROLES:
        system, asked = _conversation(raw[key], key, where)
    elif key == "turns":
        if not isinstance(raw[key], list):
            raise ValueError(f"prompts: expected a list of turns in {where}, got {type(raw[key]).__name__}")
        asked = raw[key]
    else:
        asked = [raw[key]]
    for number, turn in enumerate(asked, start=1):
        if not isinstance(turn, str) or not turn.strip():
            place = f"turn {number} of {where}" if key == "turns" else f"{key} of {where}"
            raise ValueError(f"prompts: expected text as {place}, got {shown(turn)}")
        if len(turn) > MAX_TEXT:
            raise ValueError(f"prompts: expected at most {MAX_TEXT:,} characters in {where}, got {len(turn):,}")
        check_text(f"prompts: {where}", turn)
    if system is not None:
        check_text(f"prompts: {where}", system)
    if not asked:
        raise ValueError(f"prompts: expected a turn of the user in {where}, got none")
    # What begins a text that is there as a whole is to be continued as well.
    is_text = key == "text" or (key == "prompt" and raw.get("text") is not None)
    return Prompt(tuple(asked[:turns]), category or file, where, system, is_text)


def _conversation(listed: Any, key: str, where: str) -> tuple[str | None, list[str]]:
    if not isinstance(listed, list):
        raise ValueError(f"prompts: expected a list of turns as {key} of {where}, got {type(listed).__name__}")
    try:
        spoken = [parse_turn(turn, number, *_ROLES[key]) for number, turn in enumerate(listed, start=1)]
    except BadRecordError as error:
        raise ValueError(f"prompts: expected a role and a text in each turn of {where}, got: {error}") from error
    system = next((turn["content"] for turn in spoken if turn["role"] == "system"), None)
    return system, [turn["content"] for turn in spoken if turn["role"] == "user"]
