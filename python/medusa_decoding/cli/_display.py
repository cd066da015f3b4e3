"""Show on a terminal what each step accepted: text in colours, and a race of recorded generations.

Without a terminal, or where NO_COLOR or TERM=dumb ask for plain text, `terminal` returns None and commands print as
they do into a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segments
from rich.table import Table
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from medusa_decoding.chat.streaming import CONTROLS, AnswerStreamer, AnswerText
from medusa_decoding.chat.template import PromptEncoder
from medusa_decoding.generation.metrics import GenerationMetrics

COLOURS = "cyan", "magenta"
"""Styles of accepted draft tokens in streamed text, taken in turn by the steps."""
CHIPS = "#ffffff on #0b5a7a", "#ffffff on #6a2c75"
"""The same in panels. Not in streamed text: a terminal that wraps it fills the rest of the line with the background."""

FRAMES = 20
"""Pictures per second of a replay."""
REPLAY = 4.0
"""Seconds that a slowed replay takes."""
PAUSE = 1.0
"""Seconds between two replays."""
PANEL = 36
"""Columns that a panel next to others needs."""
WIDEST = 160
"""Columns that are used of a wider terminal."""


def terminal() -> Console | None:
    """Return standard output as a terminal with colours; None if it is none, or is to have plain text."""
    if not sys.stdout.isatty():
        return None
    console = Console(highlight=False)
    plain = console.no_color or console.color_system is None or console.is_dumb_terminal or console.options.ascii_only
    return None if plain else console


def step_text(steps: Sequence[Sequence[str]], styles: Sequence[str], first: int = 0) -> Text:
    """Return the text of steps from number `first` on.

    A step is a list of its tokens' texts, of which the last is the model's own token and remains without colour.
    """
    text = Text()
    for number, (*drafted, own) in enumerate(steps, first):
        text.append("".join(drafted).translate(CONTROLS), styles[number % len(styles)])
        text.append(own.translate(CONTROLS))
    return text


def legend(styles: Sequence[str]) -> Text:
    """Return what the colours mean."""
    first, second = styles
    text = ("draft tokens", first), " that ", ("a step", second), " accepted. Uncoloured: the model's own token."
    return Text.assemble("Coloured: ", *text)


def streamer(encoder: PromptEncoder, console: Console | None) -> AnswerStreamer:
    """Return what prints an answer, with colours on a terminal."""
    return encoder.streamer() if console is None else ColourStreamer(encoder.tokenizer, encoder.stop, console)


class ColourStreamer(AnswerStreamer):
    """Prints an answer step by step in the colours of `step_text`, otherwise as its base class does."""

    def __init__(self, tokenizer: Any, stop: str | None, console: Console) -> None:
        super().__init__(tokenizer, stop)
        self.console = console
        self._pieces: list[str] = []
        self._steps = 0

    def show(self, text: str) -> None:
        """Keep a token's text until its step ends."""
        self._pieces.append(text)

    def end_step(self) -> None:
        """Print the step."""
        write(self.console, step_text([self._pieces], COLOURS, self._steps))
        self._pieces = []
        self._steps += 1

    def end(self) -> None:
        """Print the rest and a line break."""
        super().end()
        if self._pieces:
            self.end_step()


def write(console: Console, text: Text) -> None:
    """Write styled text and nothing else: no line break, wrapping or expanded tabs, which are up to the terminal."""
    console.print(Segments(text.render(console)), end="", crop=False)


def summary(metrics: GenerationMetrics) -> str:
    """Return the figures of one generation in one line."""
    accepted = sum(length * steps for length, steps in metrics.accepted_histogram.items())
    drafted = sum((nodes - 1) * steps for nodes, steps in metrics.tree_nodes.items())
    share = f", {accepted / drafted:.0%} of {drafted} draft tokens accepted" if drafted else ""
    steps = f"{metrics.tokens_per_step:.2f} per step, " if metrics.steps else ""
    return f"[{metrics.new_tokens} tokens: {steps}{metrics.tokens_per_second:.1f}/s{share}]"


@dataclass(frozen=True)
class Run:
    """A recorded generation.

    Attributes:
        label: what generated.
        steps: the texts of the tokens of each step, the prefill first.
        ends: seconds from the start of the generation to the end of each step.
    """

    label: str
    steps: list[list[str]]
    ends: list[float]

    @property
    def seconds(self) -> float:
        """How long the generation took."""
        return self.ends[-1]

    @property
    def tokens(self) -> int:
        """How many tokens it wrote."""
        return sum(map(len, self.steps))


