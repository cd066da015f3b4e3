"""The answers to one request while the engine writes them: text, tool calls and log-probabilities per step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Receive

from medusa_decoding.chat.streaming import AnswerText
from medusa_decoding.chat.template import ANCHOR
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.http.errors import ApiError, as_api_error, bad_request, shutting_down
from medusa_decoding.serving.http.metrics import Metrics
from medusa_decoding.serving.http.plan import Plan
from medusa_decoding.serving.http.token_text import TokenBytes
from medusa_decoding.serving.http.tools import Call, ToolText
from medusa_decoding.serving.ticket import Delta, Ticket, TokenLogprobs


class ClientGoneError(Exception):
    """The client has closed its connection: nobody waits for the answers."""


@dataclass(frozen=True)
class ShownToken:
    """A token of an answer's text, with its log-probability and the place where its text begins.

    An echoed prompt's first token has no log-probability.
    """

    token: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(frozen=True)
class Part:
    """What one step has added to one choice; its text may be held back.

    `ids` are the step's tokens, with an end token and the one that completes a stop string.
    """

    index: int
    step: int
    ids: list[int]
    text: str
    calls: list[Call]
    shown: list[ShownToken]
    finish: str | None

    @property
    def tokens(self) -> int:
        """How many tokens the step has added."""
        return len(self.ids)


@dataclass
class Choice:
    """One answer so far.

    `echo` is the prompt's text and tokens if the answer begins with them. `prompt_logprobs` are the prompt's tokens
    with their log-probabilities if these were asked for.
    """

    index: int
    text: AnswerText
    tools: ToolText | None
    parts: list[Part] = field(default_factory=list)
    tokens: int = 0
    calls: int = 0
    steps: int = -1
    finish: str | None = None
    first: float | None = None
    last: float = 0.0
    echo: tuple[str, list[ShownToken]] | None = None
    prompt_logprobs: list[tuple[int, TokenLogprobs | None]] | None = None
    _shown: int = 0
    _waiting: list[ShownToken] = field(default_factory=list)

    def add(self, delta: Delta) -> Part:
        """Take a step's tokens up to the stop string; return what they add to the answer."""
        text, count = "", 0
        echo, echoed = self.echo if self.echo is not None and not self.parts else ("", [])
        self._shown += len(echo)
        for count, token in enumerate(delta.tokens, 1):
            last = delta.finish == "stop" and count == len(delta.tokens)
            # lm-evaluation-harness expects one entry per token, so with an echo the end token has one, too.
            if delta.logprobs is not None and (not last or self.echo is not None):
                offset = self._shown + len(text) + len(self.text.held)
                self._waiting.append(ShownToken(token, delta.logprobs[count - 1], offset))
            if not last or token in self.text.hidden:  # the end token has no text, but may complete a stop string
                text += self.text.add(token)
            if self.text.stopped:
                break
        stopped = self.text.stopped
        self.finish = "stop" if stopped else delta.finish
        if self.finish is not None and not stopped:
            text += self.text.end()
        self._shown += len(text)
        self.tokens, self.steps = self.tokens + count, self.steps + (count > 0)
        everything = self.finish is not None and not stopped
        ready = [one for one in self._waiting if everything or one.offset < self._shown]
        self._waiting = self._waiting[len(ready) :]
        content, calls = self._tools_of(text)
        ids, shown = delta.tokens[:count], [*echoed, *ready]
        part = Part(self.index, max(self.steps, 0), ids, echo + content, calls, shown, self.finish)
        self.parts.append(part)
        return part

    def _tools_of(self, text: str) -> tuple[str, list[Call]]:
        """Divide text into content and tool calls."""
        if self.tools is None:
            return text, []
        content, calls = self.tools.add(text)
        if self.finish is not None:
            rest, more = self.tools.end()
            content, calls = content + rest, calls + more
        self.calls += len(calls)
        if self.finish == "stop" and self.calls:
            self.finish = "tool_calls"
        return content, calls


