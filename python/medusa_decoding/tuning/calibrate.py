"""Calibrating: the model writes texts to the user's prompts, and the ranks of their tokens with the heads are counted.

Texts are greedy and written without the heads, so that they are the model's own in any dtype. This module does not know
what the counts are good for (see `accuracy` and `search`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from medusa_decoding.evaluation.conversation import AsItStands, Conversation, Message, conversation_of
from medusa_decoding.evaluation.own_text import RANKS, own_text_ranks
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.evaluation.run import PROMPT_TOKENS
from medusa_decoding.inputs import token_list
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.provenance import fingerprint, versions
from medusa_decoding.training.targets import IGNORE
from medusa_decoding.tree import Tree
from medusa_decoding.tuning.accuracy import Calibration, RankPath, name_of, ranks_of, write_whole


def calibrate(
    model: MedusaModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    prompt_tokens: int = PROMPT_TOKENS,
    template: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Calibration:
    """Write a text to each prompt and count at which ranks the heads have its tokens.

    Args:
        model: the model with its heads.
        tokenizer: of the base model.
        prompts: see `read_prompts`; each turn is asked behind the model's own answer to the one before.
        max_new_tokens: of each text.
        prompt_tokens: of a prompt that is a text to continue, so many tokens at its start are asked.
        template: a file with a Jinja template, "plain", or None: the tokenizer's own, and text as it stands where it
            has none.
        out: a file for the result. Meanwhile a file beside it (`.progress`) has what is counted so far, a prompt a
            line, brought to the disk after each.
        resume: go on behind the last prompt of a stopped run, with the same result, byte for byte; take the result as
            it is if it is there and was made of the same. Without anything to go on from, begin.
        progress: show a progress bar on standard error, if that is a terminal.

    Raises:
        ValueError: bad arguments; a model without heads; progress of a stopped run without `resume`, or of another
            model, other prompts, settings or versions; no text longer than the heads reach.
        OSError: a file that cannot be written.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("prompt_tokens", prompt_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a whole number from 1, got {value!r}")
    if model.heads is None:
        raise ValueError("model: expected one with heads, got one without")
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    if resume and out is None:
        raise ValueError("resume: expected a file (out) to go on from, got none")
    if out is not None:
        check_fresh(Path(out), resume)
    eos = token_list(model.trunk.causal.generation_config.eos_token_id)
    writer = _Writer(
        model, conversation_of(tokenizer, template, eos), AsItStands(tokenizer, eos), eos, max_new_tokens, prompt_tokens
    )
    made = writer.described(prompts)
    file = None if out is None else Path(out)
    if file is not None and resume and file.is_file():
        there = Calibration.load(file)
        if {name: there.made.get(name) for name in made} == made:
            return there
    counted = _Progress(None if file is None else progress_file(file), made)
    with tqdm(total=len(prompts), initial=counted.done, unit="prompt", disable=None if progress else True) as bar:
        for prompt in prompts[counted.done :]:
            counted.add(writer.count(prompt))
            bar.update()
    if not counted.paths:
        reach = model.heads.num_heads + 1
        raise ValueError(
            f"prompts: expected a text of at least {reach} new tokens to one of them (as far as the heads reach), got "
            f"{counted.texts} texts with {counted.tokens} tokens in all, {counted.left_out} turns left out for want of "
            "room in the context"
        )
    made |= {"texts": counted.texts, "tokens": counted.tokens, "left_out": counted.left_out}
    result = Calibration(model.heads.num_heads, min(RANKS, model.heads.num_candidates), dict(counted.paths), made)
    if file is not None:
        result.save(file)
        counted.remove()
    return result


def progress_file(out: Path) -> Path:
    """Return where what is counted so far is kept."""
    return out.with_name(out.name + ".progress")


def check_fresh(out: Path, resume: bool) -> None:
    """Raise `ValueError` where a stopped run has left its progress and nobody has said to go on with it."""
    if progress_file(out).exists() and not resume:
        raise ValueError(
            f"resume: expected True (--resume) to go on from {progress_file(out)}, or no such file, got False"
        )


@dataclass
class _Counted:
    """What one prompt gave."""

    paths: Counter[RankPath] = field(default_factory=Counter)
    texts: int = 0
    tokens: int = 0
    left_out: int = 0


class _Writer:
    """Has the model write texts, and looks the heads' ranks up in them."""

    def __init__(
        self,
        model: MedusaModel,
        chat: Conversation,
        as_it_stands: Conversation,
        eos: list[int],
        max_new_tokens: int,
        prompt_tokens: int,
    ) -> None:
        self._model, self._chat, self._as_it_stands, self._eos = model, chat, as_it_stands, eos
        self._max_new_tokens, self._prompt_tokens = max_new_tokens, prompt_tokens

    def described(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return all that decides what is counted, as JSON has it."""
        model = self._model
        assert model.heads is not None
        digest = hashlib.blake2b(digest_size=8)
        for prompt in prompts:
            # Tokens of what is asked first tell tokenizers and templates apart as well.
            first = self._messages(prompt)[: 1 if prompt.system is None else 2]
            ids = self._ids(prompt, first, [])
            digest.update((json.dumps([ids, prompt.system, prompt.turns, prompt.is_text]) + "\n").encode())
        device = model.trunk.device
        return {
            "heads": fingerprint(model.heads),
            "base_model": fingerprint(model.trunk.causal),
            "prompts": {"count": len(prompts), "hash": digest.hexdigest()},
            "settings": {
                "max_new_tokens": self._max_new_tokens,
                "prompt_tokens": self._prompt_tokens,
                "template": "none" if isinstance(self._chat, AsItStands) else "chat",
                "dtype": str(model.trunk.dtype).removeprefix("torch."),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            },
            "versions": versions("torch", "transformers", "medusa-kernels"),
        }

    def count(self, prompt: Prompt) -> _Counted:
        """Have a prompt's turns answered, each behind the answer to the one before, and count paths in the answers."""
        model, chat, counted = self._model, self._conversation(prompt), _Counted()
        asked = self._messages(prompt)
        messages: list[Message] = [message for message in asked if message["role"] == "system"]
        known: list[int] = []
        turns = asked[len(messages) :]
        for number, question in enumerate(turns):
            messages = [*messages, question]
            ids = self._ids(prompt, messages, known)
            room = model.trunk.context_limit - len(ids)
            if room < 1:
                counted.left_out += len(turns) - number
                break
            new = self._answer(ids, min(self._max_new_tokens, room), chat)
            known = ids + new
            messages = [*messages, {"role": "assistant", "content": chat.answer(new)}]
            counted.texts += 1
            counted.tokens += len(new)
            ranks = own_text_ranks(model, known, len(ids))
            complete = ranks[(ranks != IGNORE).all(1)]
            counted.paths.update(tuple(path) for path in complete.tolist())
        return counted

    def _conversation(self, prompt: Prompt) -> Conversation:
        return self._as_it_stands if prompt.is_text else self._chat

    def _messages(self, prompt: Prompt) -> list[Message]:
        system: list[Message] = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        return system + [{"role": "user", "content": turn} for turn in prompt.turns]

    def _ids(self, prompt: Prompt, messages: Sequence[Message], known: Sequence[int]) -> list[int]:
        ids = self._conversation(prompt).encode(messages, known)
        return ids[: self._prompt_tokens] if prompt.is_text else ids

    def _answer(self, ids: list[int], new_tokens: int, chat: Conversation) -> list[int]:
        ends, stops = chat.ends(self._eos), chat.stop_strings(None)
        more: dict[str, Any] = {"eos_token_id": ends} if ends else {}
        if stops:
            more |= {"stop_strings": stops, "tokenizer": chat.tokenizer}
        output = self._model.generate(torch.tensor([ids]), max_new_tokens=new_tokens, tree=Tree([]), **more)
        assert isinstance(output, MedusaOutput)
        new: list[int] = output.sequences[0, len(ids) :].tolist()
        return new


class _Progress(_Counted):
    """Counts over prompts, and the file that keeps them while they are made.

    The first line says of what they are made, each further one is a prompt's counts. A last line that a kill has left
    half written is cut off.

    Attributes:
        done: prompts counted.
    """

    def __init__(self, path: Path | None, made: Mapping[str, Any]) -> None:
        super().__init__()
        self.done = 0
        self._path = path
        if path is None:
            return
        if path.exists():
            self._read(path, made)
        else:
            write_whole(path, _line(made))

    def add(self, counted: _Counted) -> None:
        """Add a prompt's counts; they are on the disk when this returns."""
        self._include(counted)
        if self._path is not None:
            paths = {name_of(path): counted.paths[path] for path in counted.paths}
            rest = {"texts": counted.texts, "tokens": counted.tokens, "left_out": counted.left_out}
            with self._path.open("ab") as file:
                file.write(_line({"paths": paths} | rest))
                file.flush()
                os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file."""
        if self._path is not None:
            self._path.unlink()

    def _include(self, counted: _Counted) -> None:
        self.paths.update(counted.paths)
        self.texts += counted.texts
        self.tokens += counted.tokens
        self.left_out += counted.left_out
        self.done += 1

    def _read(self, path: Path, made: Mapping[str, Any]) -> None:
        place = 0
        with path.open("rb+") as file:
            for place, line in _whole_lines(file):
                try:
                    found = json.loads(line)
                    if place > 1:
                        paths = Counter({ranks_of(name): count for name, count in found["paths"].items()})
                        self._include(_Counted(paths, found["texts"], found["tokens"], found["left_out"]))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{path}:{place}: expected counts of a prompt, got another line") from error
                if place == 1:
                    _check_same(path, found, made)
        if not place:
            raise ValueError(f"{path}: expected what is counted in its first line, got an empty file")


def _whole_lines(file: Any) -> Iterator[tuple[int, bytes]]:
    end = 0
    for place, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            file.truncate(end)
            return
        end += len(line)
        yield place, line


def _check_same(path: Path, stated: Any, made: Mapping[str, Any]) -> None:
    for name, now in made.items():
        before = stated.get(name) if isinstance(stated, dict) else None
        if before != now:
            raise ValueError(f"{name}: expected {before} like the counts in {path}, got {now}")


def _line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content) + "\n").encode()
