"""Turn requests into what the engine is asked to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_decoding.chat.template import PROBE, ChatTemplate, PromptEncoder, open_tokens
from medusa_decoding.checks import check_text, shown, token_list
from medusa_decoding.files import parse_json
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.grammar import Grammars
from medusa_decoding.serving.http.errors import ApiError
from medusa_decoding.serving.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
)
from medusa_decoding.serving.http.settings import SCORES, Settings
from medusa_decoding.serving.http.tools import Offer, ToolText, call_form, described, offered, one_by_one
from medusa_decoding.serving.penalties import penalty_processors
from medusa_decoding.serving.rows import own_stop_strings
from medusa_decoding.trees.tree import Tree

COLDEST = 1e-6
"""Colder, scores may overflow."""
_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Settings of sampling, with the values that leave out no token."""
_FIXED_VARIABLES = {"messages", "tools", "add_generation_prompt"}
_TYPICAL = ("posterior_threshold", "posterior_alpha")


@dataclass(frozen=True)
class Plan:
    """What a request asks of the engine, and how the answers become text.

    Attributes:
        prompts: token ids of each prompt.
        n: choices per prompt.
        stops: strings that end an answer.
        logprobs: top log-probabilities per token, None for none.
        prompt_logprobs: the same for the tokens of the prompts.
        echoes: the text of each prompt if answers begin with it, else nothing.
        continues: whether the answer continues the prompt's text (and is no message of its own).
        tools: finds the tool calls of one choice; None without tools.
        empty: whether no new tokens are asked for.
        arguments: further arguments of `Engine.submit`.
        make_processors: returns the logits processors of one choice of a prompt of this length.
    """

    prompts: list[list[int]]
    n: int
    stops: list[str]
    logprobs: int | None
    prompt_logprobs: int | None
    echoes: list[str]
    continues: bool
    tools: Callable[[], ToolText] | None
    empty: bool
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
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        offer = offered(body)
        definitions = [tool.model_dump(exclude_none=True) for tool in offer.tools]
        effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        tokens = self._chat_tokens(body.messages, definitions, {**(body.chat_template_kwargs or {}), **effort})
        prompt = self._checked_prompt("messages", tokens)
        make_grammar = self._grammar(body, offer)  # after what fails sooner: a schema may take seconds
        return self._plan(
            body,
            [prompt],
            most=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            make_grammar=make_grammar,
            tools=functools.partial(ToolText, offer.names, make_grammar is not None) if offer.tools else None,
        )

    def completion(self, body: CompletionRequest) -> Plan:
        """Plan text completions."""
        given = body.prompt
        several: Any = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        prompts = [self._text_prompt(one) for one in several]
        stats = self._engine.stats()
        most = stats.slots + stats.queue
        if len(prompts) * (body.n or 1) > most:
            raise ApiError(f"n: expected at most {most} choices of all prompts, got more", param="n")
        if body.best_of not in (None, body.n):
            message = f"best_of: expected n, because all choices are returned, got {body.best_of}"
            raise ApiError(message, param="best_of")
        if body.echo and body.return_token_ids:
            raise ApiError("return_token_ids: leave out echo, the prompt's ids are returned", param="return_token_ids")
        decode = self._encoder.tokenizer.decode
        echoes = [
            one if isinstance(one, str) else decode(tokens, clean_up_tokenization_spaces=False)
            for one, tokens in zip(several, prompts, strict=True)
            if body.echo
        ]
        return self._plan(body, prompts, most=body.max_tokens, logprobs=body.logprobs, echoes=echoes)

    def _plan(
        self,
        body: GenerationRequest,
        prompts: list[list[int]],
        *,
        most: int | None,
        logprobs: int | None,
        echoes: Sequence[str] = (),
        make_grammar: Callable[[], Any] | None = None,
        tools: Callable[[], ToolText] | None = None,
    ) -> Plan:
        self._check_model(body.model)
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError("prompt_logprobs needs stream: false", param="prompt_logprobs")
        stops, endings = self._endings(body, constrained=make_grammar is not None)
        new = min([count for count in (most, self._settings.max_new_tokens) if count is not None], default=None)
        scored = [count for count in (body.prompt_logprobs, logprobs if echoes else None) if count is not None]
        wanted = sum(map(len, prompts)) * (body.n or 1) * (max(scored, default=-1) + 1)
        if wanted > SCORES:
            name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            raise ApiError(f"{name}: expected at most {SCORES:,} numbers for all prompts, got {wanted:,}", param=name)
        return Plan(
            prompts,
            body.n or 1,
            stops,
            logprobs,
            body.prompt_logprobs,
            list(echoes),
            continues=not isinstance(body, ChatRequest),
            tools=tools,
            empty=new == 0,
            arguments={
                "logprobs": logprobs,
                "prompt_logprobs": max(scored, default=None),
                "tree": _tree(body),
                "seed": body.seed,
                "max_new_tokens": 1 if new == 0 else new,  # the engine always makes one
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
        self._check_ids("stop_token_ids", ends)
        arguments: dict[str, Any] = {"min_new_tokens": body.min_tokens} if body.min_tokens else {}
        if body.ignore_eos:
            return stops, {**arguments, "ends": ends, "eos_token_id": []}
        if isinstance(body, ChatRequest):
            stops = self._encoder.stop_strings(stops) or []
            ends = self._encoder.ends(ends)
        return stops + self._own_stops, {**arguments, "ends": ends}

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Return the tokens that a prompt or messages are read as."""
        self._check_model(body.model)
        tokenizer, special = self._encoder.tokenizer, body.add_special_tokens
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("prompt: expected it or messages, got both or none", param="prompt")
        if body.messages is None:
            for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
                if getattr(body, name) is not None:
                    raise ApiError(f"{name} needs messages, got a prompt", param=name)
            return open_tokens(tokenizer, _encodable(body.prompt or ""), special is not False)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        open_turn = body.add_generation_prompt is not False
        return self._chat_tokens(body.messages, tools, body.chat_template_kwargs, open_turn, special)

    def detokenize(self, body: DetokenizeRequest) -> str:
        """Return the text of tokens, special ones included."""
        self._check_model(body.model)
        self._check_ids("tokens", body.tokens)
        return self._encoder.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._settings.model):
            message = f"model: expected {self._settings.model}, got {shown(name)}"
            raise ApiError(message, 404, param="model", code="model_not_found")

    def _check_ids(self, name: str, tokens: Collection[int]) -> None:
        if max(tokens, default=0) >= self._vocabulary:
            message = f"{name}: expected token ids below {self._vocabulary}, got {max(tokens)}"
            raise ApiError(message, param=name, code="invalid_value")

    def _chat_tokens(
        self,
        given: Sequence[Message],
        tools: list[dict[str, Any]],
        variables: dict[str, Any] | None,
        open_turn: bool = True,
        special: bool | None = None,
    ) -> list[int]:
        """Return the tokens of the text that the chat template makes.

        `open_turn` says whether an answer is to follow, `special` whether the tokenizer adds its own special tokens;
        None leaves that to the template.
        """
        template, messages = self._encoder, [_plain(n, message) for n, message in enumerate(given)]
        settings: dict[str, Any] = {"add_generation_prompt": open_turn, "further": variables}
        for name in _FIXED_VARIABLES & (variables or {}).keys():
            message = f"chat_template_kwargs: expected other variables than those of fields, got {name}"
            raise ApiError(message, param="chat_template_kwargs", code="invalid_value")
        if not isinstance(template, ChatTemplate):
            message = "messages: expected a model with a chat template, got one without (medusa serve --template names "
            raise ApiError(message + "one; /v1/completions needs none)", param="messages")
        ways: list[Callable[..., Any]] = [lambda messages, tools: (messages, tools or None)]
        if any(len(message.get("tool_calls", ())) > 1 for message in messages):
            ways.append(one_by_one)
        if (tools or _about_tools(messages)) and "tool" not in str(template.tool_text):
            ways += [functools.partial(described, role=role) for role in ("system", "user")]
        refused = None
        for way in ways:
            try:
                text = _rendered(template, way, messages, tools, settings)
            except ApiError as error:
                refused = refused or error
            else:
                break
        else:
            assert refused is not None
            raise refused
        return template.prompt_tokens(text) if special is None else open_tokens(template.tokenizer, text, special)

    def _text_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return self._checked_prompt("prompt", list(prompt))
        return self._checked_prompt("prompt", open_tokens(self._encoder.tokenizer, _encodable(prompt)))

    def _checked_prompt(self, name: str, tokens: list[int]) -> list[int]:
        context = self._engine.context
        if not tokens:
            raise ApiError(f"{name}: it has no token; give at least one", param=name, code="invalid_value")
        if len(tokens) >= context:  # clients look for OpenAI's words
            message = (
                f"This model's maximum context length is {context} tokens. However, your {name} resulted in "
                f"{len(tokens)} tokens, which leaves none for the answer. Please reduce the length of the {name}."
            )
            raise ApiError(message, param=name, code="context_length_exceeded")
        self._check_ids(name, tokens)
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
        if temperature < COLDEST:  # which clients send as another word for 0
            temperature = 0.0
        if body.acceptance == "typical":
            for name in [*narrow, *(["min_tokens"] if body.min_tokens else [])]:
                raise ApiError(f"{name}: expected none with typical acceptance, got one", param=name)
            if body.temperature is not None and not temperature:
                message = f"temperature: expected at least {COLDEST:g} with typical acceptance, got less"
                raise ApiError(message, param="temperature")
            warmth = {"temperature": temperature} if temperature else {}
            return {**settings, **typical, **warmth, "acceptance": "typical"}
        for name in typical:
            raise ApiError(f"{name} needs acceptance: 'typical'", param=name)
        if temperature == 0 and narrow and body.temperature is None:
            temperature = 1.0
        if body.top_p == 0:  # the least nucleus: the most likely token
            temperature = 0.0
        # With a temperature of 0 every nucleus keeps the most likely token, which greedy decoding takes.
        return settings | ({"do_sample": True, "temperature": temperature, **given} if temperature else {})

    def _processors(
        self, body: GenerationRequest, make_grammar: Callable[[], Any] | None
    ) -> Callable[[int], list[Any]] | None:
        presence, frequency = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        self._check_ids("logit_bias", bias)
        if not (presence or frequency or bias or make_grammar):
            return None

        def make(length: int) -> list[Any]:
            penalties = penalty_processors(length, presence, frequency, bias)
            return penalties if make_grammar is None else [*penalties, make_grammar()]

        return make

    def _grammar(self, body: ChatRequest, offer: Offer) -> Callable[[], Any] | None:
        """Return what makes the grammar of an answer: JSON of a schema, tool calls, or either."""
        make, (schema, lenient) = None, _answer_schema(body)
        if schema is not None and not offer.forced:
            try:
                make = self._grammars.json(schema, lenient)
            except ValueError as error:
                raise ApiError(f"response_format: {error}", param="response_format", code="invalid_value") from error
        if not offer.tools or (make is None and not offer.constrained):
            return make
        assert isinstance(self._encoder, ChatTemplate)
        form = None if make is None and not offer.forced else call_form(self._encoder.tool_text)
        # Models that write bare calls have learnt to write one.
        several = (form is None or form.tagged) if offer.several is None else offer.several
        try:
            answer = None if make is None else schema
            return self._grammars.calls(
                offer.schemas(), form=form, several=several, answer=answer, lenient_answer=lenient
            )
        except ValueError as error:
            raise ApiError(f"tools: {error}", param="tools", code="invalid_value") from error

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._encoder.tokenizer, self._vocabulary, self._encoder.ends(self._eos))


def _answer_schema(body: ChatRequest) -> tuple[dict[str, Any] | None, bool]:
    """Return the schema that an answer obeys, None for free text, and whether keywords may be ignored."""
    form = body.response_format
    if form is None:
        return None, False
    if (form.type == "json_schema") != (form.json_schema is not None):
        message = f"response_format.json_schema: expected it with type 'json_schema' only, got type {form.type!r}"
        raise ApiError(message, param="response_format.json_schema", code="invalid_value")
    if form.json_schema is not None:
        return form.json_schema.schema_, not form.json_schema.strict
    return None if form.type == "text" else {"type": "object"}, False


def _rendered(
    template: ChatTemplate,
    way: Callable[..., Any],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    settings: dict[str, Any],
) -> str:
    """Return the text of a prompt; raises `ApiError` if the template refuses it or ignores what it says about tools."""
    try:
        text = template.render(*way(messages, tools), **settings)
        if _about_tools(messages) and text == template.render(*way(_probed(messages), tools), **settings):
            message = "messages: expected none about tools, which this chat template ignores"
            raise ApiError(message, param="messages")
        if tools and text == template.render(*way(messages, [_renamed(tool) for tool in tools]), **settings):
            raise ApiError("tools: expected none, because this chat template ignores them", param="tools")
    except ValueError as error:
        raise ApiError(f"messages: {error}", param="messages", code="invalid_value") from error
    return text


def _about_tools(messages: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _probed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with other calls and results of tools: a template that ignores them renders the same text."""
    probed = []
    for message in messages:
        other: dict[str, Any] = {"content": PROBE} if message["role"] == "tool" else {}
        if "tool_calls" in message:
            other["tool_calls"] = [_renamed(call) for call in message["tool_calls"]]
        probed.append({**message, **other})
    return probed


def _renamed(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a definition or call of another function."""
    return {**tool, "function": {**tool["function"], "name": PROBE}}


def _encodable(prompt: str) -> str:
    """Return a prompt that UTF-8 can write; others are refused."""
    try:
        check_text("prompt", prompt)
    except ValueError as error:
        raise ApiError(str(error), param="prompt", code="invalid_value") from error
    return prompt


def _plain(place: int, message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: text in one piece, arguments of tool calls as objects."""
    where = f"messages[{place}]"
    plain = message.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
    plain["role"] = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None and message.role not in ("assistant", "tool"):
        raise ApiError(f"{where}.content: the text is missing", param=f"{where}.content")
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
