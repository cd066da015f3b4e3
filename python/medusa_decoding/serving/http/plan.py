"""Turn requests into what the engine is asked to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_decoding.chat.template import ChatTemplate, PromptEncoder, open_tokens
from medusa_decoding.checks import check_text, shown, token_list
from medusa_decoding.files import parse_json
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.grammar import Grammars
from medusa_decoding.serving.http.errors import ApiError
from medusa_decoding.serving.http.protocol import ChatRequest, CompletionRequest, GenerationRequest, Message
from medusa_decoding.serving.http.settings import CHOICES, Settings
from medusa_decoding.serving.penalties import penalty_processors
from medusa_decoding.serving.rows import own_stop_strings
from medusa_decoding.trees.tree import Tree

COLDEST = 1e-6
"""Colder, scores may overflow."""
_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Settings of sampling, with the values that leave out no token."""
_TYPICAL = ("posterior_threshold", "posterior_alpha")


@dataclass(frozen=True)
class Plan:
    """What a request asks of the engine, and how the answers become text.

    Attributes:
        prompts: token ids of each prompt.
        n: choices per prompt.
        stops: strings that end an answer.
        logprobs: top log-probabilities per token, None for none.
        continues: whether the answer continues the prompt's text (and is no message of its own).
        tools: names of the functions that the model may call.
        arguments: further arguments of `Engine.submit`.
        make_processors: returns the logits processors of one choice of a prompt of this length.
    """

    prompts: list[list[int]]
    n: int
    stops: list[str]
    logprobs: int | None
    continues: bool
    tools: frozenset[str]
    arguments: dict[str, Any]
    make_processors: Callable[[int], list[Any]] | None = field(default=None)


