"""What requests may say, in OpenAI's form with extra fields for Medusa.

A field that asks for something unknown is refused, never ignored. Fields that ask for nothing, known or not, are
dropped: null and empty ones, and those that change no answer (`Strict.neutral`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from medusa_decoding.options import ACCEPTANCES
from medusa_decoding.serving.http import settings
from medusa_decoding.serving.penalties import MAX_BIAS, MAX_PENALTY
from medusa_decoding.serving.rows import MOST_LOGPROBS
from medusa_decoding.trees.tree import MAX_CHOICES

assert ACCEPTANCES == ("lossless", "typical")  # as in `GenerationRequest.acceptance`
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopText = Annotated[str, Field(max_length=settings.STOP_CHARACTERS)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Path = Annotated[list[Annotated[int, Field(ge=0, lt=256)]], Field(min_length=1, max_length=MAX_CHOICES)]

Paths = Annotated[list[Path], Field(max_length=MAX_CHOICES, fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
EndIds = Annotated[list[TokenId], Field(max_length=settings.STOPS, fail_fast=True)]
Several = Field(min_length=1, max_length=settings.PROMPTS, fail_fast=True)


ANY: Any = object()
"""In `Strict.neutral`: the field changes no answer, whatever its value."""
_NEUTRAL: list[tuple[Any, tuple[str, ...]]] = [
    (ANY, (  # What providers store, bill, schedule and cache by; hints for speed; settings of samplers that are off.
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "request_id", "rid", "priority", "cache_salt", "cache_prompt", "id_slot", "n_keep",
        "prediction", "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "smoothing_curve", "xtc_threshold",
        "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    )),
    ((-1,), (
        "max_tokens", "max_completion_tokens", "n_predict", "t_max_predict_ms", "repeat_last_n", "top_n_sigma", "seed",
    )),
    ((0,), (
        "top_logprobs", "n_probs", "n_indent", "min_keep", "mirostat", "mirostat_mode", "dynatemp_range", "top_a",
        "smoothing_factor", "xtc_probability", "dry_multiplier", "penalty_alpha", "epsilon_cutoff", "eta_cutoff",
        "no_repeat_ngram_size",
    )),
    ((1,), (
        "best_of", "num_beams", "length_penalty", "guidance_scale", "typical_p", "tfs", "tfs_z", "repeat_penalty",
        "encoder_repetition_penalty",
    )),
    ((True,), (
        "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "add_generation_prompt",
        "include_reasoning",
    )),
    ((False,), (
        "use_beam_search", "early_stopping", "echo", "continue_final_message", "include_stop_str_in_output",
        "no_stop_trim", "return_tokens", "return_tokens_as_token_ids", "return_hidden_states", "return_progress",
        "timings_per_token", "post_sampling_probs",
    )),
    (("medium",), ("verbosity",)),
]  # fmt: skip
NEUTRAL = {name: values for values, names in _NEUTRAL for name in names}
"""Values of request fields, of OpenAI, vLLM, SGLang and llama.cpp, that ask for what happens anyway."""


class Strict(BaseModel):
    """A JSON object whose fields are all known, with values of exactly the declared types.

    Attributes:
        neutral: by field, the values that ask for nothing, or `ANY`. Such fields are dropped.
        meant: fields whose empty value says something. Those of others are dropped, like null.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, Any]] = dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), ANY)
    meant: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if not cls._asks_nothing(name, value)}

    @classmethod
    def _asks_nothing(cls, name: str, value: Any) -> bool:
        if value is None or (value in ("", [], {}) and name not in cls.meant):
            return True
        values = cls.neutral.get(name, ())
        return values is ANY or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


class StreamOptions(Strict):
    """Options of a stream."""

    neutral = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Field(description="Extra field: the usage in each chunk.")] = None


