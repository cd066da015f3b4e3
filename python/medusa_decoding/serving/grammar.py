"""JSON mode, JSON schemas and tool calls as logits processors, through the llguidance library.

Schemas come from clients. A schema of one kilobyte can keep a compiler busy for minutes and take all memory, so each
new one is first compiled in a process of its own that has limits of time and memory. Nothing is ever fetched: a
`$ref` to another document is an error.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_decoding.checks import import_library, shown
from medusa_decoding.serving.closed_schemas import closed

MAX_SCHEMA = 128 * 2**10
"""Most characters of a schema as JSON."""
TRIAL_SECONDS, TRIAL_MEMORY = 2, 2**30
"""CPU seconds and bytes in which a schema must compile."""
TRIAL_TIMEOUT = 20.0
"""Seconds of wall time for the same: other processes may use the cores."""
KEPT_GRAMMARS = 32
"""How many compiled schemas are kept, the most recently used ones."""
LIMITS = {"max_items_in_row": 8_000, "step_max_items": 20_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""`LLParserLimits` of llguidance: they bound the time of a step, which all requests of a batch wait for."""
WHITESPACE = r"[ \t\r\n]{1,50}"
"""White space between two parts of a JSON text. Bounded, as models that are unsure of a format repeat it endlessly."""
UNSUPPORTED = re.compile(r"\(\?<?[=!>]|\\[bBZ1-9]")
"""Parts of regular expressions that llguidance refuses: look-around, word boundaries and backreferences."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""What Qwen's and Hermes' models write around a tool call."""

_TRIAL = """
import json, resource, sys
folder, seconds, memory, limits = json.loads(sys.argv[1])
for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (most, most))
sys.path.insert(0, folder)
from llguidance import LLMatcher, LLParserLimits
print(LLMatcher.validate_grammar(sys.stdin.read(), limits=LLParserLimits(**limits)))
"""


