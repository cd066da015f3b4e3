"""What responses contain, for the schema in /openapi.json; `events` builds the responses themselves as plain JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Finish = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    """Tokens of the prompt that were cached."""

    cached_tokens: int


class Acceptance(BaseModel):
    """What the heads did."""

    steps: int
    accepted_draft_tokens: int
    tokens_per_step: float | None
    accept_lengths: dict[str, int]


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    medusa: Acceptance


class StepOfChunk(BaseModel):
    """The step that a chunk belongs to, and how many tokens it added."""

    step: int
    tokens: int


class TokenLogprob(BaseModel):
    """A token with its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class AnswerLogprob(TokenLogprob):
    """A token of an answer, and the most likely ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[AnswerLogprob]
    refusal: None


class PromptLogprob(BaseModel):
    """A token at a place of the prompt; `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionOfCall(BaseModel):
    """A function with its arguments as JSON text."""

    name: str
    arguments: str


class CallOfAnswer(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionOfCall


class CallOfChunk(CallOfAnswer):
    """A call of a tool in a chunk."""

    index: int


class AnswerMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallOfAnswer] | None = None


class MessageDelta(BaseModel):
    """What a step adds to the model's message."""

    role: Literal["assistant"] | None = None
    content: str
    tool_calls: list[CallOfChunk] | None = None


class ChatChoice(BaseModel):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | None = None


class ChatChunkChoice(BaseModel):
    """What a step adds to an answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    medusa: StepOfChunk
    token_ids: list[int] | None = None


class TextLogprobs(BaseModel):
    """Log-probabilities of a text's tokens; None for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    """A text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextChunkChoice(BaseModel):
    """What a step adds to a text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None
    medusa: StepOfChunk
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str


class ChatCompletion(_Answer):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(_Answer):
    """An event of a streamed answer; `usage` is in the last one, if it was asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(_Answer):
    """Continued texts."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class TextCompletionChunk(_Answer):
    """An event of streamed texts; `usage` is in the last one, if it was asked for."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    decoding: Literal["medusa", "plain"]


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """The tokens of a prompt."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The text of tokens."""

    prompt: str
