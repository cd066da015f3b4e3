"""Build the server from its arguments: one place for `medusa serve` and for a replica of Ray Serve."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from medusa_decoding.checks import check_text, import_library, shown, token_list
from medusa_decoding.options import SLOTS
from medusa_decoding.serving.loading import find_model, load_model, load_tokenizer, resolve_device
from medusa_decoding.trees.parsing import parse_tree
from medusa_decoding.trees.tree import Tree

if TYPE_CHECKING:
    from fastapi import FastAPI

    from medusa_decoding.serving.engine import Engine

KEY_VARIABLE = "MEDUSA_API_KEY"
Model = Annotated[str, AfterValidator(find_model)]


def _tree(value: Any) -> Any:
    if value is not None and not isinstance(value, (str, Tree)):
        raise ValueError(f"expected text as in --tree, got {shown(value)}")
    return parse_tree(value) if isinstance(value, str) else value


class ServerArguments(BaseModel):
    """Arguments of a server, as `medusa serve` takes them; text is converted to each field's type.

    Attributes:
        model: folder or hub id of the heads, or a model without heads; None for the embedded demo.
        base_model: None for the one that the heads name.
        dtype: of the weights; None for the checkpoint's.
        device: "auto" for cuda if torch can use it, else cpu.
        template: a chat template, see `chat.template.prompt_encoder`.
        tree: a `Tree`, or text for `trees.parsing.parse_tree`; None for the model's default.
        backend: see `MedusaModel`.
        cache_dtype, activation_dtype: see `MedusaModel`.
        served_model_name: the name in requests; None for one made from `model`.
        api_key: None for the variable MEDUSA_API_KEY; without both there is no key.
        slots: answers that are written at the same time.
        context: most tokens of a prompt with its answer; None for what fits.
        queue: answers that may wait.
        max_new_tokens: see `serving.http.settings.Settings`, as for the fields that follow.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: Model | None = None
    base_model: Model | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    template: str | None = None
    tree: Annotated[Any, BeforeValidator(_tree)] = None
    backend: Literal["auto", "eager", "compiled", "graph"] = "auto"
    cache_dtype: Literal["int8"] | None = None
    activation_dtype: Literal["int8"] | None = None
    served_model_name: str | None = None
    api_key: str | None = None
    slots: Annotated[int, Field(ge=1)] = SLOTS
    context: Annotated[int, Field(ge=2)] | None = None
    queue: Annotated[int, Field(ge=0)] = 64
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    request_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 600.0
    allow_origin: str | None = None

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> ServerArguments:
        """Return checked arguments; raise `ValueError` that names the first wrong or unknown one."""
        try:
            return cls.model_validate({str(name): value for name, value in values.items()})
        except ValidationError as error:
            first = error.errors()[0]
            name, words = first["loc"][0], first["msg"].removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                words = f"expected one of {', '.join(cls.model_fields)}, got an unknown name"
            elif first["type"] != "value_error":
                got = "another type" if name == "api_key" else shown(first["input"])
                words = f"{re.sub('^.* should (be|match)', 'expected', words)}, got {got}"
            raise ValueError(f"{name}: {words}") from None

    def key(self) -> str | None:
        """Return the key that requests need; raise `ValueError` for an empty or padded one."""
        source = KEY_VARIABLE if self.api_key is None else "api_key (--api-key)"
        key = os.getenv(KEY_VARIABLE) if self.api_key is None else self.api_key
        if key is not None:
            check_text(source, key)
            if not key or key != key.strip():
                raise ValueError(f"{source}: expected a key without white space around it, got an empty or padded one")
        return key

    def name(self) -> str:
        """Return the name of the served model: by default of a path its last part, of a hub id all of it."""
        if self.served_model_name or self.model is None:
            return self.served_model_name or "demo"
        path = Path(self.model)
        return path.resolve().name.removesuffix(".gguf") if path.exists() else self.model


def check_libraries(purpose: str) -> None:
    """Raise `ModuleNotFoundError` with the extra to install if a library of the server is missing."""
    for library in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
        import_library(library, purpose, extra="serve")


@contextlib.contextmanager
def launch(arguments: ServerArguments, hosts: frozenset[str] | None = None) -> Iterator[tuple[FastAPI, Engine]]:
    """Load the model and run its engine until the block ends; yield the application in ASGI, and the engine.

    Args:
        arguments: see `ServerArguments`; `device` becomes the one in use.
        hosts: see `serving.http.settings.Settings`.
    """
    from medusa_decoding.chat.template import prompt_encoder
    from medusa_decoding.serving.engine import Engine
    from medusa_decoding.serving.http.app import create_app
    from medusa_decoding.serving.http.settings import Settings

    settings = Settings(
        model=arguments.name(), api_key=arguments.key(), max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature, request_timeout=arguments.request_timeout, hosts=hosts,
        allow_origin=arguments.allow_origin,
    )  # fmt: skip
    resolve_device(arguments)
    tokenizer = load_tokenizer(arguments)
    with load_model(arguments) as model:
        eos = token_list(model.backbone.causal_lm.generation_config.eos_token_id)
        encoder = prompt_encoder(tokenizer, arguments.template, eos)
        with Engine(model, slots=arguments.slots, context=arguments.context, queue=arguments.queue) as engine:
            yield create_app(engine, encoder, settings), engine
