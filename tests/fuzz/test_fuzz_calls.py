"""Public calls with hostile arguments: a ValueError that says what was expected, or what the call is for."""

import inspect
import itertools

import numpy as np
import pytest
import torch
from limits import MIB, bounded
from models import heads_for, tiny

import medusa_decoding
from medusa_decoding import MedusaHeads, MedusaModel, Session, Tree, TreeCache, medusa_generate
from medusa_decoding.checkpoints import export

IDS = torch.tensor([[1, 2, 3]])
VALUES = {
    "text": "text", "none": None, "five": 5, "fraction": 1.5, "empty": [], "lists": [[1, 2]], "object": object(),
    "nan": float("nan"), "minus": -1, "63 bits": 2**63, "true": True, "array": np.array([[1]]),
    "floats": torch.tensor([[1.0]]), "no columns": torch.zeros(1, 0, dtype=torch.int64),
    "beyond": torch.tensor([[2**40]]), "meta": torch.zeros(1, 1, dtype=torch.int64, device="meta"),
}  # fmt: skip
CONFIG = (
    "num_return_sequences", "repetition_penalty", "eos_token_id", "pad_token_id", "max_time", "output_scores",
    "min_new_tokens", "max_length", "min_length", "min_p", "suppress_tokens", "sequence_bias", "forced_eos_token_id",
    "typical_p", "exponential_decay_length_penalty", "num_beams", "no_such_argument",
)  # fmt: skip
NAMED = [
    name
    for name in inspect.signature(MedusaModel.generate).parameters
    if name not in ("self", "input_ids", "generation")
]


@pytest.fixture(scope="module")
def model():
    base = tiny()
    with MedusaModel(base, heads_for(base), Tree.chain(2)) as medusa:
        medusa.generate(IDS, max_new_tokens=2)
        yield medusa


def within_reach(name, value):
    """Whether a call with this value may do what it is asked to, however long that takes."""
    return not (name in ("max_length", "max_new_tokens", "min_new_tokens") and isinstance(value, int) and value > 9999)


def test_prompts_that_are_no_tensors_say_what_to_do(model):
    for value, got in (
        ("text", "str; tokenize it first"),
        ([[1]], "list"),
        (None, "NoneType"),
        (IDS.numpy(), "ndarray"),
    ):
        with pytest.raises(ValueError, match=rf"input_ids: expected a tensor of token ids \[B, T\], got {got}"):
            model.generate(value)


@pytest.mark.parametrize("value", VALUES)
def test_generate_refuses_what_it_cannot_continue(model, value):
    for call in (
        lambda: model.generate(VALUES[value], max_new_tokens=2),
        lambda: model.generate(IDS, VALUES[value], max_new_tokens=2),
    ):
        with bounded(ValueError, memory=32 * MIB):
            call()


@pytest.mark.parametrize("name", [*NAMED, *CONFIG])
def test_generate_refuses_settings_by_name(model, name):
    for value in VALUES.values():
        if within_reach(name, value):
            settings = {"max_new_tokens": 2, "do_sample": True} | {name: value}
            with bounded(ValueError, MemoryError, memory=32 * MIB):
                model.generate(IDS, **settings)


@pytest.mark.parametrize("extra", [{}, {"do_sample": True}, {"stopping_criteria": [lambda ids, scores: False]},
                                   {"repetition_penalty": 1.1}, {"tree": Tree([[0]], lookup=2)}])  # fmt: skip
def test_tokens_beyond_memory_are_refused_before_anything_is_allocated(model, extra):
    with bounded(MemoryError, memory=32 * MIB) as said:
        model.generate(IDS, max_new_tokens=2**31 - 1, **extra)
    assert "of 2,147,483,647 new tokens per row" in said[0]


@pytest.mark.parametrize("value", VALUES)
def test_constructors_refuse_by_name(value):
    value = VALUES[value]
    base = tiny()
    calls = [
        lambda: MedusaModel(value),
        lambda: MedusaModel(base, value).undo(),
        lambda: MedusaModel(base, None, value).undo(),
        lambda: MedusaModel(base, None, None, value).undo(),
        lambda: MedusaModel.from_pretrained(value),
        lambda: medusa_generate(value, value),
        lambda: medusa_generate(base, value),
        lambda: Session().take(None, None, value) if value is None else None,
        lambda: export(value, "never-written", "native"),
    ]
    for call in calls:
        with bounded(ValueError, OSError, memory=64 * MIB):
            call()
    assert base.model.layers[0].self_attn.forward.__func__ is type(base.model.layers[0].self_attn).forward


@pytest.mark.parametrize("make", [MedusaHeads, Tree, Tree.chain, Tree.cartesian, Tree.dynamic, Tree.optimal, Tree.load])
def test_shapes_and_sizes_are_checked_first(make):
    names = [name for name in inspect.signature(make).parameters if name not in ("dtype", "device")]  # torch's own
    well = {"hidden_size": 8, "vocab_size": 11, "num_heads": 2, "choices": [[0]], "length": 2, "widths": [2],
            "num_nodes": 2, "depth": 1, "accuracies": [[0.5]], "path": "missing.json"}  # fmt: skip
    for name, value in itertools.product(names, VALUES.values()):
        given = {one: well[one] for one in names if one in well} | {name: value}
        with bounded(ValueError, OSError, MemoryError, memory=64 * MIB):
            make(**given)


def test_every_public_name_is_in_these_tests():
    assert set(medusa_decoding.__all__) == {
        MedusaHeads.__name__, MedusaModel.__name__, "MedusaOutput", Session.__name__, Tree.__name__,
        TreeCache.__name__, medusa_generate.__name__,
    }  # fmt: skip
