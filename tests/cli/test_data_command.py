"""`medusa data check`: counts, what is wrong, and the verdict of a run; records that another program wrote."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from medusa_decoding.cli import main
from medusa_decoding.training.data.encoding import fingerprint

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import toy
import workshop


@pytest.fixture
def check(tmp_path, capsys):
    """Check records and return the exit code and the JSON."""

    def run(*records, options=()):
        file = toy.write_lines(tmp_path / "data.jsonl", *records)
        code = main(["data", "check", str(file), "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def base(tmp_path):
    return workshop.make_base(tmp_path / "base")


@pytest.fixture
def record(base):
    """Make a record with the keys that are needed and no others."""
    tokenizer = AutoTokenizer.from_pretrained(base)

    def make(question, answer, closed=True):
        texts = f"Question: {question} Answer: ", answer
        prompt, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        ids += [tokenizer.eos_token_id] * closed
        return {
            "messages": toy.chat(question, answer),
            "input_ids": prompt + ids,
            "learnt": [[len(prompt), len(prompt) + len(ids)]],
            "tokenizer": fingerprint(tokenizer),
        }

    return make


def test_records_of_all_kinds_are_counted_and_bad_ones_named(check):
    first = toy.sharegpt("Hi", "Hello", "And?", "No.")
    good = [first, {"prompt": "hi ", "response": "x", "persona": "A pirate."}, {"text": "Once."}]
    code, found = check(*good)
    assert (code, found["refused"], found["read"], found["good_records"]) == (0, None, 3, 3)
    assert found["kinds"] == {"sharegpt": 1, "prompt": 1, "text": 1}
    assert (found["user_turns"], found["answers"], found["repeated_prompts"]) == (3, 3, 1)
    assert found["notes"] == {"'persona' is not read": 1}
    code, found = check(*good, {"prompt": "alone"}, "{")
    assert (code, found["prompts_alone"]) == (1, 1)
    assert [place.rpartition(":")[2] for place, _ in found["examples"]] == ["4", "5"]
    assert "2 of 5 records bad" in found["refused"]
    code, found = check(*good, {"prompt": "alone"}, options=["--seeds"])
    assert (code, found["prompts_alone"], found["good_records"]) == (0, 1, 4)


def test_token_ids_are_compared_with_the_tokenizer_and_the_text(check, base, record, capsys):
    options = ["--model", str(base), "--length", "20"]
    other = record("one?", "two") | {"messages": toy.chat("one?", "three")}
    text = record("", "Hello there.")
    del text["messages"]
    spelt = {"text": AutoTokenizer.from_pretrained(base).decode(text["input_ids"])}
    long = toy.sharegpt("Hello?", "Paris is the capital of France, thank you. " * 3)
    code, found = check(record("a?", "b"), other, record("c?", "d", closed=False), text | spelt, long, options=options)
    assert (code, found["refused"], found["kinds"]) == (0, None, {"token ids": 4, "sharegpt": 1})
    assert [where.rpartition(":")[2] for where in found["ids_of_other_text"]] == ["2"]
    assert (found["answers_without_end"], found["longer_than_a_row"], found["tokens"] > 20) == (1, 1, True)
    assert found["median_tokens"] < 20 < found["p95_tokens"] == found["most_tokens"]
    assert found["notes"] == {"longer than 20 tokens: truncate": 1}
    beyond = record("a?", "b") | {"learnt": [[3, 400]]}
    code, found = check(record("a?", "b"), beyond, options=options)
    assert (code, found["examples"][0][1]) == (1, "learnt is not a list of spans [start, end] of input_ids in order")
    code, found = check(record("a?", "b") | {"tokenizer": "ab"}, options=options)
    assert code == 1
    assert "was written with, fingerprint ab, got" in found["refused"]
    assert main(["data", "check", "--model", str(base), "--seeds", str(base)]) == 2


def test_records_with_the_needed_keys_alone_are_trained_on(base, record, tmp_path, capsys):
    pytest.importorskip("accelerate", reason="the extra 'train' is not installed")
    file = toy.write_lines(tmp_path / "data.jsonl", *(record(f"{n}?", "one two three") for n in range(9)))
    settings = workshop.config(tmp_path / "out", base, file, optimisation={"max_steps": 1, "warmup_steps": 0})
    (tmp_path / "config.yaml").write_text(settings.to_yaml())
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1
