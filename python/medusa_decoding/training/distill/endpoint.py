"""Answers by a server with OpenAI's API (vLLM, SGLang, `medusa serve`), as `serving.answers` gives them by an engine.

Prompts go to `/completions` as token ids, and the ids of the answers are asked for (`return_token_ids`). If the server
has no such field, the answer's text is encoded again, and left out unless that gives the same text after its prompt.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field
from transformers import GenerationConfig

from medusa_decoding.chat.template import open_tokens
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checks import import_library, shown
from medusa_decoding.files import parse_json
from medusa_decoding.serving.answers import Answer, Answers
from medusa_decoding.training.config import Config
from medusa_decoding.training.data.encoding import ChatEncoder

NAME, KEY = "generation.endpoint", "OPENAI_API_KEY"
ATTEMPTS, LONGEST_PAUSE, LONGEST_TOLD = 10, 60.0, 600.0
"""Attempts of a request, about four minutes in all; most seconds before one, and most of a server's `Retry-After`."""
FULL = 5
"""Attempts that a 429 counts for at most while other requests are answered: the server's queue is full."""
SILENCE, MOST_BYTES = 3600.0, 2**26
"""Seconds without a byte after which a connection is broken (answers arrive whole), and most bytes of a response."""
WATCH = 10.0
"""Seconds between looks at whether a server that owes answers still takes connections."""
FORMS: tuple[dict[str, Any], ...] = ({"return_token_ids": True}, {"skip_special_tokens": False}, {})
"""Fields that say in which form answers come; the next ones are asked for if a server lacks the first."""
_URL = re.compile(r"https?://[\w.\-\[\]:]+(/[^\s?#@]*)?")
_BROKEN, _pause = re.compile("[\ud800-\udfff\ufffd]"), asyncio.sleep


class _Choice(BaseModel):
    text: str = ""
    token_ids: list[Annotated[int, Field(strict=True)]] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # of vLLM: the end token, or a stop string
    matched_stop: Any = None  # the same of SGLang


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Model(BaseModel):
    id: str
    max_model_len: Annotated[int, Field(ge=1)] | None = None


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


@dataclass(frozen=True)
class Endpoint:
    """A model as servers have it: what a `Distillation` needs to know of it.

    Attributes:
        urls: base URLs of the servers, which take turns.
        model: the model's name there. It stands for the weights, which are not seen here.
        vocab_size, context_limit: of the model; the context is the servers', if they state one.
        generation_config: of the model, read from its own files.
        heads, tree: None, whatever the servers draft with: it decides no token.
    """

    urls: tuple[str, ...]
    model: str
    vocab_size: int
    context_limit: int
    generation_config: Any
    heads: None = None
    tree: None = None

    @classmethod
    def connect(cls, config: Config) -> Endpoint:
        """Ask the servers of a configuration for the model."""
        given, model = config.generation.endpoint, config.generation.endpoint_model
        urls, contexts = tuple(url.rstrip("/") for url in ([given] if isinstance(given, str) else given or ())), []
        if not urls or not all(map(_URL.fullmatch, urls)):  # which may hold a password
            raise ValueError(f"{NAME}: expected URLs such as http://host:8000/v1 (a key goes into {KEY}), got others")
        for url, status, content in asyncio.run(_get([f"{url}/models" for url in urls])):
            if status != 200 and model is None:
                raise _refusal(url, status, content, "generation.endpoint_model names the model without it")
            served = _read(_Models, url, content).data if status == 200 else [_Model(id=model or "")]
            model = model or served[0].id
            if model not in (names := [one.id for one in served]):
                raise ValueError(f"generation.endpoint_model: expected one of {shown(names)} ({url}), got {model}")
            contexts += [one.max_model_len for one in served if one.id == model and one.max_model_len]
        assert model is not None
        name, revision = config.model.name, config.model.revision
        sizes = pretrained.load_config(name, revision, argument="model.name")
        own = pretrained.read_generation_config(name, revision, argument="model.name")
        stated = GenerationConfig.from_dict(own) if own else GenerationConfig.from_model_config(sizes)
        text: Any = sizes.get_text_config()
        return cls(urls, model, text.vocab_size, min(contexts, default=text.max_position_embeddings), stated)


