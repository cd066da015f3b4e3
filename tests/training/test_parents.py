"""The parent term, the root input, heads in 8 bits, and the trimmed vocabulary of a corpus."""

from collections import Counter

import torch
from formulas import (
    HIDDEN,
    MAP,
    VOCAB,
    gradients,
    inputs_of,
    plain_logits,
    plain_targets,
    random_heads,
    random_text,
)
from torch import nn

from medusa_decoding import MedusaHeads
from medusa_decoding.training.data.targets import IGNORE, most_frequent_tokens
from medusa_decoding.training.loss.medusa import medusa_loss


def test_an_untrained_parent_term_trains_its_candidate_side_first():
    torch.manual_seed(0)
    heads = MedusaHeads(HIDDEN, VOCAB, 3, parent_rank=2, dtype=torch.float64)
    plain = MedusaHeads(HIDDEN, VOCAB, 3, dtype=torch.float64)
    nn.init.normal_(heads.w2)
    plain.w2 = heads.w2
    hidden, labels = random_text()
    found = medusa_loss(hidden, heads, labels, **inputs_of(heads, labels))
    torch.testing.assert_close(found.loss, medusa_loss(hidden, plain, labels).loss)
    found.loss.backward()
    assert heads.candidate_tokens.grad.abs().max() > 1e-3
    assert not heads.parent_tokens.grad.any()
    assert not heads.parent_mix.grad.any()


def test_an_untrained_root_input_changes_nothing_and_is_trained():
    heads = MedusaHeads(HIDDEN, VOCAB, 3, root_rank=HIDDEN, dtype=torch.float32)
    plain = random_heads(dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            heads.get_parameter(name).copy_(parameter)
    hidden, labels = random_text(dtype=torch.float32)
    given = inputs_of(heads, labels)
    embedding = given["embed_tokens"].float()
    found = medusa_loss(hidden, heads, labels, **given)
    # Adding zeros is exact; a state per head instead of one for all may be multiplied by another routine of the CPU's.
    roundings = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found.loss, medusa_loss(hidden, plain, labels).loss, **roundings)
    torch.testing.assert_close(heads(hidden, root_embedding=embedding(given["tokens"])), plain(hidden), **roundings)
    found.loss.backward()
    assert heads.root_up.grad.abs().amax((1, 2)).min() > 1e-3
    assert not heads.root_down.grad.any()
    assert embedding.weight.grad is None


def test_the_scale_of_the_embedding_makes_no_difference():
    """Some families multiply embeddings by a constant, which a model's states then have too."""
    heads, (hidden, labels) = random_heads(root_rank=3), random_text()
    losses = [medusa_loss(hidden, heads, labels, **inputs_of(heads, labels, scale)).loss for scale in (1.0, 60.0)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def test_frozen_parts_get_no_gradient():
    heads = random_heads(parent_rank=2)
    heads.requires_grad_(False)
    heads.parent_mix.requires_grad_()
    hidden, labels = random_text()
    medusa_loss(hidden, heads, labels, **inputs_of(heads, labels)).loss.backward()
    assert heads.parent_mix.grad.abs().max() > 1e-3
    assert [name for name, p in heads.named_parameters() if p.grad is not None] == ["parent_mix"]


def test_hits_are_counted_with_the_parent_term():
    heads = random_heads(token_map=MAP, parent_rank=2, seed=1)
    hidden, labels = random_text(200)
    given = inputs_of(heads, labels)
    found = medusa_loss(hidden, heads, labels, **given, top=3)
    for head, logits in enumerate(plain_logits(hidden, heads, **given)):
        target, outside = plain_targets(labels, None, head + 2, MAP)
        kept = target != IGNORE
        hits = (logits[kept].topk(3).indices == target[kept, None]).cumsum(1).sum(0)
        assert found.hits[head].tolist() == hits.tolist()
        assert found.outside[head] == outside > 0
        base = (heads(hidden)[kept, head].topk(3).indices == target[kept, None]).cumsum(1).sum(0)
        assert base.tolist() != hits.tolist(), "the term makes no difference: the case shows nothing"


def test_the_embedding_gets_no_gradient():
    heads, (hidden, labels) = random_heads(root_rank=3), random_text()
    given = inputs_of(heads, labels)
    found = medusa_loss(hidden, heads, labels, **given, through_backbone=True)
    assert gradients(found.loss, given["embed_tokens"].weight) == (None,)


def test_the_most_frequent_tokens():
    counts = Counter({7: 5, 2: 5, 9: 1, 4: 30, 5: 0})
    assert most_frequent_tokens(counts, 3).tolist() == [4, 2, 7]
    assert most_frequent_tokens(counts, 3, always=(0, 7)).tolist() == [4, 7, 0]
    assert most_frequent_tokens(counts, 2, always=[11, 3, 3]).tolist() == [3, 11]
    # Fewer tokens occur than requested: the lowest ids fill up.
    assert most_frequent_tokens(counts, 7, always=[12]).tolist() == [4, 2, 7, 9, 0, 1, 12]
    assert most_frequent_tokens({}, 3, always=[2]).tolist() == [0, 1, 2]
