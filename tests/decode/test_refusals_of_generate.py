"""docs/generate.md against the code: every field is listed, and what is listed as refused is refused by name."""

import re
from pathlib import Path

import pytest
import torch
from calls import IDS, Recorder, filled, with_heads
from models import heads_for, tiny
from transformers import GenerationConfig

from medusa_decoding import MedusaModel
from medusa_decoding.generation import settings

PAGE = Path(__file__).parents[2] / "docs" / "generate.md"
OBEYED, IGNORED, REFUSED = (
    PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0] for title in ("Obeyed", "Ignored", "Refused")
)
FIELDS, ARGUMENTS = REFUSED.split("Arguments of transformers'")


def named(text):
    """Names in backticks; if the text is a table, those in the first cell of each row."""
    rows = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    return rows or re.findall(r"`(\w+)`", text)


FIELD_VALUES = {
    "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": [object()],
    "force_words_ids": [[1]], "penalty_alpha": 0.6, "dola_layers": "high", "guidance_scale": 1.5,
    "prompt_lookup_num_tokens": 3, "assistant_early_exit": 1, "use_mtp": True, "is_assistant": True,
    "token_healing": True, "output_attentions": True, "output_hidden_states": True, "cache_implementation": "offloaded",
}  # fmt: skip
ARGUMENT_VALUES = {
    "assistant_model": {"assistant_model": tiny(seed=7)},
    "synced_gpus": {"synced_gpus": True},
    "past_key_values": {"past_key_values": filled()},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "attention_mask": {"attention_mask": torch.tensor([[1, 0, 1]])},
    "position_ids": {"position_ids": torch.tensor([[1, 2, 3]])},
    "streamer": {"streamer": Recorder(), "ids": IDS.repeat(2, 1)},
    "stop_strings": {"stop_strings": "a"},
}


def test_the_page_lists_what_the_code_refuses_and_ignores():
    assert named(FIELDS) == [*settings._CANNOT, "cache_implementation"] == list(FIELD_VALUES)
    assert named(IGNORED.split("With `custom_generate`")[0]) == list(settings._IGNORED)
    assert named(ARGUMENTS) == list(ARGUMENT_VALUES)


def test_every_field_of_a_generation_config_is_on_the_page():
    table = "".join(line for line in OBEYED.splitlines() if line.startswith("|"))
    obeyed = re.findall(r"`(\w+)`", table)
    listed = {*obeyed, *settings._IGNORED, *settings._CANNOT}
    assert not set(obeyed) & {*settings._IGNORED, *settings._CANNOT}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert fields <= listed, "fields that this transformers has got since: obey, ignore or refuse them"


@pytest.mark.parametrize("name", FIELD_VALUES)
def test_each_listed_field_is_refused_by_name(model, name):
    if not hasattr(model.generation_config, name):
        pytest.skip(f"this transformers has no {name}")
    heads = heads_for(model)
    with MedusaModel(model, heads) as medusa, pytest.raises(ValueError, match=f"^{name}: expected .*, got"):
        medusa.generate(IDS, max_new_tokens=2, **{name: FIELD_VALUES[name]})
    # In the model's own config, as transformers does not let every value through as an argument.
    setattr(model.generation_config, name, FIELD_VALUES[name])
    ours = rf"^(generation_config\.)?{name}: expected .*, got"
    # transformers itself misses the tokenizer that it does not hand on, and, in torch for CUDA without a GPU, a stream.
    theirs = {"token_healing": "with token healing", "cache_implementation": f"{ours}|support create a new Stream"}
    with pytest.raises((ValueError, RuntimeError), match=theirs.get(name, ours)):
        with_heads(model, heads, IDS, return_dict_in_generate=True)


@pytest.mark.parametrize("name", ARGUMENT_VALUES)
def test_each_listed_argument_is_refused_by_name(model, name):
    named_in_message = "tokenizer" if name == "stop_strings" else name
    with pytest.raises(ValueError, match=f"^{named_in_message}: expected .*, got"):
        with_heads(model, heads_for(model), **({"ids": IDS} | ARGUMENT_VALUES[name]))