class ServedAnswers(Answers):
    """Asks servers many prompts, `slots` at once, while `next` waits; the end of its block drops what still runs.

    `encoder` made the prompts, `ends` are the tokens that end an answer, and requests state how `config` draws tokens.
    """

    def __init__(
        self, endpoint: Endpoint, slots: int, encoder: ChatEncoder, ends: Sequence[int], config: GenerationConfig
    ) -> None:
        self._endpoint, self._tokenizer, self._ends = endpoint, encoder.tokenizer, list(ends)
        self._end = self._ends[:1] if encoder.end_of_turn is None else [encoder.end_of_turn]
        self._asked = {"model": endpoint.model, "stop_token_ids": self._ends, **_drawn(config)}
        self._running, self._most, self._form = 0, 2 * slots, 0
        self._matched = self._exact = False
        self._loop, self._free, self._client = asyncio.new_event_loop(), asyncio.Semaphore(slots), _Client()
        self._tasks: set[asyncio.Task[Answer]] = set()

    def ask(self, answer: Answer, prompt: Sequence[int], **settings: Any) -> None:
        """Send a prompt whose answer will be `answer`, with its `seed` and `max_new_tokens`."""
        number, most = settings["seed"], settings["max_new_tokens"]
        number -= (number >= 2**63) * 2**64  # servers take signed numbers of 64 bits
        asked = {"prompt": list(prompt), "max_tokens": most, "seed": number}
        self._tasks.add(self._loop.create_task(self._answer(answer, asked)))
        self._running = len(self._tasks)

    def next(self) -> Answer | None:
        """Wait for the next answer that ends; None if no prompt runs or waits."""
        if not self._tasks:
            return None
        some = asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        task = self._loop.run_until_complete(some)[0].pop()
        self._tasks.remove(task)
        self._running = len(self._tasks)
        return task.result()

    async def _answer(self, answer: Answer, asked: dict[str, Any]) -> Answer:
        async with self._free:
            choice = await self._choice(asked, answer.where)
        answer.exact, vocabulary = choice.token_ids is not None, self._endpoint.vocab_size
        ids = self._encoded(asked["prompt"], choice.text) if choice.token_ids is None else choice.token_ids
        if choice.prompt_token_ids not in (None, asked["prompt"]):
            raise ValueError(f"{answer.where}: expected a server that reads a prompt's token ids, got other ids")
        room = self._endpoint.context_limit - len(asked["prompt"])
        known = all(0 <= token < vocabulary for token in ids or ())
        closed = next((n for n, token in enumerate(ids or (), 1) if token in self._ends), None)
        if ids is None:
            answer.refused = "an answer's text has no tokens that give it again (the server returns no token ids)"
        elif answer.exact and not (known and self._spells(ids, choice)):
            if not (known and self._matched):
                raise ValueError(
                    f"{answer.where}: expected an answer in the vocabulary of model.name, {vocabulary} tokens, got "
                    f"{shown(ids)} for {shown(choice.text)}; does {self._endpoint.model} have another one?"
                )
            answer.refused = "an answer's token ids have another text than the server's"
        elif closed is None and choice.finish_reason == "stop" and not answer.exact:
            told = [token for token in (choice.stop_reason, choice.matched_stop) if token in self._ends]
            ids = ids + (told or self._end)[:1]
        elif closed is None and choice.finish_reason != "length":
            answer.refused = f"an answer has no end token ({shown(choice.finish_reason)})"
        elif closed is None and answer.exact and len(ids) < min(asked["max_tokens"], room - 8):
            # Servers end a few tokens before their context does.
            raise ValueError(
                f"{answer.where}: expected an answer of up to {asked['max_tokens']} tokens "
                f"(generation.max_new_tokens), got one that a limit of the server cut off after {len(ids)}"
            )
        answer.tokens = (ids or [])[:closed]
        if answer.refused is None and not 1 <= len(answer.tokens) <= asked["max_tokens"]:
            answer.refused = "an answer without tokens, or with more than were asked for"
        return answer

    async def _choice(self, asked: dict[str, Any], where: str) -> _Choice:
        """Return the answer to a request, in the first of the `FORMS` that the server has."""
        first = asked["seed"] % len(self._endpoint.urls)
        urls = [f"{url}/completions" for url in self._endpoint.urls[first:] + self._endpoint.urls[:first]]
        aborted = 0
        while True:
            form = self._form
            url, status, content = await self._client.fetch(urls, {**self._asked, **asked, **FORMS[form]})
            if status in (400, 422) and any(name.encode() in content for name in FORMS[form]):
                self._form = max(self._form, form + 1)
            elif status != 200:
                raise _refusal(url, status, content, where)
            else:
                (choice,) = _read(_Completion, url, content).choices
                if choice.finish_reason not in ("stop", "length") and aborted + 1 < ATTEMPTS:
                    aborted += 1  # "abort": the server shuts down, say
                    await _pause(min(2.0**aborted, LONGEST_PAUSE))
                elif choice.token_ids is not None or form > 0:
                    self._exact |= choice.token_ids is not None
                    return choice
                elif self._exact:
                    raise ValueError(
                        f"{NAME}: expected token ids from {url} as from the others, got none; leave it out"
                    )
                else:
                    self._form = max(self._form, 1)

    def _encoded(self, prompt: list[int], text: str) -> list[int] | None:
        """Return the tokens of an answer's text, or None if they have another text after the prompt."""
        if _BROKEN.search(text):  # U+FFFD may be a part of a character that was cut off
            return None
        ids = open_tokens(self._tokenizer, text, special=False)
        return ids if self._spell([*prompt, *ids]) == self._spell(prompt) + text else None

    def _spells(self, ids: list[int], choice: _Choice) -> bool:
        """Return whether token ids have the text that the server says, white space and cut characters aside."""
        closed = choice.finish_reason == "stop" and ids and ids[-1] in self._ends
        texts = self._spell(ids[:-1] if closed else ids, skip_special_tokens=True), choice.text
        own, said = ("".join(text.replace("\ufffd", " ").split()) for text in texts)
        self._matched = self._matched or own == said != ""
        at_stop_string = choice.finish_reason == "stop" and not closed  # which the text leaves out
        return own == said or (at_stop_string and own.startswith(said))

    def _spell(self, ids: list[int], skip_special_tokens: bool = False) -> Any:
        return self._tokenizer.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=False)

    def __enter__(self) -> ServedAnswers:
        """Return itself: nothing runs before `next`."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Break the connections of what still runs."""

        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._client.http.aclose()

        self._loop.run_until_complete(end())
        self._loop.close()


