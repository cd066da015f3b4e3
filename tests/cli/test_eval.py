"""medusa eval: on the embedded model, and how it refuses."""

import json

import pytest

from medusa_decoding.cli import main

QUESTIONS = [
    {"question_id": 1, "category": "code", "turns": ["def f(x):\n", "def g(x):\n"]},
    {"question_id": 2, "category": "tests", "turns": ["import os\n"]},
]
ARGV = ["--max-new-tokens", "12", "--tree", "chain:2"]


@pytest.fixture
def file(write_lines):
    return str(write_lines("questions.jsonl", *QUESTIONS))


def test_the_embedded_model_with_json_and_file(capsys, file, tmp_path):
    out = tmp_path / "figures.json"
    assert main(["eval", "--prompts", file, "--dtype", "float32", *ARGV, "--json", "--out", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == figures
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")] == []
    assert set(figures["categories"]) == {"code", "tests"}
    overall = figures["overall"]
    assert (overall["prompts"], overall["texts"]) == (2, 3)
    assert overall["identical"] == {"plain": 3, "transformers": 3}
    new_tokens = sum((int(length) + 1) * count for length, count in overall["accepted_histogram"].items())
    assert new_tokens == overall["new_tokens"] - 3  # each text's first token is the prefill's
    assert overall["tokens_per_step"]["value"] == pytest.approx(new_tokens / overall["steps"])
    assert set(overall["speedup"]) == {"plain", "transformers"}
    assert figures["settings"]["tree"] == "3 nodes"
    assert figures["prompts"] == [file]


def test_questions_are_wrapped_in_the_chat_template(capsys, chat, write_lines):
    path = write_lines("asked.jsonl", {"prompt": "hello"})
    answer = chat.write(chat.ids([{"role": "user", "content": "hello"}]), 40)
    argv = ["eval", "--model", chat.heads, "--prompts", str(path), "--max-new-tokens", "40", "--json"]
    assert main(argv) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["overall"]["new_tokens"] == len(answer) < 40  # the template's end of turn was found
    assert list(figures["categories"]) == ["asked"]
    assert figures["settings"]["template"] == "chat"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompts", "FILE", "--categories", "poems"], "categories: expected some of code, tests, got poems"),
        (["--prompts", "missing.jsonl"], r"expected a file, .* got missing.jsonl"),
        (["--prompts", "FILE", "--out", "no/such/folder/x.json"], "--out: expected a file in a folder that exists"),
        (["--prompts", "ODD"], r"prompts: expected a record with a prompt in .*odd.jsonl:1, got: none of the keys"),
    ],
)
def test_bad_input_is_refused(refused, file, write_lines, argv, words):
    places = {"FILE": file, "ODD": write_lines("odd.jsonl", {"query": "?"})}
    refused(words, "eval", *(places.get(word, word) for word in argv), *ARGV)
