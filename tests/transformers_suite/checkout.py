"""A pytest plugin with which the tests of a transformers checkout are tests of `medusa_generate`.

    make test-transformers TRANSFORMERS_SOURCE=../transformers

Each call of `generate` that those tests make of a model that can have heads is made with heads as well. What the tests
get is transformers' own output, so that they go on; greedy texts, scores and logits must be the same. A call that is
refused is made again without what was refused. REFUSED says which tests are refused what, and is checked both ways.
"""

import collections
import copy
import functools
import re
from typing import Any

import pytest
import torch
from models import FAMILIES, MORE_FAMILIES, heads_for
from transformers import GenerationMixin

from medusa_decoding import Tree, medusa_generate

MODELS = {kind.__name__ for _, kind in FAMILIES.values()} | {f"{name}ForCausalLM" for name, _ in MORE_FAMILIES.values()}
LEAST_COMPARED = 300
# Refused arguments without which there is still a text to compare.
DROPPED = ("output_attentions", "output_hidden_states", "num_beams", "assistant_model")
OUTPUTS = {"output_attentions", "output_hidden_states"}
# What the calls of each test are refused for. transformers itself calls an assistant's `generate` with is_assistant.
REFUSED = {
    "test_assisted_decoding_matches_greedy_search_0_random": OUTPUTS | {"assistant_model", "is_assistant"},
    "test_assisted_decoding_matches_greedy_search_1_same": OUTPUTS | {"assistant_model", "is_assistant"},
    "test_assisted_decoding_sample": OUTPUTS | {"assistant_model", "is_assistant"},
    "test_beam_sample_generate": {"num_beams"},
    "test_beam_sample_generate_dict_output": OUTPUTS | {"num_beams"},
    "test_beam_search_generate": {"num_beams"},
    "test_beam_search_generate_dict_output": OUTPUTS | {"num_beams"},
    "test_beam_search_generate_dict_outputs_use_cache": OUTPUTS | {"num_beams"},
    "test_generate_continue_from_inputs_embeds": {"inputs_embeds"},
    "test_generate_continue_from_past_key_values": {"past_key_values"},
    "test_generate_from_inputs_embeds_0_greedy": {"inputs_embeds"},
    "test_generate_from_inputs_embeds_1_beam_search": {"inputs_embeds", "num_beams"},
    "test_generate_from_inputs_embeds_with_static_cache": {"inputs_embeds"},
    "test_generate_from_random_inputs_embeds": {"inputs_embeds"},
    "test_greedy_generate_dict_outputs": OUTPUTS,
    "test_greedy_generate_dict_outputs_use_cache": OUTPUTS,
    "test_sample_generate_dict_output": OUTPUTS,
}


class Comparison:
    """What was compared, refused and found to differ, by test."""

    def __init__(self) -> None:
        self.test = ""
        self.compared = self.sampled = 0
        self.ran: set[str] = set()
        self.refused: dict[str, set[str]] = collections.defaultdict(set)
        self.differ: list[str] = []
        self.plain = GenerationMixin.generate

    def generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the call with heads, then return what transformers makes of it."""
        if type(model).__name__ in MODELS and kwargs.get("custom_generate") is None:
            drawn = torch.get_rng_state()
            self.ran.add(self.test)
            self.compare(model, args, without_right_padding(kwargs))
            torch.set_rng_state(drawn)
        return self.plain(model, *args, **kwargs)

    def compare(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Make a call with and without heads; what is refused is dropped, as long as a text is left to compare."""
        medusa = {"custom_generate": medusa_generate, "heads": heads_for(model, 3), "tree": Tree.cartesian([3, 2])}
        while True:
            try:
                got = self.plain(model, *args, **kwargs, **medusa)
                break
            except ValueError as error:
                name = re.match(r"(?:generation_config\.)?(\w+): expected", str(error))
                if name is None:
                    self.differ.append(f"{self.test}: {error}")
                    return
                self.refused[self.test].add(name[1])
                if name[1] not in DROPPED or name[1] not in kwargs:
                    return
                kwargs = {key: value for key, value in kwargs.items() if key != name[1]}
                if name[1] == "num_beams":
                    kwargs.pop("num_return_sequences", None)
        if kwargs.get("do_sample"):
            self.sampled += 1
            return
        caches = "past_key_values", "cache"  # the name before transformers 5.24, and since
        expected = self.plain(model, *args, **{name: value for name, value in kwargs.items() if name not in caches})
        self.compared += 1
        same = sequences(got).tolist() == sequences(expected).tolist()
        for name in ("scores", "logits"):
            some, others = getattr(expected, name, None), getattr(got, name, None)
            if same and some is not None:
                same = others is not None and torch.allclose(torch.stack(some), torch.stack(others), 1e-3, 1e-3)
        if not same:
            self.differ.append(f"{self.test}: another text or other scores with {sorted(kwargs)}")


def without_right_padding(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Reverse masks that pad on the right, with which transformers would continue after the padding.

    The masked tokens, which its repetition penalty counts, become some that it counts anyway. A row has two tokens at
    least, because it bans words (of two tokens in these tests) only in rows that are as long.
    """
    kwargs = {name: copy.copy(value) for name, value in kwargs.items()}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask[:, -1] == 0).any()):
        mask, ids = mask.flip(1), kwargs.get("input_ids")
        mask[:, -2:] = 1
        kwargs |= {"attention_mask": mask, "position_ids": None}
        if ids is not None:
            kwargs["input_ids"] = ids.where(mask.bool(), ids[:, -1:])
    return kwargs


def sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


comparison = Comparison()


@functools.wraps(comparison.plain)
def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return comparison.generate(model, *args, **kwargs)


GenerationMixin.generate = generate


def pytest_runtest_setup(item: pytest.Item) -> None:
    comparison.test = item.name


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    wrong = list(comparison.differ)
    for test in sorted(comparison.ran):
        listed, refused = REFUSED.get(test, set()), comparison.refused.get(test, set())
        if listed != refused:
            wrong.append(f"{test}: refused for {sorted(refused) or 'nothing'}, listed: {sorted(listed) or 'nothing'}")
    if comparison.compared < LEAST_COMPARED:
        wrong.append(f"only {comparison.compared} texts compared, expected at least {LEAST_COMPARED}")
    print(f"\n{comparison.compared} greedy texts compared, {comparison.sampled} drawn, {len(comparison.ran)} tests")
    for line in wrong:
        print(f"WRONG {line}")
    if wrong and exitstatus == 0:
        session.exitstatus = 1
