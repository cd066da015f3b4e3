"""Tiny chat models with templates, and transformers' own answers with them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_decoding import MedusaHeads
from medusa_decoding.checkpoints import write_heads

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
# Pairs of letters that have their own token: "ri" may be written as one token or as two.
PAIRS = [first + second for first in "aeiostn" for second in "aeiostnrl" if first != second]


def chat_tokenizer(pairs, template=CHAT_TEMPLATE):
    """A tokenizer with special tokens around messages; its EOS token differs from the template's."""
    tokens = [*"abcdefghijklmnopqrstuvwxyzAUS.,:?!", "\u0120", "\u010a", *pairs, "<|text|>", "<|start|>", "<|end|>"]
    merges = [(pair[0], pair[1]) for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|text|>",
        additional_special_tokens=["<|start|>", "<|end|>"],
        chat_template=template,
    )


@dataclass
class ChatCheckpoint:
    """A checkpoint with a chat template, and what transformers alone does with it."""

    folder: Path
    tokenizer: Any
    model: Any

    @property
    def heads(self):
        return str(self.folder / "heads")

    @property
    def end(self):
        return self.tokenizer.convert_tokens_to_ids("<|end|>")

    def ids(self, messages, **kwargs):
        """A prompt's tokens."""
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **kwargs)["input_ids"]

    def write(self, ids, new_tokens, **kwargs):
        """The new tokens that transformers writes after a prompt."""
        settings = {"do_sample": False, "eos_token_id": [self.end], "pad_token_id": 0} | kwargs
        prompt = torch.tensor([ids])
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            tokenizer=self.tokenizer,
            **settings,
        )
        return out[0, len(ids) :].tolist()

    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def answer(self, messages, new_tokens, **kwargs):
        """The text that transformers answers."""
        return self.text(self.write(self.ids(messages), new_tokens, **kwargs))

    def conversation(self, questions, new_tokens, history=(), **kwargs):
        """The history of a chat: transformers answers each question given all earlier turns."""
        history = list(history)
        for question in questions:
            history.append({"role": "user", "content": question})
            history.append({"role": "assistant", "content": self.answer(history, new_tokens, **kwargs)})
        return history


def write_checkpoint(folder, tokenizer, seed=0, context=128):
    """Write a random base model with its tokenizer, and heads that share its projection; return the model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    heads = MedusaHeads(32, len(tokenizer), 3)
    with torch.no_grad():
        heads.w2.copy_(model.lm_head.weight.expand_as(heads.w2))
    write_heads(heads, folder / "heads", base_model="../base")
    return model


def chat_checkpoint(folder, seed, pairs, context, template):
    """Write a random checkpoint from a seed, with or without tokens for pairs of letters."""
    tokenizer = chat_tokenizer(PAIRS if pairs else [], template)
    return ChatCheckpoint(folder, tokenizer, write_checkpoint(folder, tokenizer, seed, context))
