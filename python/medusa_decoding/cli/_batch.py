"""Run `medusa generate --prompts`: many prompts at once through the scheduler of `medusa serve`, into a file.

Every answer is what `medusa generate` writes for its prompt alone. A line is written as soon as its answer ends, so
lines are in the order in which answers end; `index` counts the prompts in the order of the input, from 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from medusa_decoding.chat.streaming import AnswerText
from medusa_decoding.chat.template import ChatTemplate, PromptEncoder
from medusa_decoding.checkpoints.tuning_paths import check_writable
from medusa_decoding.checks import check_count, token_list
from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation.prompts import Prompt, read_prompts
from medusa_decoding.files import only_writer
from medusa_decoding.files.resumable import ResumableFile, check_new
from medusa_decoding.model import MedusaModel
from medusa_decoding.options import SLOTS
from medusa_decoding.progress import Progress
from medusa_decoding.provenance import fingerprint
from medusa_decoding.serving.answers import Answer, Answers
from medusa_decoding.serving.rows import own_stop_strings


class Batch:
    """Generates answers to prompts, several at once; `ids` are the prompts' tokens, all by index.

    Attributes:
        common: settings of all prompts, as `Answers` takes them; without the seed, to which each prompt adds its index.
        context: the most tokens of a prompt and its answer.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: MedusaModel,
        encoder: PromptEncoder,
        prompts: Mapping[int, Prompt],
        ids: Mapping[int, list[int]],
    ) -> None:
        self.args, self.model, self.encoder, self.prompts, self.ids = args, model, encoder, prompts, ids
        self._sampling = _arguments.sampling(args)
        self._seed = self._sampling.pop("seed", 0) if _arguments.samples(args) else None
        ends = encoder.ends(token_list(model.backbone.causal_lm.generation_config.eos_token_id))
        self.common = {"ends": ends, "max_new_tokens": args.max_new_tokens, **self._sampling}
        self._stops = encoder.stop_strings(args.stop or own_stop_strings(model))
        limit, new = model.backbone.context_limit, args.max_new_tokens
        for index, tokens in ids.items():
            if not 1 <= len(tokens) <= limit - new:
                raise ValueError(
                    f"--prompts: expected 1 to {limit - new} tokens (the context of {limit} less --max-new-tokens "
                    f"{new}) in {prompts[index].where}, got {len(tokens)}"
                )
        self.context = max(map(len, ids.values()), default=0) + new

    def depends_on(self) -> dict[str, Any]:
        """Return what the answers depend on; lossless ones do not depend on heads, trees and --slots."""
        args, causal, heads = self.args, self.model.backbone.causal_lm, self.model.heads
        typical = args.acceptance == "typical"
        decoding = causal.generation_config.to_diff_dict()
        return {
            "model": fingerprint(causal),
            "prompts": hashlib.blake2b(json.dumps(list(self.ids.values())).encode(), digest_size=8).hexdigest(),
            "chat": args.chat,
            "max_new_tokens": args.max_new_tokens,
            "stop": args.stop,
            "seed": self._seed,
            "sampling": self._sampling,
            "heads": fingerprint(heads) if typical and heads is not None else None,
            "tree": repr(self.model.tree) if typical else None,
            **self.model.lossy_dtypes,
            "decoding": {name: value for name, value in decoding.items() if name != "transformers_version"},
        }

    def answers(self, done: set[int]) -> Iterator[Answer]:
        """Yield the answer to each prompt whose index, its `asked`, is not in `done`, when it ends."""
        left = [index for index in self.prompts if index not in done]
        if left:
            slots = min(self.args.slots or SLOTS, len(left))
            with Answers(self.model, slots, self.context, **self.common) as answers:
                yield from self.each(answers, left)

    def each(self, answers: Answers, indices: Iterable[int]) -> Iterator[Answer]:
        """Yield the answer to each of these prompts when it ends, from `answers` that are running."""

        def ask(index: int) -> None:
            seed = {} if self._seed is None else {"seed": self._seed + index}
            answer = Answer(index, self.prompts[index].where, AnswerText(self.encoder.tokenizer, self._stops))
            answers.ask(answer, self.ids[index], **seed)

        yield from answers.each(iter(indices), ask)

    def line(self, answer: Answer) -> dict[str, Any]:
        """Return the line of an answer that has ended."""
        return {
            "index": answer.asked,
            "prompt": self.prompts[answer.asked].turns[0],
            "response": self.encoder.answer(answer.tokens),
            "finish": answer.finish,
            "prompt_tokens": len(self.ids[answer.asked]),
            "new_tokens": len(answer.tokens),
            "steps": len(answer.accepted),
            "source": answer.where,
        }


