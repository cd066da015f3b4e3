"""Calibrating: the model writes texts to the user's prompts, and the ranks of their tokens with the heads are kept.

Texts are written without the heads, so that they are the model's own in any dtype: greedy, or drawn at a temperature,
as heads are right less often about texts that surprise. This module does not know what the ranks are good for (see
`accuracy`, `walk` and `search`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from medusa_decoding.calibration.texts import Settings, Writer
from medusa_decoding.evaluation.own_text import RANKS, own_text_ranks
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.evaluation.run import PROMPT_TOKENS
from medusa_decoding.files import only_writer, parse_json, write_text
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.calibration import FORMAT, NONE, Calibration, Text, text_name_of, text_of
from medusa_decoding.trees.tree import Tree

RANK_NAMES = {"-", *map(str, range(RANKS))}


def calibrate(
    model: MedusaModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    prompt_tokens: int = PROMPT_TOKENS,
    template: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Calibration:
    """Write a text to each prompt and find at which ranks the heads have its tokens.

    Args:
        model: the model with its heads.
        tokenizer: of the base model.
        prompts: see `read_prompts`; each turn is asked behind the model's own answer to the one before.
        max_new_tokens: of each text.
        prompt_tokens: of a prompt that is a text to continue, so many tokens at its start are asked.
        template: a file with a Jinja template, "plain", or None: the tokenizer's own, and text as it stands where it
            has none.
        temperature: above 0, tokens are drawn at it, for heads that are to serve sampling; 0: greedy texts. All else is
            as the model's own generation config says.
        seed: of drawing.
        out: a file for the result. Meanwhile a file beside it (`.progress`) has what is found so far, a prompt a
            line, brought to the disk after each.
        resume: go on behind the last prompt of a stopped run, with the same result, byte for byte; take the result as
            it is if it is there and was made of the same. Without anything to go on from, begin.
        progress: show a progress bar on standard error, if that is a terminal.

    Raises:
        ValueError: bad arguments; a model without heads, or whose heads reach as far as the texts may or further;
            progress of a stopped run without `resume`; with `resume`, progress or a result of another model, other
            prompts, settings or versions; a file in the result's place that is no calibration; no text that came to be
            longer than the heads reach; an `out` that another process writes.
        OSError: a file that cannot be written.
    """
    settings = Settings(max_new_tokens, prompt_tokens, template, temperature, seed)
    if model.heads is None:
        raise ValueError("model: expected one with heads, got one without")
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    if resume and out is None:
        raise ValueError("resume: expected a file (out) to go on from, got none")
    if out is None:
        return _calibrate(model, tokenizer, prompts, settings, None, resume, progress)
    with only_writer("out", out):
        return _calibrate(model, tokenizer, prompts, settings, Path(out), resume, progress)


def _calibrate(
    model: MedusaModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: Settings,
    file: Path | None,
    resume: bool,
    progress: bool,
) -> Calibration:
    assert model.heads is not None
    there = None if file is None else check_fresh(file, resume)
    heads, ranks = model.heads.num_heads, min(RANKS, model.heads.num_candidates)
    if settings.max_new_tokens <= heads:
        raise ValueError(
            f"max_new_tokens: expected at least {heads + 1}, as texts must go on for as long as {heads} heads reach, "
            f"got {settings.max_new_tokens}"
        )
    writer = _Writer(model, tokenizer, settings)
    made = writer.described(prompts)
    if file is not None and there is not None and resume:
        if not progress_file(file).exists():
            _check_same(file, there.made, made)
        if there.texts is not None and {name: there.made.get(name) for name in made} == made:
            _Progress.forget(progress_file(file), made)
            return there
    found = _Progress(None if file is None else progress_file(file), made, heads)
    with tqdm(total=len(prompts), initial=found.done, unit="prompt", disable=None if progress else True) as bar:
        for number in range(found.done, len(prompts)):
            found.add(writer.count(prompts[number], number))
            bar.update()
    written = [text for texts in found.texts for text in texts]
    tokens = sum(1 + len(text) for text in written)
    if not any(len(text) >= heads for text in written):
        found.remove()  # to go on from here would end here again
        raise ValueError(
            f"prompts: expected a text of at least {heads + 1} new tokens to one of them (as far as the heads reach), "
            f"got {len(written)} texts with {tokens} tokens in all, {found.left_out} turns left out for want of room "
            "in the context"
        )
    made |= {"texts": len(written), "tokens": tokens, "left_out": found.left_out}
    result = Calibration.of(heads, ranks, found.texts, made)
    if file is not None:
        result.save(file)
        found.remove()
    return result


def progress_file(out: Path) -> Path:
    """Return where what is counted so far is kept."""
    return out.with_name(out.name + ".progress")


def check_fresh(out: Path, resume: bool) -> Calibration | None:
    """Refuse a place for a result, as far as that can be known before a model is loaded.

    Returns:
        The calibration that is there, or None.

    Raises:
        ValueError: there is a file that is no calibration; a stopped run has left its progress, and nobody has said to
            go on with it.
    """
    there = None
    if out.is_file():
        try:
            there = Calibration.load(out)
        except ValueError as error:
            raise ValueError(f"out: expected a new file or a calibration to take the place of, got {error}") from error
    if progress_file(out).exists() and not resume:
        raise ValueError(
            f"resume: expected True (--resume) to go on from {progress_file(out)}, or no such file, got False"
        )
    return there


@dataclass
class _Counted:
    """What one prompt gave: its texts, and turns left out."""

    texts: list[Text] = field(default_factory=list)
    left_out: int = 0


class _Writer(Writer):
    """Has the model write texts, and looks the heads' ranks up in them."""

    def count(self, prompt: Prompt, number: int) -> _Counted:
        """Have a prompt's turns answered and find the ranks of the answers' tokens."""
        counted = _Counted()
        for written in self.answers(prompt, number, Tree([])):
            if written is None:
                counted.left_out += 1
                continue
            # Beyond the text's end there is no token to rank (IGNORE, which is negative too).
            ranks = own_text_ranks(self.model, written.prompt + written.new, len(written.prompt)).clamp(min=NONE)
            counted.texts.append(tuple(tuple(path) for path in ranks.tolist()))
        return counted


