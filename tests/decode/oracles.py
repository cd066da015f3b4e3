"""Reference results: exact distributions, a bound on false alarms, heads that know a text.

Nothing here calls the code under test: probabilities come from transformers' forward and the formulas below.
"""

import itertools
import math

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from medusa_decoding import MedusaHeads

FALSE_ALARM = 1e-6
"""Probability that a right implementation fails any of the tests of distributions, for seeds drawn at random."""
MOST_CHECKS = 500
"""At least as many as there are such checks; each gets an equal share of `FALSE_ALARM` (a union bound)."""


def new_tokens(output, width):
    """Each row's new tokens without padding."""
    return [row[width : width + n].tolist() for row, n in zip(output.sequences, output.new_tokens, strict=True)]


def assert_some_accepted(output):
    """Fail if no draft token was accepted: equal texts would then say nothing about the tree."""
    assert sum(map(sum, output.accept_lengths)) > 0, "no draft token was accepted: the test shows nothing"


def next_logits(model, prefixes):
    """Logits after prefixes of one length from transformers' own forward, fp64 [R, V]."""
    with torch.no_grad():
        return model(torch.tensor(prefixes)).logits[:, -1].double().numpy()


def softmax(logits):
    """Along the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the distribution to draw from, [V]: temperature, then the top k, then the nucleus, then min_p.

    The nucleus is the smallest set of likeliest tokens that holds top_p of the probability.
    """
    probabilities = softmax(np.asarray(logits, dtype=np.float64) / temperature)
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if top_k:
        order = order[:top_k]
    mass, kept = sum(probabilities[token] for token in order), []
    for token in order:
        if sum(probabilities[kept]) >= top_p * mass:
            break
        kept.append(token)
    kept = [token for token in kept if probabilities[token] >= min_p * probabilities[order[0]]]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def joint(model, prompt, length, *, eos=(), change=lambda text, logits: logits, **settings):
    """Return the exact probabilities of all texts of `length` new tokens, fp64 [V] * length.

    Args:
        model: transformers' model.
        prompt: list of tokens.
        length: new tokens.
        eos: tokens that end a text; token 0 pads it.
        change: (text, logits) to the logits as a processor returns them.
        **settings: of `distribution`.
    """
    vocab = model.config.vocab_size
    probabilities = np.ones(())
    for place in range(length):
        prefixes = list(itertools.product(range(vocab), repeat=place))
        logits = next_logits(model, [[*prompt, *prefix] for prefix in prefixes])
        rows = []
        for prefix, row in zip(prefixes, logits, strict=True):
            if any(token in eos for token in prefix):
                rows.append(np.eye(vocab)[0])
            else:
                rows.append(distribution(change([*prompt, *prefix], row), **settings))
        following = np.array(rows).reshape((vocab,) * (place + 1))
        probabilities = probabilities[..., None] * following
    assert abs(probabilities.sum() - 1.0) < 1e-9
    return probabilities


def log_false_alarm(counts, probabilities):
    """Bound the logarithm of the probability of counts at least this far from their distribution.

    The distance is D, the relative entropy of the observed shares to the exact probabilities (2 n D is the statistic of
    the G-test, a chi-square test). Of n draws from k possible outcomes, P(D >= d) is at most
    exp(-n d) (e n d / (k - 1)) ** (k - 1) for n d > k - 1: a bound that holds for every n (Agrawal 2020, "Finite-sample
    concentration of the multinomial in relative entropy", theorem I.2), not an approximation for large ones.
    -inf if an impossible outcome was seen.
    """
    counts, probabilities = np.ravel(counts), np.ravel(probabilities)
    if counts[probabilities == 0].any():
        return -math.inf
    seen, total = counts > 0, counts.sum()
    distance = float((counts[seen] * np.log(counts[seen] / (total * probabilities[seen]))).sum())
    free = int((probabilities > 0).sum()) - 1
    if free == 0 or distance <= free:
        return 0.0
    return -distance + free * (1.0 + math.log(distance / free))


def fits(counts, probabilities):
    """Whether chance alone can explain the counts."""
    return log_false_alarm(counts, probabilities) > math.log(FALSE_ALARM / MOST_CHECKS)


def counted(texts, vocab):
    """Return how often each text was seen: texts [R, length] to counts [V] * length."""
    texts = np.asarray(texts)
    counts = np.zeros((vocab,) * texts.shape[1], dtype=np.int64)
    np.add.at(counts, tuple(texts.T), 1)
    return counts


def taught(model, texts, num_heads=4, *, first=0.6, second=0.25, seed=0):
    """Heads that propose given texts: exactly if these have fewer positions than the model's hidden size.

    At each position a head's right token ranks first, second, or last, by chance.

    Args:
        model: transformers' model, not swapped.
        texts: (tokens of the prompt, new tokens) of each text.
        num_heads: how many.
        first: share of positions where the right token ranks first.
        second: and where it ranks second.
        seed: of the shares.
    """
    generator = torch.Generator().manual_seed(seed)
    vocab, size = model.config.vocab_size, model.config.hidden_size
    heads = MedusaHeads(size, vocab, num_heads)
    hidden, known = [], []
    for prompt, new in texts:
        text = [*prompt, *new]
        with torch.no_grad():
            states = model.model(torch.tensor([text])).last_hidden_state[0].double()
        for place in range(len(prompt) - 1, len(text) - 1):
            hidden.append(states[place])
            known.append([text[place + 2 + head] if place + 2 + head < len(text) else 0 for head in range(num_heads)])
    inverse = torch.linalg.pinv(torch.stack(hidden))
    for head in range(num_heads):
        right = torch.tensor([row[head] for row in known])
        wanted = torch.rand(len(known), vocab, generator=generator, dtype=torch.float64)
        chance = torch.rand(len(known), generator=generator)
        wanted[torch.arange(len(known)), (right + 1) % vocab] = 2.0
        value = torch.where(chance < first, 3.0, torch.where(chance < first + second, 1.5, -1.0))
        wanted[torch.arange(len(known)), right] = value.double()
        with torch.no_grad():
            heads.w2[head].copy_((inverse @ wanted).T)
    return heads.to(next(model.parameters()).dtype).eval()


PRINTABLE = 95
"""How many of the byte tokenizer's tokens, the first ones, are printable ASCII: the space and "!" to "~"."""


def byte_tokenizer():
    """A tokenizer whose tokens are the 256 bytes, so that strings span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda token: (token != "\u0120", token))
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