class Planner:
    """Checks what pydantic cannot, encodes prompts, and translates settings; in any thread.

    Its methods raise `ApiError`, which names the field.
    """

    def __init__(self, engine: Engine, encoder: PromptEncoder, settings: Settings) -> None:
        self._engine, self._encoder, self._settings = engine, encoder, settings
        backbone = engine.model.backbone
        self._vocabulary = backbone.vocab_size
        self._eos = token_list(backbone.causal_lm.generation_config.eos_token_id)
        self._own_stops = own_stop_strings(engine.model)

    def chat(self, body: ChatRequest) -> Plan:
        """Plan a chat completion."""
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise ApiError("max_tokens: expected max_completion_tokens or it, got two values", param="max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs: expected logprobs: true with it, got none", param="top_logprobs")
        tools = body.tools if body.tools and body.tool_choice != "none" else []
        make_grammar = self._grammar(body)
        if tools and make_grammar is not None:
            raise ApiError("response_format: expected type 'text' with tools, got JSON", param="response_format")
        definitions = [tool.model_dump(exclude_none=True) for tool in tools]
        prompt = self._chat_prompt([_plain(n, message) for n, message in enumerate(body.messages)], definitions)
        return self._plan(
            body,
            [prompt],
            most=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            make_grammar=make_grammar,
            tools=frozenset(tool.function.name for tool in tools),
        )

    def completion(self, body: CompletionRequest) -> Plan:
        """Plan text completions."""
        given = body.prompt
        several: Any = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        prompts = [self._text_prompt(one) for one in several]
        stats = self._engine.stats()
        most = min(CHOICES, stats.slots + stats.queue)
        if len(prompts) * (body.n or 1) > most:
            raise ApiError(f"n: expected at most {most} choices of all prompts, got more", param="n")
        if body.best_of not in (None, body.n):
            message = f"best_of: expected n, because all choices are returned, got {body.best_of}"
            raise ApiError(message, param="best_of")
        return self._plan(body, prompts, most=body.max_tokens, logprobs=body.logprobs)

    def _plan(
        self,
        body: GenerationRequest,
        prompts: list[list[int]],
        *,
        most: int | None,
        logprobs: int | None,
        make_grammar: Callable[[], Any] | None = None,
        tools: frozenset[str] = frozenset(),
    ) -> Plan:
        if body.model != self._settings.model:
            message = f"model: expected {self._settings.model}, got {shown(body.model)}"
            raise ApiError(message, 404, param="model", code="model_not_found")
        stops, endings = self._endings(body, constrained=make_grammar is not None)
        limits = [count for count in (most, self._settings.max_new_tokens) if count is not None]
        return Plan(
            prompts,
            body.n or 1,
            stops,
            logprobs,
            continues=not isinstance(body, ChatRequest),
            tools=tools,
            arguments={
                "logprobs": logprobs,
                "tree": _tree(body),
                "seed": body.seed,
                "max_new_tokens": min(limits, default=None),
                **endings,
                **self._selection(body),
            },
            make_processors=self._processors(body, make_grammar),
        )

    def _endings(self, body: GenerationRequest, constrained: bool) -> tuple[list[str], dict[str, Any]]:
        """Return the strings that end an answer, and the engine's arguments about the tokens that do."""
        for name in ("ignore_eos", "min_tokens"):
            if constrained and getattr(body, name):
                raise ApiError(f"{name}: leave it out, a grammar decides where this answer ends", param=name)
        stops = [body.stop] if isinstance(body.stop, str) else [text for text in body.stop or () if text]
        ends = body.stop_token_ids or []
        if ends and max(ends) >= self._vocabulary:
            message = f"stop_token_ids: expected token ids below {self._vocabulary}, got {max(ends)}"
            raise ApiError(message, param="stop_token_ids", code="invalid_value")
        arguments: dict[str, Any] = {"min_new_tokens": body.min_tokens} if body.min_tokens else {}
        if body.ignore_eos:
            return stops, {**arguments, "ends": ends, "eos_token_id": []}
        if isinstance(body, ChatRequest):
            stops = self._encoder.stop_strings(stops) or []
            ends = self._encoder.ends(ends)
        return stops + self._own_stops, {**arguments, "ends": ends}

    def _chat_prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        template = self._encoder
        if not isinstance(template, ChatTemplate):
            message = "messages: expected a model with a chat template, got one without (medusa serve --template names "
            raise ApiError(message + "one; /v1/completions needs none)", param="messages")
        talked = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if talked and "tool" not in template.text:
            raise ApiError("messages: expected none about tools, which this chat template ignores", param="messages")
        try:
            text = template.render(messages, tools or None)
            if tools and text == template.render(messages):
                raise ApiError("tools: expected none, because this chat template ignores them", param="tools")
        except ValueError as error:
            raise ApiError(f"messages: {error}", param="messages", code="invalid_value") from error
        return self._checked_prompt("messages", template.prompt_tokens(text))

    def _text_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return self._checked_prompt("prompt", list(prompt))
        try:
            check_text("prompt", prompt)
        except ValueError as error:
            raise ApiError(str(error), param="prompt", code="invalid_value") from error
        return self._checked_prompt("prompt", open_tokens(self._encoder.tokenizer, prompt))

    def _checked_prompt(self, name: str, tokens: list[int]) -> list[int]:
        context = self._engine.context
        if not tokens:
            raise ApiError(f"{name}: expected at least one token, got none", param=name, code="invalid_value")
        if len(tokens) >= context:  # clients look for OpenAI's words
            message = (
                f"This model's maximum context length is {context} tokens. However, your {name} resulted in "
                f"{len(tokens)} tokens, which leaves none for the answer. Please reduce the length of the {name}."
            )
            raise ApiError(message, param=name, code="context_length_exceeded")
        if max(tokens) >= self._vocabulary:
            message = f"{name}: expected token ids below {self._vocabulary}, got {max(tokens)}"
            raise ApiError(message, param=name, code="invalid_value")
        return tokens

    def _selection(self, body: GenerationRequest) -> dict[str, Any]:
        """Return the settings of token selection as `MedusaModel.generate` takes them."""
        # -1 also is a word for all tokens.
        given = {name: max(value, 0) for name in _SAMPLING if (value := getattr(body, name)) is not None}
        narrow = [name for name, value in given.items() if value != _SAMPLING[name]]
        typical = {name: value for name in _TYPICAL if (value := getattr(body, name)) is not None}
        settings: dict[str, Any] = {}
        if body.repetition_penalty is not None:
            settings["repetition_penalty"] = body.repetition_penalty
        temperature = self._settings.temperature if body.temperature is None else body.temperature
        if 0 < temperature < COLDEST:
            message = f"temperature: expected 0 or at least {COLDEST:g}, got {temperature:g}"
            raise ApiError(message, param="temperature", code="invalid_value")
        if body.acceptance == "typical":
            for name in [*narrow, *(["min_tokens"] if body.min_tokens else [])]:
                raise ApiError(f"{name}: expected none with typical acceptance, got one", param=name)
            if body.temperature == 0:
                raise ApiError("temperature: expected above 0 with typical acceptance, got 0", param="temperature")
            warmth = {"temperature": temperature} if temperature else {}
            return {**settings, **typical, **warmth, "acceptance": "typical"}
        for name in typical:
            raise ApiError(f"{name}: expected acceptance: 'typical' with it, got another one", param=name)
        if temperature == 0 and narrow and body.temperature is None:
            temperature = 1.0
        # With a temperature of 0 every nucleus keeps the likeliest token, which greedy decoding takes.
        return settings | ({"do_sample": True, "temperature": temperature, **given} if temperature else {})

    def _processors(
        self, body: GenerationRequest, make_grammar: Callable[[], Any] | None
    ) -> Callable[[int], list[Any]] | None:
        presence, frequency = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        if not (presence or frequency or bias or make_grammar):
            return None

        def make(length: int) -> list[Any]:
            penalties = penalty_processors(length, presence, frequency, bias, vocab_size=self._vocabulary)
            return penalties if make_grammar is None else [*penalties, make_grammar()]

        return make

    def _grammar(self, body: ChatRequest) -> Callable[[], Any] | None:
        form = body.response_format
        if form is None:
            return None
        if (form.type == "json_schema") != (form.json_schema is not None):
            message = f"response_format.json_schema: expected it with type 'json_schema' only, got type {form.type!r}"
            raise ApiError(message, param="response_format.json_schema", code="invalid_value")
        if form.type == "text":
            return None
        try:
            return self._grammars.json(None if form.json_schema is None else form.json_schema.schema_)
        except ValueError as error:
            raise ApiError(f"response_format: {error}", param="response_format", code="invalid_value") from error

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._encoder.tokenizer, self._vocabulary, self._encoder.ends(self._eos))


