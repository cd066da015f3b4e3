"""Run `medusa chat`: see `cli.parsers.chat` for its arguments."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.chat.streaming import CONTROLS
from medusa_decoding.chat.template import ChatTemplate, Message
from medusa_decoding.checks import check_text, shown, token_list
from medusa_decoding.cli import _arguments, _display, _figures
from medusa_decoding.cli._terminal import LEAVE, Breaker, messages
from medusa_decoding.files import read_json, write_text
from medusa_decoding.generation.metrics import GenerationMetrics
from medusa_decoding.generation.session import Session
from medusa_decoding.model import MedusaModel, MedusaOutput

SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": _arguments.temperature,
    "top_p": _arguments.share,
    "top_k": _arguments.at_least_zero,
    "max_new_tokens": _arguments.at_least_one,
    "seed": _arguments.at_least_zero,
}


def run(args: argparse.Namespace) -> int:
    """Load the model, then chat until the input ends."""
    _arguments.resolve_device(args)
    _arguments.sampling(args)
    history = load(args.load) if args.load else []
    if args.system is not None:
        history = [{"role": "system", "content": args.system}, *_exchanges(history)]
    if args.save is not None and (args.save.is_dir() or not args.save.absolute().parent.is_dir()):
        raise ValueError(f"--save: expected a file in a folder that exists, got {args.save}")
    template = ChatTemplate(_arguments.load_tokenizer(args), args.template)
    with _arguments.load_model(args) as model:
        return Chat(model, template, args, history).talk()


class Chat:
    """A conversation that starts with a history; /set changes a copy of the command's arguments."""

    def __init__(
        self, model: MedusaModel, template: ChatTemplate, args: argparse.Namespace, history: list[Message]
    ) -> None:
        self.model, self.template, self.args, self.history = model, template, copy.copy(args), history
        self.session = Session()
        self.known: list[int] = []
        self.answers: list[tuple[GenerationMetrics, int]] = []
        self.unsent: str | None = None
        self.failed = self.left = False
        self.eos = template.ends(token_list(model.backbone.causal_lm.generation_config.eos_token_id))
        self.terminal = sys.stdin.isatty()
        # With --json, standard output contains only answers.
        self.out = sys.stderr if args.json else sys.stdout
        self.console = None if args.json else _display.terminal()

    def talk(self) -> int:
        """Handle line after line; return the exit code."""
        if self.terminal:
            self._say(f"/help lists commands; {LEAVE}")
            if self.console is not None:
                self.console.print(_display.legend(_display.COLOURS))
        for text in messages(self.terminal):
            saved = self.history
            try:
                self.handle(text)
                if self.args.save is not None and self.history is not saved:
                    self.save(str(self.args.save))
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                self._note("interrupted: the message was dropped and the history is unchanged (/retry sends it again)")
            except BrokenPipeError:  # nobody reads the answers
                raise
            except (ValueError, OSError, MemoryError, FloatingPointError, torch.OutOfMemoryError) as error:
                self.failed = True
                self._note(" ".join(str(error).split()) or type(error).__name__)
            if self.left:
                break
        return 2 if self.failed and not self.terminal else 0

    def handle(self, text: str) -> None:
        """Run a command or answer a message."""
        if text.startswith("/") and not text.startswith("//"):
            word, *rest = text.split(maxsplit=1)
            if word not in COMMANDS:
                raise ValueError(f"{word}: expected a command, see /help (//.. sends a message that begins with /)")
            COMMANDS[word][0](self, "".join(rest).strip())
        else:
            self.answer(text.removeprefix("/"))

    def answer(self, text: str) -> None:
        """Answer a message, and only then add both to the history."""
        self.unsent = text
        asked = [*self.history, {"role": "user", "content": text}]
        prompt = self.template.encode(asked, self.known)
        limit = self.model.backbone.context_limit
        room = limit - len(prompt)
        if room < 1:
            raise ValueError(
                f"context: expected fewer than {limit} tokens, got {len(prompt)} with this message, which was "
                "not sent (drop the last exchange with /undo or all with /clear, then send it again with /retry)"
            )
        with Breaker() as breaker:
            output = self.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=min(self.args.max_new_tokens, room),
                eos_token_id=self.eos or None,
                stop_strings=self.template.stop_strings(self.args.stop),
                tokenizer=self.template.tokenizer,
                streamer=None if self.args.json else _display.streamer(self.template, self.console),
                stopping_criteria=[breaker],
                session=self.session,
                metrics=True,
                **self._sampling(),
            )
        assert isinstance(output, MedusaOutput)
        assert output.metrics is not None
        self.known = output.sequences[0].tolist()
        new = self.known[len(prompt) :]
        answer: Message = {"role": "assistant", "content": self.template.answer(new)}
        ended = self._ended(new, room, breaker)
        if ended == "interrupted":
            answer["interrupted"] = True
        self.history, self.unsent = [*asked, answer], None
        self.answers.append((output.metrics, self.session.reused))
        self._report(answer["content"], ended)

    def _sampling(self) -> dict[str, Any]:
        """Return the sampling arguments; each answer of a chat has its own seed."""
        args = copy.copy(self.args)
        if not _arguments.samples(args):  # /set may have made it greedy, and greedy decoding takes none of these
            for name in _arguments.SAMPLING_ONLY:
                setattr(args, name, None)
        given = _arguments.sampling(args)
        if "seed" in given:
            given["seed"] += len(_exchanges(self.history)) // 2
        return given

    def _ended(self, new: list[int], room: int, breaker: Breaker) -> str:
        """Return what ended an answer."""
        if new[-1] in self.eos:
            return "eos"
        if breaker.stopped:
            return "interrupted"
        if len(new) == room:
            return "context"
        return "max_new_tokens" if len(new) == self.args.max_new_tokens else "stop"

    def _report(self, text: str, ended: str) -> None:
        """Print an answer as JSON; or its figures on a terminal, and a note if it did not end by itself."""
        metrics, reused = self.answers[-1]
        if self.console is not None:
            self.console.print(_display.summary(metrics), style="dim", soft_wrap=True, markup=False)
        if self.args.json:
            print(json.dumps({"text": text, "ended": ended, "metrics": _figures.as_json(metrics, reused)}), flush=True)
        elif ended == "interrupted":
            self._note("interrupted: the answer is kept as far as it got")
        elif ended == "context":
            self._note(
                "context: the answer stops here because the model's context is full (/undo and /clear make room)"
            )
        elif ended == "max_new_tokens":
            self._note(f"max_new_tokens: the answer stops here, after {self.args.max_new_tokens} tokens (see /set)")

    def help(self, rest: str) -> None:
        """Print the commands."""
        for word, (_, argument, words) in COMMANDS.items():
            self._say(f"{word + ' ' + argument:18} {words}")
        self._say("A backslash at the end of a line continues it on the next; //.. sends a message that begins with /.")

    def stats(self, rest: str) -> None:
        """Print figures of the last answer and of all answers."""
        if not self.answers:
            raise ValueError("/stats: there is no answer yet")
        metrics, reused = self.answers[-1]
        everything = _figures.total([one for one, _ in self.answers])
        self._say(f"last answer:\n{_figures.as_text(metrics, reused)}")
        self._say(f"all {len(self.answers)}:\n{_figures.as_text(everything, sum(n for _, n in self.answers))}")

    def show(self, rest: str) -> None:
        """Print the history."""
        for message in self.history:
            mark = " [interrupted]" if message.get("interrupted") else ""
            content = message["content"]
            self._say(f"{message['role']}: {content.translate(CONTROLS) if self.out.isatty() else content}{mark}")

    def undo(self, rest: str) -> None:
        """Drop the last exchange."""
        if not _exchanges(self.history):
            raise ValueError("/undo: expected an exchange to drop, got an empty history")
        self.history = self.history[:-2]

    def clear(self, rest: str) -> None:
        """Drop all exchanges; the system message stays."""
        self.history = self.history[: len(self.history) - len(_exchanges(self.history))]
        self.session.clear()
        self.known = []

    def retry(self, rest: str) -> None:
        """Send the last unanswered message again."""
        if self.unsent is None:
            raise ValueError("/retry: every message is answered")
        self.answer(self.unsent)

    def save(self, rest: str) -> None:
        """Write the history to a file, atomically."""
        if not rest:
            raise ValueError("/save: name a file")
        write_text(rest, json.dumps({"messages": self.history}, indent=1, ensure_ascii=False) + "\n")

    def system(self, rest: str) -> None:
        """Set or drop the system message."""
        history = [*([{"role": "system", "content": rest}] if rest else []), *_exchanges(self.history)]
        self.template.render([*history, {"role": "user", "content": "?"}])
        self.history = history

    def set(self, rest: str) -> None:
        """Change a setting."""
        name, _, text = rest.partition(" ")
        if name not in SETTINGS or not text:
            now = ", ".join(f"{name} {getattr(self.args, name)}" for name in SETTINGS)
            raise ValueError(f"/set: expected a name and a value, got {rest!r}; now: {now}")
        try:
            value = SETTINGS[name](text.strip())
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ValueError(f"/set {name}: {error}") from error
        changed = copy.copy(self.args)
        setattr(changed, name, value)
        if name == "temperature" and value == 0:
            changed.do_sample = False
        self.args = changed

    def leave(self, rest: str) -> None:
        """Leave after this line."""
        self.left = True

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def _note(self, text: str) -> None:
        print(f"medusa: {text}", file=sys.stderr, flush=True)


COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str, str]] = {
    "/help": (Chat.help, "", "this list"),
    "/stats": (Chat.stats, "", "tokens per step, tokens per second, tokens reused from the cache"),
    "/history": (Chat.show, "", "print the history"),
    "/undo": (Chat.undo, "", "drop the last message and its answer"),
    "/clear": (Chat.clear, "", "drop all messages but the system message"),
    "/retry": (Chat.retry, "", "send the last unanswered message again"),
    "/save": (Chat.save, "FILE", "write the history as JSON, for --load"),
    "/system": (Chat.system, "TEXT", "change the system message; without TEXT, drop it"),
    "/set": (Chat.set, "NAME VALUE", f"change one of {', '.join(SETTINGS)}"),
    "/exit": (Chat.leave, "", "leave, as does Ctrl-D"),
}


def load(path: Path) -> list[Message]:
    """Read a history: `{"messages": [{"role": .., "content": ..}, ..]}`, or only the list."""
    try:
        data = read_json(path)
    except ValueError as error:
        raise ValueError(f"--load: {error}") from error
    listed = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(listed, list):
        raise ValueError(f"--load: expected a list of messages in {path}, got {type(listed).__name__}")
    for place, message in enumerate(listed):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            got = shown(message)
            raise ValueError(f"--load: expected a role and a text in message {place} of {path}, got {got}")
        check_text(f"--load: message {place} of {path}", message["content"])
    roles = [message.get("role") for message in listed]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if spoken != ["user", "assistant"] * (len(spoken) // 2):
        got = shown(roles)
        raise ValueError(
            f"--load: expected an optional system message, then user and assistant in turn in {path}, got {got}"
        )
    return [{key: message[key] for key in ("role", "content", "interrupted") if key in message} for message in listed]


def _exchanges(history: list[Message]) -> list[Message]:
    """Return a history without its system message."""
    return history[1:] if history and history[0]["role"] == "system" else history