class _Progress:
    """Texts of prompts, and the file that keeps them while they are made.

    The first line says of what they are made, each further one is a prompt's. A last line that a kill has left half
    written is cut off.

    Attributes:
        texts: of each prompt that is done.
        left_out: turns without room in the context.
    """

    def __init__(self, path: Path | None, made: Mapping[str, Any], num_heads: int) -> None:
        self.texts: list[tuple[Text, ...]] = []
        self.left_out = 0
        self._path, self._num_heads = path, num_heads
        if path is None:
            return
        header = _header(made)
        if path.exists():
            self._read(path, header)
        else:
            write_text(path, _line(header).decode())

    @property
    def done(self) -> int:
        """How many prompts are done."""
        return len(self.texts)

    def add(self, counted: _Counted) -> None:
        """Add a prompt's texts; they are on the disk when this returns."""
        self._include(counted)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(_line({"texts": [*map(text_name_of, counted.texts)], "left_out": counted.left_out}))
                file.flush()
                os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file."""
        if self._path is not None:
            self._path.unlink()

    @staticmethod
    def forget(path: Path, made: Mapping[str, Any]) -> None:
        """Delete what a run has left that was stopped between its result and the end; another run's file stays."""
        if path.is_file():
            with path.open("rb") as file:
                own = file.readline() == _line(_header(made))
            if own:
                path.unlink()

    def _include(self, counted: _Counted) -> None:
        self.texts.append(tuple(counted.texts))
        self.left_out += counted.left_out

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        place = 0
        with path.open("rb+") as file:
            for place, line in _whole_lines(file):
                try:
                    found = parse_json(line, f"{path}:{place}")
                    if place > 1:
                        self._include(_counted_in(found, self._num_heads))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{path}:{place}: expected a prompt's texts, got another line ({error!s:.200}); remove this "
                        "line and those after it to go on from there"
                    ) from error
                if place == 1:
                    _check_same(path, found, header)
        if not place:
            raise ValueError(f"{path}: expected what is counted in its first line, got an empty file")


def _counted_in(found: Any, num_heads: int) -> _Counted:
    """Return what a line of the file says."""
    names, left_out = found["texts"], found["left_out"]
    if not isinstance(names, list) or type(left_out) is not int or left_out < 0:
        raise ValueError("expected a list of texts and a count of turns left out")
    if not all(isinstance(name, str) and set(name) <= RANK_NAMES for name in names):
        raise ValueError("expected ranks, a character each")
    return _Counted([text_of(name, num_heads) for name in names], left_out)


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


def _header(made: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, **made}


def _line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content) + "\n").encode()