def _plain(place: int, message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: text in one piece, arguments of tool calls as objects."""
    where = f"messages[{place}]"
    plain = message.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
    plain["role"] = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None and message.role not in ("assistant", "tool"):
        raise ApiError(f"{where}.content: expected text, got none", param=f"{where}.content")
    plain["content"] = content if isinstance(content, str) else "".join(part.text for part in content or ())
    if reasoning := message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = reasoning
    if message.tool_calls is not None and message.role != "assistant":
        raise ApiError(f"{where}.tool_calls: expected role 'assistant' with it", param=f"{where}.tool_calls")
    if message.tool_calls is not None:
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        for number, call in enumerate(plain["tool_calls"]):
            name = f"{where}.tool_calls[{number}].function.arguments"
            try:
                arguments = parse_json(call["function"]["arguments"] or "{}", name)
            except ValueError as error:
                raise ApiError(str(error), param=name, code="invalid_value") from error
            if not isinstance(arguments, dict):
                raise ApiError(f"{name}: expected a JSON object, got another value", param=name, code="invalid_value")
            call["function"]["arguments"] = arguments
    return plain


def _tree(body: GenerationRequest) -> Any:
    if not isinstance(body.tree, list):
        return Tree([]) if body.tree == "plain" else body.tree
    try:
        return Tree(body.tree)
    except ValueError as error:
        raise ApiError(f"tree: {error}", param="tree", code="invalid_value") from error
