"""Accuracy of heads on a model's own text, against a walk over positions with full logits and the heads' formula."""

import pytest
import torch
import torch.nn.functional as F
from models import VOCAB, heads_for, prompts, tiny, transformers_greedy

from medusa_decoding import MedusaHeads, MedusaModel
from medusa_decoding.evaluation import own_text
from medusa_decoding.evaluation.own_text import own_text_accuracy

HEADS, NEW = 3, 30
# More tokens than a head has candidates to rank anew, so that some parents are named by no head.
MANY = 48


def trimmed(base):
    kept = torch.tensor([7, 0, 3, 10, 4, 9])
    heads = MedusaHeads(base.config.hidden_size, VOCAB, HEADS, token_map=kept)
    with torch.no_grad():
        heads.w2.copy_(base.lm_head.weight[kept].expand_as(heads.w2))
    return heads


def conditioned(base):
    vocab = base.config.vocab_size
    heads = MedusaHeads(base.config.hidden_size, vocab, HEADS, parent_rank=4)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        heads.w2.copy_(base.lm_head.weight.expand_as(heads.w2))
        for parameter in (heads.parent_tokens, heads.candidate_tokens, heads.parent_mix):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    return heads


def rooted(base):
    heads = MedusaHeads(base.config.hidden_size, VOCAB, HEADS, root_rank=4)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        heads.w2.copy_(base.lm_head.weight.expand_as(heads.w2))
        heads.root_down.copy_(torch.randn(heads.root_down.shape, generator=generator) * 0.3)
        heads.root_up.copy_(torch.randn(heads.root_up.shape, generator=generator) * 0.5)
    return heads


def featured(base):
    heads = MedusaHeads(base.config.hidden_size, VOCAB, HEADS, feature_layers=[1])
    with torch.no_grad():
        heads.w2.copy_(base.lm_head.weight.expand_as(heads.w2))
        heads.feature_map.copy_(torch.randn(heads.feature_map.shape, generator=torch.Generator().manual_seed(8)))
    return heads


CASES = {
    "own": (VOCAB, lambda base: heads_for(base, HEADS)),
    "shared": (VOCAB, lambda base: heads_for(base, HEADS, shared=True)),
    "two layers": (VOCAB, lambda base: heads_for(base, HEADS, num_layers=2)),
    "trimmed": (VOCAB, trimmed),
    "parents": (MANY, conditioned),
    "root": (VOCAB, rooted),
    "features": (VOCAB, featured),
}


def ranked(heads, lm_head, state, k, parent, named, root):
    """Head k's tokens at one position, best first; `named`: the tokens of the previous head, or None for the root."""
    hidden = state[-1]
    if heads.feature_layers:
        read = torch.stack([state[-1], *(state[layer] for layer in heads.feature_layers)])
        hidden = hidden + heads.feature_map @ F.rms_norm(read, read.shape[-1:], eps=1e-6).flatten() / 8
    if heads.root_rank:
        hidden = hidden + heads.root_up[k] @ (heads.root_down @ (root / (root.pow(2).mean() + 1e-6).sqrt()))
    for layer in range(heads.num_layers):
        inner = heads.w1[k, layer] @ hidden + heads.b1[k, layer]
        hidden = hidden + inner * torch.sigmoid(inner)
    logits = (lm_head if heads.w2 is None else heads.w2[k]) @ hidden
    order = logits.argsort(descending=True).tolist()
    if heads.parent_rank:
        best = order[:32]
        if named is None or parent in named:
            term = heads.parent_tokens[parent] @ heads.parent_mix[k] @ heads.candidate_tokens.T
            score = F.log_softmax(logits, -1) + term
            best = sorted(best, key=lambda token: -score[token].item())
        return best, order[:32]
    tokens = order if heads.token_map is None else [int(heads.token_map[place]) for place in order]
    return tokens, None


@torch.no_grad()
def walked(base, heads, tokens, prompt):
    """Hits [K][10] and totals [K], position by position."""
    states = torch.cat(base.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states)
    hits, total = [[0] * 10 for _ in range(HEADS)], [0] * HEADS
    unnamed = 0
    for t in range(prompt - 1, len(tokens)):
        named = None
        for k in range(HEADS):
            if t + k + 2 >= len(tokens):
                continue
            parent = tokens[t + k + 1]
            unnamed += named is not None and parent not in named
            root = base.model.embed_tokens.weight[tokens[t + 1]]
            drafts, named = ranked(heads, base.lm_head.weight, states[:, t], k, parent, named, root)
            total[k] += 1
            for n in range(10):
                hits[k][n] += tokens[t + k + 2] in drafts[: n + 1]
    return hits, total, unnamed


@pytest.mark.parametrize("rows", [256, 7])
@pytest.mark.parametrize("name", CASES)
def test_counts_equal_a_walk_over_positions(name, rows, monkeypatch):
    monkeypatch.setattr(own_text, "ROWS", rows)
    vocab, build = CASES[name]
    base = tiny(vocab_size=vocab)
    heads = build(base).eval()
    [prompt] = prompts(1, [9], vocab=vocab)
    tokens = prompt.tolist() + transformers_greedy(base, prompt, NEW)
    hits, total, unnamed = walked(base, heads, tokens, len(prompt))
    assert total == [NEW - 1 - k for k in range(HEADS)]
    assert 0 < hits[0][4] < total[0]
    assert len({tuple(row) for row in hits}) > 1
    assert (unnamed > 0) is (name == "parents")
    with MedusaModel(base, heads) as model:
        found = own_text_accuracy(model, tokens, len(prompt))
    assert found.total.tolist() == total
    assert found.hits.tolist() == hits


def test_the_prompts_own_tokens_are_no_targets():
    """From one token of prompt on, every text position but those of the first heads' reach counts."""
    base = tiny()
    [prompt] = prompts(1, [12])
    with MedusaModel(base, heads_for(base, HEADS)) as model:
        whole = own_text_accuracy(model, prompt.tolist(), 1).total.tolist()
        part = own_text_accuracy(model, prompt.tolist(), 8).total.tolist()
        nothing = own_text_accuracy(model, prompt.tolist(), 12).total.tolist()
        one = own_text_accuracy(model, prompt.tolist(), 10).total.tolist()
    assert whole == [10, 9, 8]
    assert part == [3, 2, 1]
    assert nothing == [0, 0, 0]
    assert one == [1, 0, 0]


def test_bad_input_is_refused():
    base = tiny()
    with MedusaModel(base, heads_for(base)) as model:
        for count in (0, 4):
            with pytest.raises(ValueError, match=rf"prompt: expected 1 to 3 tokens, got {count}"):
                own_text_accuracy(model, [1, 2, 3], count)
    with MedusaModel(base) as plain, pytest.raises(ValueError, match="model: expected one with heads"):
        own_text_accuracy(plain, [1, 2, 3], 1)