class GenerationRequest(Strict):
    """Fields that chat and text completions share."""

    neutral = NEUTRAL
    meant = frozenset({"tree", "prompt", "web_search_options"})

    model: str = Field(description="The served model's name, see /v1/models.")
    n: Annotated[int, Field(ge=1, le=settings.CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Extra field: no end token before these; stop strings end the text all the same."
    )
    ignore_eos: bool | None = Field(None, description="Extra field: the model's own end tokens end nothing.")
    stop_token_ids: EndIds | None = Field(None, description="Extra field: further end tokens.")
    stop: StopText | Annotated[list[StopText], Field(max_length=settings.STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None,
        description="Above 0: sample; 0: greedy. Default: the server's (`medusa serve --temperature`), which is greedy "
        "unless the server was started otherwise; 1 if top_p, top_k or min_p leaves out tokens and the server's is 0.",
    )
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="Extra field; 0 or -1 for all.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="Extra field.")
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = Field(None, description="Extra field.")
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
            Field(max_length=settings.BIASES),
        ]
        | None
    ) = None
    tree: Literal["auto", "plain"] | Paths | None = Field(
        None,
        description='Extra field: "auto", "plain" (no draft tokens), or paths of child ranks as in the Medusa paper\'s '
        "code, such as [[0], [1], [0, 0]]. Default: the server's.",
    )
    acceptance: Literal["lossless", "typical"] | None = Field(
        None, description="Extra field: typical acceptance is lossy, the text is not the base model's own."
    )
    posterior_threshold: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Of typical acceptance.")
    posterior_alpha: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, description="Of typical acceptance.")
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = Field(
        None, description="Extra field: also return log-probabilities of the prompt's tokens, with so many top ones."
    )
    return_token_ids: bool | None = Field(
        None, description="Extra field: also return the ids of the prompt's and of the answer's tokens, as vLLM does."
    )


class TextPart(Strict):
    """A part of a message's content; only text is supported."""

    meant = frozenset({"text"})

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """The function of a tool call, with its arguments as JSON text."""

    neutral = {**Strict.neutral, "parsed_arguments": ANY}
    meant = frozenset({"arguments"})

    name: Name
    arguments: str = ""


class ToolCall(Strict):
    """A tool call in an assistant's message."""

    neutral = {**Strict.neutral, "index": ANY}

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A message of the conversation."""

    # What clients keep of an answer next to its text.
    neutral = {
        **Strict.neutral,
        **dict.fromkeys(
            ("annotations", "parsed", "provider_specific_fields", "reasoning_details", "thinking_blocks"), ANY
        ),
        "type": ("text", "message"),  # of lm-evaluation-harness up to 0.4.11, and of the Responses API
    }
    meant = frozenset({"content"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=settings.MESSAGES)] | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="For templates that show it; `reasoning` is the same.")
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=settings.TOOLS)] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    meant = frozenset({"parameters"})

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Whether the arguments of every call obey `parameters`.")


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name of a function."""

    name: Name


class NamedTool(Strict):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """Some of the tools, and whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=settings.TOOLS)]


class AllowedChoice(Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(Strict):
    """A JSON schema, which the answer obeys; keywords that are not supported are ignored unless it is strict."""

    meant = frozenset({"schema"})

    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer: free text, any JSON object, or JSON that obeys a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(GenerationRequest):
    """A request to /v1/chat/completions."""

    neutral = {**NEUTRAL, "add_special_tokens": (False,)}

    messages: Annotated[list[Message], Field(min_length=1, max_length=settings.MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=settings.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extra field: variables for the chat template, such as enable_thinking."
    )
    reasoning_effort: str | None = Field(None, description="The chat template's variable of this name.")
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(GenerationRequest):
    """A request to /v1/completions."""

    neutral = {**NEUTRAL, "add_special_tokens": (True,), "logprobs": (False,)}

    prompt: str | Annotated[list[str], Several] | TokenIds | Annotated[list[TokenIds], Several]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None


class TokenizeRequest(Strict):
    """A request to /tokenize: a prompt as /v1/completions reads it, or messages as /v1/chat/completions does."""

    neutral = {"continue_final_message": (False,), "add_generation_prompt": (True,)}
    meant = frozenset({"prompt"})

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=settings.MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=settings.TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = Field(None, description="Of messages; true by default.")
    add_special_tokens: bool | None = Field(None, description="By default as prompts of the same kind are read.")
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """A request to /detokenize."""

    meant = frozenset({"tokens"})

    model: str | None = None
    tokens: list[TokenId]
