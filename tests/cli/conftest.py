"""Checkpoint folders small enough to make in a test: base model, tokenizer, heads; with a chat template and without."""

import io

import pytest
import torch
from chats import CHAT_TEMPLATE, chat_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_decoding import MedusaHeads
from medusa_decoding.checkpoints import write_heads
from medusa_decoding.cli import main

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "base")
    heads = MedusaHeads(32, len(ALPHABET), 3)
    with torch.no_grad():
        heads.w2.copy_(model.lm_head.weight.expand_as(heads.w2))
    write_heads(heads, folder / "heads", base_model="../base")
    return folder


@pytest.fixture
def model_text(checkpoint):
    """What transformers alone writes behind a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def write(prompt, new_tokens):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint / "base")
        model = AutoModelForCausalLM.from_pretrained(checkpoint / "base")
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        return tokenizer.decode(out[0, ids.shape[1] :])

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
    """A chat checkpoint whose tokenizer divides every text in one way only."""
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
