"""A checkpoint folder small enough to make in a test: base model, tokenizer and heads."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_decoding import MedusaHeads
from medusa_decoding.checkpoints import write_heads

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