@dataclass(frozen=True)
class ToolSchema:
    """A tool that may be called, and the schema of its arguments; `lenient` ignores keywords that are not supported."""

    name: str
    schema: Mapping[str, Any]
    lenient: bool = False


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls: between tags, and with its arguments as "arguments" or "parameters"."""

    tagged: bool
    key: str


class Grammars:
    """Compiles JSON schemas for a model's vocabulary, and keeps the most recent ones.

    Args:
        tokenizer: a fast tokenizer.
        vocab_size: rows of the model's `lm_head`; those that the tokenizer does not have are never allowed.
        eos_ids: tokens that end an answer; each is allowed exactly where the JSON text may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise ValueError("eos_ids: give at least one end token")
        self.vocab_size, self.eos_ids = vocab_size, list(eos_ids)
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._matcher = functools.lru_cache(KEPT_GRAMMARS)(self._compiled)

    def json(self, schema: Mapping[str, Any] | None = None, lenient: bool = False) -> Callable[[], JsonGrammar]:
        """Return a function that makes a processor for one generation, which writes JSON of a schema.

        This may take seconds for a new schema, so a server calls it in a thread.

        Args:
            schema: a JSON schema; None for any JSON object.
            lenient: ignore keywords that are not supported.

        Raises:
            ValueError: not a schema, one that nothing satisfies, one with keywords that are not supported (without
                `lenient`), or one that is too large; the message says which.
            ModuleNotFoundError: llguidance is not installed.
        """
        return self._processors(_grammar({"type": "object"} if schema is None else schema, lenient))

    def calls(
        self,
        tools: Sequence[ToolSchema],
        *,
        form: CallForm | None = None,
        several: bool = True,
        answer: Mapping[str, Any] | None = None,
        lenient_answer: bool = False,
    ) -> Callable[[], JsonGrammar]:
        """Return a function that makes a processor for one generation, which calls tools with valid arguments.

        Args:
            tools: that may be called, at least one.
            form: how calls are written in an answer that consists of calls; None: any text, and calls in any form.
            several: whether an answer may have several calls; if not, it ends after the first.
            answer: the schema of an answer without calls, which is JSON; only with `form`. None: there must be calls.
            lenient_answer: ignore keywords of `answer` that are not supported.
        """
        try:
            schema = None if answer is None else _schema_text(answer, lenient_answer)
            return self._processors(_llguidance().LLMatcher.grammar_from_lark(self._lark(tools, form, several, schema)))
        except ValueError:
            until = time.monotonic() + TRIAL_TIMEOUT
            for tool in tools:
                if time.monotonic() > until:
                    break
                try:
                    _try(_grammar(tool.schema, tool.lenient))
                except ValueError as its:
                    reason = str(its).removeprefix("json_schema: ")
                    raise ValueError(f"json_schema: of {tool.name}, {reason}") from its
            raise

    def _lark(self, tools: Sequence[ToolSchema], form: CallForm | None, several: bool, answer: str | None) -> str:
        """Return the grammar of `calls`, in llguidance's variant of Lark; `answer` is from `_schema_text`."""
        added = self._tokenizer.get_added_vocab()
        tags = {text: [added[text]] if text in added else [] for text in (OPEN, CLOSE)}
        # llguidance takes added tokens such as <think> for no text. They may be anywhere in an answer but in calls.
        kept = set(added.values()) - {*self.eos_ids, *tags[OPEN]}
        others = sorted(token for token in kept if self._vocabulary.is_special_token(token))
        rules = {
            "WS": r"/[ \t\r\n]{1,8}/",
            "TEXT": r"/(.|\n)*/",
            "other": _tokens(others) or '""',
            "open": " | ".join(filter(None, [f'"{OPEN}"', _tokens(tags[OPEN])])),
            "close": " | ".join(filter(None, [f'"{CLOSE}"', _tokens(tags[CLOSE])])),
            "tagged": "WS? call WS? close",
            # A lazy rule matches as soon as it can, so that no text goes on after it.
            "tag[lazy]": f'TEXT "{OPEN}"',
            "opened": " | ".join(["tag", *(f"TEXT {_tokens([token])}" for token in tags[OPEN])]),
            "call": " | ".join(f"head_{n} rest_{n}" for n in range(len(tools))),
            "first": " | ".join(f"start_{n} rest_{n}" for n in range(len(tools))),
        }
        # Where the text is free, so is the space in calls. Models that never end would fill it if they must call.
        space, white = (r"[ \t\r\n]{0,8}", WHITESPACE) if form is None else (" ?", r"[ \n]")
        key = "(arguments|parameters)" if form is None else form.key
        for n, tool in enumerate(tools):
            head = rf'\{{{space}"name"{space}:{space}"{re.escape(tool.name)}"{space},{space}"{key}"{space}:'
            rules |= {
                f"head_{n}": f"/{head}/",
                f"start_{n}[lazy]": rf"/[ \t\r\n]*{head}/",
                f"rest_{n}": f'WS? %json {_schema_text(tool.schema, tool.lenient, white)} WS? "}}"',
            }
        if form is None and several:
            rules["start"] = '(opened tagged | TEXT other)* TEXT | other* first (WS? ";" WS? call)*'
        elif form is None:
            rules["start"] = "(TEXT other)* (TEXT | opened tagged) | other* first"
        elif form.tagged:
            rules["start"] = "open tagged" + (" (WS? open tagged)*" if several else "")
        else:
            rules["start"] = "call" + (' (";" " "? call)*' if several else "")
        if form is not None:
            rules["WS"] = r"/[ \n]/"
        if answer is not None:
            rules["start"] += " | answer"
            rules["answer"] = f"%json {answer}"
        lark = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
        if len(lark) > 2 * MAX_SCHEMA:
            raise ValueError(f"json_schema: expected at most {2 * MAX_SCHEMA:,} characters, got {len(lark):,}")
        return lark

    def _processors(self, grammar: str) -> Callable[[], JsonGrammar]:
        with self._lock:  # one trial at a time, and none twice
            matcher = self._matcher(grammar)
        return lambda: JsonGrammar(matcher.deep_copy(), self.vocab_size)

    def _compiled(self, grammar: str) -> Any:
        _try(grammar)
        library = _llguidance()
        limits = library.LLParserLimits(**LIMITS)
        matcher = library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        first = matcher.deep_copy()
        # Some errors appear only once a mask is computed, or after the text's beginning that the schema fixes.
        for _ in range(2):
            _checked_mask(first)
            first.consume_tokens(self._vocabulary.greedy_tokenize(first.compute_ff_bytes().decode("utf-8", "ignore")))
        return matcher

    @functools.cached_property
    def _vocabulary(self) -> Any:
        _llguidance()
        from llguidance.hf import from_tokenizer

        size = max(self.vocab_size, len(self._tokenizer), max(self.eos_ids) + 1)
        return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self.eos_ids)


