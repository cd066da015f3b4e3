"""Checkpoint folders small enough to make in a test: base model, tokenizer, heads; with a chat template and without."""

import io
import json
import re

import pytest
import torch
from chats import CHAT_TEMPLATE, chat_checkpoint, write_checkpoint
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from medusa_decoding.cli import _display, main

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    write_checkpoint(folder, PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    return folder


@pytest.fixture(scope="session")
def model_text(checkpoint):
    """The text that transformers alone writes after a prompt: `model_text(prompt, new_tokens, **settings)`."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "base")
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "base")

    def write(prompt, new_tokens, **settings):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        settings = {"do_sample": False, "pad_token_id": 0, "tokenizer": tokenizer} | settings
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **settings)
        return tokenizer.decode(out[0, ids.shape[1] :])

    return write


@pytest.fixture
def refused(capsys):
    """Run a command that is refused: `refused(words, *argv)` finds the words in its one line of error; exit code 2."""

    def run(words, *argv):
        assert main([str(word) for word in argv]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = [line for line in captured.err.splitlines() if line.startswith("medusa: ")]
        assert re.search(words, line)

    return run


@pytest.fixture
def write_lines(tmp_path):
    """Write values as JSON lines: `write_lines(name, *values)` returns the file."""

    def write(name, *values):
        file = tmp_path / name
        file.write_text("".join(json.dumps(value) + "\n" for value in values))
        return file

    return write


@pytest.fixture(scope="session")
def make_chat(tmp_path_factory):
    """Make chat checkpoints: `make_chat(seed, pairs=False, context=512, template=..)`; equal ones once."""
    made = {}

    def make(seed=4, pairs=False, context=512, template=CHAT_TEMPLATE):
        key = (seed, pairs, context, template)
        if key not in made:
            made[key] = chat_checkpoint(tmp_path_factory.mktemp("chat"), *key)
        return made[key]

    return make


@pytest.fixture
def chat(make_chat):
    """A chat checkpoint whose tokenizer has only one way to encode a text."""
    return make_chat()


@pytest.fixture
def talk(monkeypatch, capsys):
    """Run `medusa chat` on a checkpoint with lines (or a text) as its standard input: (exit code, output, errors)."""

    def run(checkpoint, lines, *argv):
        text = lines if isinstance(lines, str) else "".join(line + "\n" for line in lines)
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["chat", "--model", checkpoint.heads, *map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def at_terminal(monkeypatch):
    """Make commands in this process believe that standard output is a terminal of some width."""

    def arrange(width=100, height=40):
        def terminal():
            return Console(force_terminal=True, color_system="truecolor", width=width, height=height, highlight=False)

        monkeypatch.setattr(_display, "terminal", terminal)
        monkeypatch.setattr(_display, "REPLAY", 0.0)

    return arrange
