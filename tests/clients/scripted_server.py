"""Run `medusa serve` with a demo model that can call one tool.

The demo model does not know tools. If the prompt asks for the weather in Paris or Rome, a logits processor makes the
model write a call of the tool `get_weather`. Once there is a result, it makes it repeat the result, for Paris only. The
model answers all other requests itself. The HTTP server, the engine and the decode loop are the real ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from medusa_decoding.cli import main
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.serving import engine

TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT / "base")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


def scripted_answer(prompt: str) -> str | None:
    """Return what the model must write after a prompt, or None if it may write what it wants."""
    city = re.search(r"<\|user\|>What is the weather in (\w+)\?", prompt)
    if city is None:
        return None
    results = re.findall(r"<\|user\|>Result: (.*?)<\|end\|>", prompt, re.DOTALL)
    if results:
        return f"The weather in Paris: {results[-1]}." if city[1] == "Paris" else None
    return CALL % city[1] if re.search(r'<\|user\|>Tools: .*"get_weather"', prompt) else "I have no tool for this."


class Script:
    """A logits processor that allows only the next token of a text."""

    def __init__(self, prompt_length: int, tokens: Sequence[int]) -> None:
        self.prompt_length, self.tokens = prompt_length, list(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = min(input_ids.shape[1] - self.prompt_length, len(self.tokens) - 1)
        others = torch.ones_like(scores, dtype=torch.bool)
        others[:, self.tokens[place]] = False
        return scores.masked_fill(others, -torch.inf)


class ScriptedEngine(engine.Engine):
    """The server's engine, with scripted answers."""

    def submit(self, prompt: Sequence[int], deliver: Any, **asked: Any) -> Any:
        text = scripted_answer(TOKENIZER.decode(prompt))
        if text is not None:
            tokens = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
            given = asked.get("make_processors") or list
            asked["make_processors"] = lambda: [Script(len(prompt), tokens), *given()]
        return super().submit(prompt, deliver, **asked)


if __name__ == "__main__":
    engine.Engine = ScriptedEngine
    sys.exit(main(["serve", *sys.argv[1:]]))
