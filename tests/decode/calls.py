"""Calls of transformers' generate with and without heads, and helpers for the tests of them."""

import contextlib
import threading

import pytest
import torch
from models import VOCAB
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, TextIteratorStreamer

from medusa_decoding import Tree, medusa_generate
from medusa_decoding.huggingface.model_cache import _cache

TREE = Tree.cartesian([3, 2])
NEW = 16
IDS = torch.tensor([[1, 2, 3]])
WANTED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def with_heads(model, heads, ids, **kwargs):
    """transformers' generate with `custom_generate`; arguments that are None are not given."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "tree": TREE} | kwargs
    given = {name: value for name, value in given.items() if value is not None}
    return model.generate(ids, custom_generate=medusa_generate, heads=heads, **given)


def plain(model, ids, **kwargs):
    """The same without heads."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False} | kwargs
    return model.generate(ids, **{name: value for name, value in given.items() if value is not None})


def attentions(model):
    """The current attention module of each layer."""
    return [layer.self_attn for layer in model.model.layers]


def kept(model):
    """The MedusaModels cached for a model between calls."""
    return list(_cache.get(model, {}).values())


def one_letter_per_token():
    """A tokenizer with one letter per token, as many as the tiny models' vocabulary has."""
    letters = Tokenizer(models.WordLevel({"abcdefghijk"[i]: i for i in range(VOCAB)}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="a", padding_side="left")


class Recorder:
    """A streamer that records its calls; calls `at(count of put)` at each `put`, the first of which is the prompt's."""

    def __init__(self, at=lambda seen: None):
        self.values, self.ended, self.at = [], 0, at

    def put(self, value):
        assert not self.ended
        assert value.device.type == "cpu"
        self.values.append(value.tolist())
        self.at(len(self.values))

    def end(self):
        self.ended += 1


def read_by_thread(tokenizer, generate, error=None):
    """Return the text that another thread reads from the streamer of a generation, which may have to fail."""
    streamer, read = TextIteratorStreamer(tokenizer, skip_prompt=True), []
    reader = threading.Thread(target=lambda: read.append("".join(streamer)), daemon=True)
    reader.start()
    with pytest.raises(error) if error else contextlib.nullcontext():
        generate(streamer=streamer)
    reader.join(timeout=30)
    assert streamer.text_queue.empty(), "ended twice"
    [text] = read
    return text


def filled():
    """A cache of two tokens."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8), 0)
    return cache