class Answers:
    """All choices of a request, from `start` to `close`, which cancels those that still run.

    Args:
        engine: runs the request.
        plan: the request.
        tokenizer: of the model.
        metrics: counts first tokens and latencies.
        timeout: seconds until the request fails, its time in the queue included; None: never.
        receive: of the connection, which tells when the client leaves.
        began: when the request came, as `time.perf_counter` says.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        tokenizer: Any,
        token_bytes: TokenBytes,
        metrics: Metrics,
        timeout: float | None,
        receive: Receive,
        began: float,
    ) -> None:
        self._engine, self._plan, self._metrics, self._receive = engine, plan, metrics, receive
        self._token_bytes = token_bytes
        self._began, self._timeout = began, timeout
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Delta, float] | Exception] = asyncio.Queue()
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.tickets: list[Ticket] = []
        self.choices = [
            Choice(
                index,
                AnswerText(tokenizer, plan.stops, text_before(tokenizer, prompt) if plan.continues else ()),
                plan.tools() if plan.tools else None,
            )
            for index, prompt in enumerate(prompt for prompt in plan.prompts for _ in range(plan.n))
        ]

    async def start(self) -> None:
        """Submit the request; raises `ApiError` if the engine refuses it."""
        if self._timeout is not None:
            remaining = self._timeout - (time.perf_counter() - self._began)
            self._timer = self._loop.call_later(remaining, self._arrived.put_nowait, timeout_error(self._timeout))
        submitting = asyncio.ensure_future(asyncio.to_thread(self._submit))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the thread goes on submitting
            submitting.add_done_callback(lambda _: self.close())
            raise
        except ValueError as error:
            self.close()
            raise bad_request(error) from error
        except Exception as error:
            self.close()
            raise as_api_error(error) from error
        self._watcher = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Cancel what still runs."""
        for ticket, choice in zip(self.tickets, self.choices, strict=False):
            if choice.finish is None:
                ticket.cancel()
        for waiting in (self._watcher, self._timer):
            if waiting is not None:
                waiting.cancel()

    async def parts(self) -> AsyncIterator[Part]:
        """Yield what each step adds to each choice, until all choices have ended.

        Raises:
            ClientGoneError: the client has left.
            ApiError: the time is over, or the engine failed.
        """
        running = len(self.choices)
        while running:
            arrived = await self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            index, delta, at = arrived
            choice = self.choices[index]
            if choice.finish is not None:  # it has ended by a stop string
                continue
            if delta.finish == "error":
                self._metrics.ended("error", at - self._began, self.tickets[index].waited)
                raise _failure(delta.error)
            if delta.finish == "cancelled":
                raise shutting_down()
            if choice.first is None and delta.tokens:
                choice.first = at
                self._metrics.first_token(at - self._began)
            elif delta.tokens:
                self._metrics.token_gap.observe(at - choice.last)
            choice.last = at
            if not choice.parts:
                self._read_prompt(choice)
            part = choice.add(Delta([], "length") if self._plan.empty else delta)
            if part.finish is not None:
                reason = "length" if part.finish == "length" else "stop"
                self._metrics.ended(reason, at - self._began, self.tickets[index].waited)
                self.tickets[index].cancel()
                running -= 1
            yield part
        self._finished()

    def _read_prompt(self, choice: Choice) -> None:
        """Give a choice what the engine has found of its prompt before its first token."""
        plan, number = self._plan, choice.index // self._plan.n
        tokens = plan.prompts[number]
        scores = self.tickets[number * plan.n].prompt_logprobs
        if plan.prompt_logprobs is not None:
            found = zip(tokens, scores, strict=True)
            choice.prompt_logprobs = [(token, _first(plan.prompt_logprobs, score)) for token, score in found]
        if plan.echoes:
            text = plan.echoes[number]
            places = [] if plan.logprobs is None else self._token_bytes.places(tokens, text)
            entries = zip(tokens, scores, places, strict=False)  # without places nobody asks for scores
            choice.echo = text, [ShownToken(token, _first(plan.logprobs, own), at) for token, own, at in entries]

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage, with figures of acceptance."""
        prompts = sum(map(len, self._plan.prompts))
        new = sum(choice.tokens for choice in self.choices)
        # Each ticket may be steps ahead of its choice, which a stop string has ended.
        accepted = [n for ticket, choice in zip(self.tickets, self.choices, strict=True)
                    for n in ticket.accepted[: max(choice.steps, 0)]]  # fmt: skip
        written = sum(part.tokens for choice in self.choices for part in choice.parts if part.step > 0)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": new,
            "total_tokens": prompts + new,
            "prompt_tokens_details": {"cached_tokens": sum(ticket.reused for ticket in self.tickets[:: self._plan.n])},
            "medusa": {
                "steps": len(accepted),
                "accepted_draft_tokens": sum(accepted),
                "tokens_per_step": round(written / len(accepted), 4) if accepted else None,
                "accept_lengths": {str(length): count for length, count in sorted(Counter(accepted).items())},
            },
        }

    def _submit(self) -> None:
        plan = self._plan
        most = plan.arguments["max_new_tokens"]
        for number, prompt in enumerate(plan.prompts):
            make = plan.make_processors and functools.partial(plan.make_processors, len(prompt))
            first, room = number * plan.n, self._engine.context - len(prompt)
            self.tickets += self._engine.submit(
                prompt,
                lambda index, delta, first=first: self._deliver(first + index, delta),  # type: ignore[misc]
                n=plan.n,
                make_processors=make,
                **{**plan.arguments, "max_new_tokens": most and min(most, room)},
            )

    def _deliver(self, index: int, delta: Delta) -> None:
        """Hand a delta from the engine's thread to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, delta, time.perf_counter()))

    async def _watch(self) -> None:
        await wait_for_disconnect(self._receive)
        self._arrived.put_nowait(ClientGoneError())

    def _finished(self) -> None:
        self._metrics.latency.observe(time.perf_counter() - self._began)
        for choice in self.choices:
            if choice.first is not None and choice.tokens > 1:
                self._metrics.token_time.observe((choice.last - choice.first) / (choice.tokens - 1))


def _first(count: int | None, score: TokenLogprobs | None) -> TokenLogprobs | None:
    """Return a token's log-probabilities with fewer of the most likely tokens."""
    return None if score is None else replace(score, top=score.top[:count])


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


def timeout_error(seconds: float) -> ApiError:
    """Return the error for a request that was not answered within so many seconds."""
    headers = {"x-should-retry": "false"}  # OpenAI's clients would send it again
    message = f"the request was not answered within {seconds:g} seconds"
    return ApiError(message, 504, code="request_timeout", headers=headers)


def _failure(error: BaseException | None) -> ApiError:
    """Return the error that the client gets for a generation that failed; a grammar fails because of the request."""
    if isinstance(error, ValueError) and str(error).startswith(("grammar:", "json_schema:")):
        return bad_request(error)
    return as_api_error(error or RuntimeError())


def text_before(tokenizer: Any, prompt: list[int]) -> list[int]:
    """Return the tokens that an answer's first ones are decoded with; none if they end inside a character."""
    tail = prompt[-ANCHOR:]
    text = tokenizer.decode(tail, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [] if text.endswith("\ufffd") else tail