def _drawn(config: GenerationConfig) -> dict[str, Any]:
    """Return how tokens are drawn, as requests say it; what is not named is the server's own."""
    fields = {"repetition_penalty": config.repetition_penalty}
    if config.do_sample:
        fields |= {"temperature": 1.0 if config.temperature is None else config.temperature, "top_p": config.top_p}
        fields |= {"top_k": config.top_k if config.top_k != 0 else -1, "min_p": config.min_p}  # SGLang takes no 0
    else:
        fields["temperature"] = 0.0
    return {name: value for name, value in fields.items() if value is not None}


class _Client:
    """Sends requests, with the key if there is one, and tries again after what may pass."""

    def __init__(self) -> None:
        httpx, key = import_library("httpx", "answers from a server"), os.environ.get(KEY, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(SILENCE, connect=30.0)
        self.http, self._answered = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout), 0
        self._looked: dict[str, float] = {}
        self._gone: Counter[str] = Counter()

    async def fetch(self, urls: Sequence[str], body: Mapping[str, Any] | None = None) -> tuple[str, int, bytes]:
        """Return the URL that answered, the status and the content; each attempt is at the next URL."""
        import httpx

        url, why, attempt = "", "", 0
        while attempt < ATTEMPTS:
            url, before = urls[attempt % len(urls)], self._answered
            pause = min(2.0**attempt, LONGEST_PAUSE)
            attempt += 1
            try:
                response, content = await self._watched(url, body)
                if response.status_code != 429 and response.status_code < 500:
                    self._answered += 1
                    return url, response.status_code, bytes(content)
                words = bytes(content[:200]).decode("utf-8", "replace")
                why, told = f"HTTP {response.status_code}: {words!a}", response.headers.get("Retry-After", "")
                if told.isascii() and told.isdecimal():
                    pause = max(pause, min(float(told), LONGEST_TOLD))
            except httpx.RequestError as error:
                why = f"{type(error).__name__}: {str(error)!a:.200}"
            if body is None and attempt == 1:
                print(f"{url}: {why}; trying again for up to four minutes", file=sys.stderr)
            if attempt < ATTEMPTS:
                await _pause(pause)
            if why.startswith("HTTP 429") and self._answered > before:
                attempt = min(attempt, FULL)
        raise ValueError(f"{NAME}: expected an answer from {url} in {ATTEMPTS} attempts, got {why}; try --resume")

    async def _watched(self, url: str, body: Mapping[str, Any] | None) -> tuple[Any, bytearray]:
        """Return a response and its content, or raise httpx's `ReadError` if the server takes no connections any more.

        vLLM 0.32, told to end, keeps the connections of running requests open and never answers them.
        """
        import httpx

        reply, gone = asyncio.ensure_future(self._read(url, body)), self._gone[url]
        try:
            while not (await asyncio.wait([reply], timeout=WATCH))[0]:
                now = time.monotonic()
                if body is not None and now - self._looked.get(url, -WATCH) >= WATCH:
                    self._looked[url] = now
                    try:
                        await self.http.get(url.removesuffix("completions") + "models", timeout=WATCH)
                    except httpx.ConnectError:
                        self._gone[url] += 1
                    except httpx.RequestError:
                        pass
                if self._gone[url] > gone and not reply.done():
                    raise httpx.ReadError("the server takes no connections any more")
            return reply.result()
        finally:
            reply.cancel()
            await asyncio.wait([reply])

    async def _read(self, url: str, body: Mapping[str, Any] | None) -> tuple[Any, bytearray]:
        content = bytearray()
        async with self.http.stream("GET" if body is None else "POST", url, json=body) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise ValueError(f"{NAME}: expected at most {MOST_BYTES} bytes from {url}, got more")
        return response, content


async def _get(urls: Sequence[str]) -> list[tuple[str, int, bytes]]:
    client = _Client()
    async with client.http:
        return [await client.fetch([url]) for url in urls]


def _read(form: type[Any], url: str, content: bytes) -> Any:
    try:
        return form.model_validate(parse_json(content, url))
    except ValueError as error:
        raise ValueError(f"{NAME}: expected JSON in OpenAI's form from {url}, got {shown(content)}") from error


def _refusal(url: str, status: int, content: bytes, where: str) -> ValueError:
    words = content[:300].decode("utf-8", "replace")
    return ValueError(f"{NAME}: expected an answer from {url} ({where}), got HTTP {status}: {words!a}")