def run(args: argparse.Namespace) -> int:
    """Read, load, generate, print the figures."""
    if args.out is None:
        raise ValueError("--prompts needs --out")
    check_writable("--out", args.out)
    if not args.resume:
        check_new(args.out, "--out")
    for source in args.prompts:
        if Path(source).expanduser().resolve() in args.out.expanduser().resolve().parents:
            raise ValueError(f"--out: expected a file outside the folder of prompts {source}, got {args.out}")
    prompts = read_prompts(args.prompts, turns=1)
    check(args, prompts)
    _arguments.resolve_device(args)
    encoder = load_encoder(args)
    ids = [encoder.encode(prompt.messages, tools=prompt.tools) for prompt in prompts]
    with only_writer("--out", args.out), _arguments.load_model(args) as model:
        batch = Batch(args, model, encoder, dict(enumerate(prompts)), dict(enumerate(ids)))
        file = ResumableFile(args.out, batch.depends_on(), args.resume, _index, name="--out")
        done = set(file.earlier)
        try:
            figures = _write(batch, file, done)
        except KeyboardInterrupt:
            print(f"medusa: what was generated is in {args.out}; --resume continues from there", file=sys.stderr)
            raise
    if args.json:
        print(json.dumps({"prompts": len(prompts), "earlier": len(done), "out": str(args.out), **figures}))
    return 0


def check(args: argparse.Namespace, prompts: Iterable[Prompt]) -> None:
    """Raise `ValueError` for options that do not go together, or a prompt that needs `--chat` without it."""
    for name, given in (("--tensor-parallel", args.tensor_parallel), ("--metrics", args.metrics)):
        if given:
            raise ValueError(f"{name}: expected it without --prompts, got both")
    if args.template is not None and not args.chat:
        raise ValueError("--template needs --chat")
    if not all(args.stop or ()):
        raise ValueError("--stop: give some text")
    for prompt in prompts:
        if (prompt.system is not None or prompt.tools) and not args.chat:
            what = "tools" if prompt.system is None else "a system message"
            raise ValueError(f"--prompts: expected --chat with {what}, got {prompt.where} without --chat")


def load_encoder(args: argparse.Namespace) -> PromptEncoder:
    """Load what encodes prompts: with `--chat` the chat template."""
    tokenizer = _arguments.load_tokenizer(args)
    return ChatTemplate(tokenizer, args.template) if args.chat else PromptEncoder(tokenizer)


def _index(line: Any) -> int:
    return check_count("index", line["index"], 0)


def _write(batch: Batch, file: ResumableFile, done: set[int]) -> dict[str, Any]:
    """Write each answer when it ends; return figures of this run. Steps are counted for each answer alone."""
    total, began = len(batch.prompts), time.perf_counter()
    tokens = steps = accepted = 0
    finished: Counter[str] = Counter()

    def figures() -> dict[str, Any]:
        seconds = time.perf_counter() - began
        return {
            "new_tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tokens_per_step": 1 + accepted / steps if steps else None,
            "finished": finished,
        }

    with Progress(total, "prompt", initial=len(done)) as bar:
        for answer in batch.answers(done):
            file.write([batch.line(answer)])
            tokens += len(answer.tokens)
            steps += len(answer.accepted)
            accepted += sum(answer.accepted)
            finished[str(answer.finish)] += 1
            found = figures()
            per_step = "" if found["tokens_per_step"] is None else f", {found['tokens_per_step']:.2f} per step"
            bar.set_postfix_str(f"{found['tokens_per_second']:.0f} tokens/s{per_step}", refresh=False)
            bar.update()
    return figures()
