"""Build the JSON that clients receive: whole responses, and the chunks of streams.

`docs/serve.md` describes it for clients, and `responses` has all fields. A stream has one chunk per step and choice,
also if the step's text is held back (then its text is empty), and a last chunk may belong to no step (then `medusa`
has 0 tokens). With `continuous_usage_stats` each chunk has the usage so far, of all choices together; with
`include_usage` alone `usage` is null in all chunks but the last, and without either the key is absent. An error after
the stream has begun is an event; the last line is always `data: [DONE]`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from medusa_decoding.serving.http.answers import Choice, Part, ShownToken
from medusa_decoding.serving.http.token_text import TokenBytes
from medusa_decoding.serving.ticket import TokenLogprobs


class ChatForm:
    """Writes chat completions; `prompts`, by choice, are given if token ids were asked for."""

    prefix, whole, chunked = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_per_choice = False

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: bool, prompts: Sequence[list[int]] = ()) -> None:
        self._model, self._bytes, self._logprobs, self._prompts = model, token_bytes, logprobs, prompts
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._calls: dict[int, int] = {}

    def chunk(self, part: Part, usage: bool) -> dict[str, Any]:
        """Return the chunk of one step of one choice; `usage` says that a chunk with the usage will follow."""
        begins = part.index not in self._calls
        prompt = {"prompt_token_ids": self._prompts[part.index]} if self._prompts and begins else {}
        choice = {
            "index": part.index,
            **self._piece(part, begins),
            "logprobs": self._logprobs_of(part.shown) if self._logprobs else None,
            "finish_reason": part.finish,
            "medusa": {"step": part.step, "tokens": part.tokens},
            **({"token_ids": part.ids} if self._prompts else {}),
            **(prompt if self.prompt_per_choice else {}),
        }
        self._calls[part.index] = self._calls.get(part.index, 0) + len(part.calls)
        outside = {} if self.prompt_per_choice else prompt
        return self._frame(self.chunked, [choice]) | ({"usage": None} if usage else {}) | outside

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk with the usage."""
        return self._frame(self.chunked, []) | {"usage": usage}

    def response(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response."""
        bodies = [
            {
                "index": choice.index,
                **self._answer(choice.parts),
                "logprobs": self._logprobs_of([one for part in choice.parts for one in part.shown])
                if self._logprobs
                else None,
                "finish_reason": choice.finish,
                **({"token_ids": [token for part in choice.parts for token in part.ids]} if self._prompts else {}),
                **(self._prompt(choice) if self.prompt_per_choice else {}),
            }
            for choice in choices
        ]
        prompt = {} if self.prompt_per_choice else self._prompt(choices[0])
        return self._frame(self.whole, bodies) | {"usage": usage} | prompt

    def _prompt(self, choice: Choice) -> dict[str, Any]:
        """Return the prompt's tokens and their log-probabilities, if they were asked for, in vLLM's form."""
        found: dict[str, Any] = {"prompt_token_ids": self._prompts[choice.index]} if self._prompts else {}
        if choice.prompt_logprobs is not None:
            scores = choice.prompt_logprobs
            found["prompt_logprobs"] = [score and self._ranked(token, score) for token, score in scores]
        return found

    def _ranked(self, token: int, score: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (score.logprob, score.rank)}
        ranked |= {one: (logprob, rank) for rank, (one, logprob) in enumerate(score.top, 1)}
        return {
            str(one): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._bytes.text(one)}
            for one, (logprob, rank) in ranked.items()
        }

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _piece(self, part: Part, begins: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": part.text}
        if begins:
            delta = {"role": "assistant", **delta}
        if part.calls:
            first = self._calls.get(part.index, 0)
            delta["tool_calls"] = [{"index": first + n, **call.as_json()} for n, call in enumerate(part.calls)]
        return {"delta": delta}

    def _answer(self, parts: list[Part]) -> dict[str, Any]:
        content = "".join(part.text for part in parts)
        calls = [call.as_json() for part in parts for call in part.calls]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content if content.strip() else None, "tool_calls": calls}
        return {"message": message}

    def _logprobs_of(self, shown: list[ShownToken]) -> dict[str, Any]:
        content = [
            {
                **self._entry(one.token, one.logprobs.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in one.logprobs.top],
            }
            for one in shown
            if one.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._bytes.text(token), "bytes": list(self._bytes(token)), "logprob": _finite(logprob)}


class CompletionForm(ChatForm):
    """Writes text completions."""

    prefix, whole, chunked = "cmpl", "text_completion", "text_completion"
    prompt_per_choice = True

    def _piece(self, part: Part, begins: bool) -> dict[str, Any]:
        return {"text": part.text}

    def _answer(self, parts: list[Part]) -> dict[str, Any]:
        return {"text": "".join(part.text for part in parts)}

    def _logprobs_of(self, shown: list[ShownToken]) -> dict[str, Any]:
        return {
            "tokens": [self._bytes.text(one.token) for one in shown],
            "token_logprobs": [one.logprobs and _finite(one.logprobs.logprob) for one in shown],
            "top_logprobs": [one.logprobs and self._top(one.token, one.logprobs) for one in shown],
            "text_offset": [one.offset for one in shown],
        }

    def _top(self, chosen: int, found: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in found.top:  # the likelier of two tokens with the same text
            top.setdefault(self._bytes.text(token), _finite(logprob))
        return top | {self._bytes.text(chosen): _finite(found.logprob)}  # OpenAI: always there


def event(body: dict[str, Any]) -> bytes:
    """Return a line of a stream, in ASCII: some clients end lines at other characters as well, such as U+2028."""
    return f"data: {json.dumps(body)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can write; OpenAI too writes -9999 for an impossible token."""
    return max(logprob, -9999.0)