class JsonGrammar:
    """Sets the scores of tokens that a grammar forbids to -inf, for one generation.

    Args:
        matcher: llguidance's, at the beginning of the text; belongs to this processor alone.
        vocab_size: rows of the model's `lm_head`.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._prompt: int | None = None
        self._length = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [1, V] of the token after a text [1, length].

        The first call's text is the prompt. Each later text must begin with the previous one.
        """
        length = input_ids.shape[1]
        if self._prompt is None:
            self._prompt = self._length = length
        if length < self._length:
            raise ValueError(f"grammar: expected a text of at least {self._length} tokens, got {length}; use a new one")
        for place in range(self._length, length):
            token = int(input_ids[0, place])
            if not self._matcher.consume_token(token):
                raise ValueError(f"grammar: expected an allowed token at {self._new(place)}, got {token}")
        self._length = length
        try:
            bits = np.unpackbits(np.frombuffer(_checked_mask(self._matcher), np.uint8), bitorder="little")
        except ValueError as error:
            raise ValueError(f"{error} (at {self._new(length)})") from error
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits[: self._vocab_size]).bool()
        scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        if float(scores.amax()) == -torch.inf:
            raise ValueError(
                f"grammar: expected a token that may follow at {self._new(length)}, got none: other settings forbid "
                "all that the grammar allows"
            )
        return scores

    def _new(self, place: int) -> str:
        assert self._prompt is not None
        return f"new token {place - self._prompt + 1}"


def _grammar(schema: Any, lenient: bool = False) -> str:
    """Return llguidance's form of a schema, which is not checked but for its size and type."""
    try:
        return str(_llguidance().LLMatcher.grammar_from_json_schema(_schema_text(schema, lenient)))
    except ValueError as error:
        raise _refused(str(error)) from error


def _schema_text(schema: Any, lenient: bool = False, white: str = WHITESPACE) -> str:
    """Return a schema as JSON, with llguidance's options; `white` is the pattern of white space between two parts."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"json_schema: expected an object, got {shown(schema)}")
    # This also replaces options of the client's.
    options = {"whitespace_pattern": white, "lenient": lenient}
    try:
        schema = _without_patterns(schema) if lenient else schema
        text = json.dumps({**closed(schema), "x-guidance": options}, allow_nan=False)
    except RecursionError:
        raise ValueError(
            "json_schema: expected a schema with fewer levels, got one that is nested too deeply"
        ) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"json_schema: expected a schema of JSON values, got another object ({error})") from error
    if len(text) > MAX_SCHEMA:
        raise ValueError(f"json_schema: expected at most {MAX_SCHEMA:,} characters, got {len(text):,}")
    return text


def _without_patterns(schema: Any) -> Any:
    """Return a copy of a schema without the patterns that llguidance refuses even if it is lenient."""
    if isinstance(schema, list):
        return [_without_patterns(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in ("const", "enum") else _without_patterns(value)
        for key, value in schema.items()
        if not (key == "pattern" and isinstance(value, str) and UNSUPPORTED.search(value))
    }


def _tokens(ids: Sequence[int]) -> str:
    """Return the rule for one of some tokens; empty for none."""
    return f"<[{','.join(map(str, ids))}]>" if ids else ""


def _try(grammar: str) -> None:
    """Compile a grammar in a process with limits of time and memory; raise `ValueError` if that fails."""
    folder = str(Path(_llguidance().__file__).parents[1])
    settings = json.dumps([folder, TRIAL_SECONDS, TRIAL_MEMORY, LIMITS])
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, settings]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=TRIAL_TIMEOUT)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        raise ValueError(
            f"json_schema: expected a schema that compiles within {TRIAL_SECONDS} s and {TRIAL_MEMORY >> 20} MiB, got "
            "a larger one; use fewer patterns, combinations (allOf, anyOf) or properties"
        )
    error = done.stdout.decode("utf-8", "replace").strip()
    if error:
        raise _refused(error)


def _checked_mask(matcher: Any) -> bytes:
    """Return the bits of the tokens that may come next; raise `ValueError` if the matcher gave up."""
    mask = b"" if matcher.is_error() else bytes(matcher.compute_bitmask())
    if matcher.is_error():
        raise _refused(matcher.get_error())
    return mask


def _refused(reason: str) -> ValueError:
    """Return the error for a reason that llguidance gave."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())
    if len(words) > 300:  # a pattern, then what is wrong with it
        words = f"{words[:100]} .. {words[-150:]}"
    return ValueError(f"json_schema: expected a supported JSON schema, got: {words}")


def _llguidance() -> Any:
    return import_library("llguidance", "JSON output", extra="serve")
