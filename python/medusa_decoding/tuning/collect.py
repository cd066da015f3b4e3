"""Calibrate heads: the model answers the user's prompts, and its tokens are ranked among the heads' candidates.

The texts are written without the heads, so that they are the model's own in any dtype: greedy, or sampled at a
temperature, because heads are right about sampled texts at another rate. They rank candidates for a sampled text with
the random numbers that it was drawn with, as in decoding. This module does not know what the ranks are for (see
`calibration`, `replay` and `search`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_decoding.checks import check_count
from medusa_decoding.evaluation.own_text import RANKS, own_text_ranks
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.files import only_writer
from medusa_decoding.files.resumable import ResumableFile, check_new, remove, stated
from medusa_decoding.model import MedusaModel
from medusa_decoding.options import PROMPT_TOKENS, SLOTS
from medusa_decoding.progress import Progress
from medusa_decoding.tuning.calibration import NONE, Calibration, Text, text_name_of, text_of
from medusa_decoding.tuning.texts import Settings, Writer, Written


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
    slots: int = SLOTS,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Calibration:
    """Write a text for each prompt and find the ranks of its tokens among the heads' candidates.

    Args:
        model: the model with its heads.
        tokenizer: of the base model.
        prompts: see `read_prompts`; every turn follows the model's own answer to the previous one.
        max_new_tokens: per text.
        prompt_tokens: if a prompt is a text to continue, only this many of its first tokens are used.
        template: a file with a Jinja template, "plain", or None: the tokenizer's own, or no template if it has none.
        temperature: above 0, tokens are sampled at it, for heads that are to serve sampling; 0: greedy texts. The rest
            is as in the model's own generation config.
        seed: of sampling.
        slots: how many texts are written at once.
        out: a file for the result. Until it is complete, a file next to it (`.progress`) has one line per prompt, each
            of them on the disk as soon as the prompt's last answer has ended.
        resume: continue a stopped run with the prompts that are left. In float32 the result is the same, byte for byte;
            in 16 bits, rounding depends on the texts that run at once. Return an existing result if it was made of the
            same. Start from the beginning if there is nothing to continue.
        progress: show a progress bar on standard error, if that is a terminal.

    Raises:
        ValueError: bad arguments; a model without heads, or texts no longer than its heads reach; progress of a stopped
            run without `resume`; with `resume`, progress or a result of another model, other prompts, settings or
            versions; an `out` that is another kind of file or that another process writes; only texts that are shorter
            than the heads reach; a model that the engine does not serve.
        MemoryError: the cache for `slots` texts does not fit; says what would.
        OSError: a file that cannot be written.
    """
    settings = Settings(max_new_tokens, prompt_tokens, template, temperature, seed)
    if model.heads is None:
        raise ValueError("model: expected one with heads, got one without")
    if not prompts:
        raise ValueError("prompts: give at least one")
    if resume and out is None:
        raise ValueError("resume needs out, the file to continue")
    heads, ranks = model.heads.num_heads, min(RANKS, model.heads.num_candidates)
    if max_new_tokens <= heads:
        raise ValueError(
            f"max_new_tokens: expected at least {heads + 1}, as texts must go on for as long as {heads} heads reach, "
            f"got {max_new_tokens}"
        )
    file = None if out is None else Path(out)
    with contextlib.nullcontext() if file is None else only_writer("out", file):
        existing = None if file is None else check_fresh(file, resume)
        writer = Writer(model, tokenizer, settings, slots)
        made = writer.describe(prompts)
        if file is not None and existing is not None and resume and stated(progress_file(file)) is None:
            for name, now in made.items():
                if existing.made.get(name) != now:
                    before = existing.made.get(name)
                    raise ValueError(f"{name}: expected {before} like the counts in {file}, got {now}")
            return existing
        kept = None
        if file is not None:
            kept = ResumableFile(progress_file(file), made, resume, lambda line: _parse(line, heads), name="out")
        done: dict[int, tuple[list[Text], int]] = {} if kept is None else dict(kept.earlier)
        left = [(number, prompt) for number, prompt in enumerate(prompts) if number not in done]
        answers = contextlib.closing(writer.answers(left))
        with answers as answered, Progress(len(prompts), "prompt", initial=len(done), shown=progress) as bar:
            for one in answered:
                texts = [rank(writer, written) for written in one.written]
                if kept is not None:
                    names = [*map(text_name_of, texts)]
                    kept.write([{"number": one.number, "texts": names, "left_out": one.left_out}])
                done[one.number] = texts, one.left_out
                bar.update()
        by_prompt = [done[number][0] for number in range(len(prompts))]
        left_out = sum(turns for _, turns in done.values())
        written = [text for texts in by_prompt for text in texts]
        tokens = sum(1 + len(text) for text in written)
        if not any(len(text) >= heads for text in written):
            if file is not None:
                remove(progress_file(file))  # a resumed run would fail here again
            raise ValueError(
                f"prompts: expected a text of at least {heads + 1} new tokens to one of them (as far as the heads "
                f"reach), got {len(written)} texts with {tokens} tokens in all, {left_out} turns left out for "
                "want of room in the context"
            )
        made |= {"texts": len(written), "tokens": tokens, "left_out": left_out}
        result = Calibration(heads, ranks, by_prompt, made)
        if file is not None:
            result.save(file)
            remove(progress_file(file))
        return result


def rank(writer: Writer, written: Written) -> Text:
    """Return the ranks of an answer's tokens."""
    model = writer.model
    with model.backbone.lock.held(model.backbone.device):  # other answers run meanwhile
        ranks = own_text_ranks(
            model, written.prompt + written.new, len(written.prompt),
            temperature=writer.settings.temperature, seed=written.seed,
        )  # fmt: skip
    # There is no token to rank after the text's end (IGNORE, which is negative too).
    return tuple(map(tuple, ranks.clamp(min=NONE).tolist()))


def progress_file(out: Path) -> Path:
    """Return the file with the progress of a run that writes to `out`."""
    return out.with_name(out.name + ".progress")


def check_fresh(out: Path, resume: bool) -> Calibration | None:
    """Check the place for a result, as far as that is possible before a model is loaded.

    Returns:
        The calibration that is there, or None.
    """
    existing = None
    if out.is_file():
        try:
            existing = Calibration.load(out)
        except ValueError as error:
            raise ValueError(f"out: expected a new file or a calibration to take the place of, got {error}") from error
    if not resume:
        check_new(progress_file(out), "out")
    return existing


def _parse(values: Any, num_heads: int) -> tuple[int, tuple[list[Text], int]]:
    number, names, left_out = values["number"], values["texts"], values["left_out"]
    texts = [text_of(name, num_heads) for name in names]
    return check_count("number", number, 0), (texts, check_count("left_out", left_out, 0))