def record(label: str, generate: Callable[..., object], tokenizer: Any, *, tells_steps: bool = True) -> Run:
    """Call `generate(streamer=..)` and return what it wrote when; transformers does not tell its streamer of steps."""
    recorder = _Recorder(tells_steps)
    generate(streamer=recorder)
    answer = AnswerText(tokenizer)
    steps = [[answer.add(token) for token in tokens] for tokens in recorder.steps]
    steps[-1][-1] += answer.end()
    return Run(label, steps, recorder.ends)


class _Recorder(BaseStreamer):
    """Records the tokens of each step and the time at its end, since the recorder was made.

    If `told` is false, each token counts as a step.
    """

    def __init__(self, told: bool) -> None:
        self._told = told
        self.steps: list[list[int]] = []
        self.ends: list[float] = []
        self._tokens: list[int] | None = None
        self._start = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self._tokens is None:  # the prompt
            self._tokens = []
        else:
            self._tokens.append(int(value))
            if not self._told:
                self.end_step()

    def end_step(self) -> None:
        assert self._tokens is not None
        self.ends.append(time.perf_counter() - self._start)
        self.steps.append(self._tokens)
        self._tokens = []

    def end(self) -> None:
        pass


class Race:
    """Recorded generations of one prompt next to each other, or below each other on a narrow terminal.

    Args:
        console: where they are shown.
        runs: the generations.
        prompt: the text before them.

    Attributes:
        slower: how many times slower than they ran a replay lasts `REPLAY` seconds; 1 if they took as long.
    """

    def __init__(self, console: Console, runs: Sequence[Run], prompt: str = "") -> None:
        self.console, self.runs, self.prompt = console, runs, prompt
        self.seconds = max(run.seconds for run in runs)
        self.slower = max(1, round(REPLAY / self.seconds))
        width = min(console.width, WIDEST)
        self.beside = width >= PANEL * len(runs)
        self.width = width // len(runs) if self.beside else width
        longest = max(len(self._lines(run, run.seconds)) for run in runs)
        head = len(legend(CHIPS).wrap(console, console.width)) + 2  # an empty line and the time
        height = console.height - head - 1  # the cursor's line
        if not self.beside:
            height //= len(runs)
        self.rows = max(1, min(longest, height - 3))  # a panel also has a bar and two borders

    def play(self) -> None:
        """Replay the generations at their own speed and then slower; the last picture stays on the terminal."""
        with Live(console=self.console, auto_refresh=False) as live:
            for slower in dict.fromkeys((1, self.slower)):
                if slower > 1:
                    time.sleep(PAUSE)
                start, now = time.perf_counter(), 0.0
                while now < self.seconds:
                    live.update(self.picture(now, slower), refresh=True)
                    time.sleep(1 / FRAMES)
                    now = (time.perf_counter() - start) / slower
                live.update(self.picture(self.seconds, slower), refresh=True)

    def picture(self, seconds: float, slower: int = 1) -> RenderableType:
        """Return what had been written some seconds after the start, and say how many times slower it is replayed."""
        speed = "at its own speed" if slower == 1 else f"{slower} times slower"
        heading = Text(f"{seconds:.2f} s, replayed {speed}", "dim", no_wrap=True, overflow="ellipsis")
        panels: list[RenderableType] = [self._panel(run, seconds) for run in self.runs]
        if self.beside:
            row = Table.grid()
            row.add_row(*panels)
            panels = [row]
        return Group(legend(CHIPS), "", heading, *panels)

    def _panel(self, run: Run, seconds: float) -> Panel:
        done = seconds >= run.seconds
        begun = _until(run, seconds)
        tokens, steps = sum(map(len, begun)), len(begun) - 1  # the prefill is not a step
        figures = f"{tokens} tokens"
        if steps > 0:
            figures += f", {(tokens - 1) / steps:.2f} per step, {tokens / min(seconds, run.seconds):.0f}/s"
        lines = self._lines(run, seconds)[-self.rows :]
        text = Text("\n", no_wrap=True).join([*lines, *[Text()] * (self.rows - len(lines))])
        return Panel(
            Group(text, ProgressBar(run.tokens, tokens, complete_style="cyan", finished_style="cyan")),
            title=f"{run.label}: {run.seconds:.2f} s" if done else run.label,
            subtitle=figures,
            border_style="green" if done else "default",
            width=self.width,
        )

    def _lines(self, run: Run, seconds: float) -> list[Text]:
        text = Text.assemble((self.prompt.translate(CONTROLS), "dim"), step_text(_until(run, seconds), CHIPS))
        return list(text.wrap(self.console, self.width - 4, tab_size=8))


def _until(run: Run, seconds: float) -> list[list[str]]:
    return [step for step, end in zip(run.steps, run.ends, strict=True) if end <= seconds]
