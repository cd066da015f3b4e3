"""What the recipes of small models start from: a chat model with random weights."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_decoding.training.data.encoding import ChatEncoder
from medusa_decoding.training.data.records import Record
from recipes.demo import base


def test_a_chat_model_with_a_template_that_marks_its_answers(tmp_path):
    data = tmp_path / "chats.jsonl"
    turns = [{"from": "human", "value": "Hello, who are you?"}, {"from": "gpt", "value": "I am a test, hello."}]
    data.write_text("".join(json.dumps({"conversations": turns}) + "\n" for _ in range(3)))
    base.make_base(str(data), tmp_path / "base", vocab_size=300, hidden_size=128, num_layers=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (128, 2)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    messages = ({"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "I am."})
    (example,) = ChatEncoder(tokenizer).encode(Record(messages, None, "here"))
    assert tokenizer.decode(example.ids) == "<|user|>Hello?<|end|><|assistant|>I am.<|end|>"
    assert tokenizer.decode(example.ids[example.learnt]) == "I am.<|end|>"
    prompt = tokenizer.apply_chat_template(list(messages[:1]), add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>Hello?<|end|><|assistant|>"
    with pytest.raises(ValueError, match="out: expected a new folder"):
        base.make_base(str(data), tmp_path / "base")
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of 64, got 100"):
        base.make_base(str(data), tmp_path / "other", hidden_size=100)
