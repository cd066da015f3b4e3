"""Soft labels against formulas on full logits and autograd in float64, and by hand."""

import math

import pytest
import torch
from formulas import (
    CASES,
    HEADS,
    HIDDEN,
    MAP,
    VOCAB,
    Largest,
    gradients,
    of_parents,
    plain_targets,
    random_heads,
    random_text,
)  # fmt: skip
from torch import nn

from medusa_decoding import MedusaHeads
from medusa_decoding.training.data.targets import IGNORE
from medusa_decoding.training.loss.medusa import medusa_loss

SEGMENTS = torch.tensor([0] * 9 + [1] * 2 + [2] * 12)
KINDS = CASES | {"parents": {"rank": 2}, "shared, trimmed, parents": {"shared": True, "token_map": MAP, "rank": 2}}


def some_heads(*, rank=0, sizes=(HIDDEN, VOCAB, HEADS), **changes):
    if not rank:
        return random_heads(sizes=sizes, **changes)
    shared, token_map = changes.get("shared", False), changes.get("token_map")
    heads = MedusaHeads(*sizes, shared_projection=shared, token_map=token_map, parent_rank=rank, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return heads


def random_weight(seed=7, sizes=(VOCAB, HIDDEN)):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_soft(hidden, heads, labels, weight, segments=None, tokens=None):
    """The loss by its definition, a position at a time."""
    lm_head = None
    if heads.shared_projection:
        lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        del lm_head.weight
        lm_head.weight = weight
    logits = heads(hidden, lm_head)
    total = 0.0
    for k in range(heads.num_heads):
        target, _ = plain_targets(labels, segments, k + 2, heads.token_map)
        losses = []
        for t in range(len(labels)):
            if target[t] == IGNORE:
                continue
            teacher = hidden[t + k + 1].detach() @ weight.detach().T
            p = (teacher if heads.token_map is None else teacher[heads.token_map]).softmax(-1)
            own = logits[t, k]
            if heads.parent_rank:
                parent = of_parents(heads, heads.parent_tokens)[tokens[t + k + 1]]
                own = own + parent @ heads.parent_mix[k] @ heads.candidate_tokens.T
            q = own.softmax(-1)
            losses.append((p * (p.log() - q.log())).sum())
        total = total + 0.8 ** (k + 1) * sum(losses) / len(losses)
    return total


def text(heads, length=23, **changes):
    """States, labels, and the tokens for heads with a parents' term (the labels, and token 3 where there is none)."""
    hidden, labels = random_text(length, **changes)
    return hidden, labels, torch.where(labels == IGNORE, 3, labels) if heads.parent_rank else None


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_loss_and_gradients_equal_the_formula_on_full_logits(case, chunk):
    heads = some_heads(**KINDS[case])
    hidden, labels, tokens = text(heads)
    hidden.requires_grad_()
    weight = random_weight().requires_grad_()
    shared = weight if heads.shared_projection else None
    found = medusa_loss(
        hidden, heads, labels, tokens=tokens, segments=SEGMENTS, lm_head=shared,
        teacher_lm_head=weight, chunk=chunk, through_backbone=True, top=0,
    )  # fmt: skip
    expected = plain_soft(hidden, heads, labels, weight, SEGMENTS, tokens)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-12)
    assert found.hits.shape == (HEADS, 0)
    inputs = [hidden, *heads.parameters(), *([] if shared is None else [weight])]
    for mine, theirs in zip(gradients(found.loss, *inputs), gradients(expected, *inputs), strict=True):
        assert theirs.abs().max() > 1e-5
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_equal_finite_differences(rank):
    sizes = (3, 5, 2)
    heads = some_heads(rank=rank, sizes=sizes)
    hidden, labels, tokens = text(heads, 6, hidden=3, vocab=5, ignored=0.0)
    names = [name for name, _ in heads.named_parameters()]
    weight = random_weight(sizes=(5, 3))

    def loss(*parameters):
        copy = some_heads(rank=rank, sizes=sizes)
        for name, parameter in zip(names, parameters, strict=True):
            delattr(copy, name)
            setattr(copy, name, parameter)
        return medusa_loss(hidden, copy, labels, tokens=tokens, teacher_lm_head=weight, chunk=3, repeatable=True).loss

    assert torch.autograd.gradcheck(loss, tuple(heads.parameters()))


def test_the_loss_by_hand():
    # One head with W1 = 0 and W2 = identity: its logits are the state. The teacher's are those of the state after it.
    heads = MedusaHeads(2, 2, 1, dtype=torch.float64)
    with torch.no_grad():
        heads.w2.copy_(torch.eye(2, dtype=torch.float64)[None])
    hidden = torch.tensor([[math.log(3), 0.0], [0.0, math.log(7)], [9.0, 9.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    # Only position 0 has a target (label 2). There q = (3/4, 1/4) and p = (1/8, 7/8), that of position 1.
    kl = 1 / 8 * math.log((1 / 8) / (3 / 4)) + 7 / 8 * math.log((7 / 8) / (1 / 4))
    found = medusa_loss(hidden, heads, labels, teacher_lm_head=torch.eye(2).double(), weights=torch.ones(1))
    assert found.loss.item() == pytest.approx(kl, rel=1e-14)
    assert found.sums.tolist() == pytest.approx([kl], rel=1e-14)
    # The gradient of W2 is the outer product of that of the logits, q - p, and the state, (log 3, 0).
    (gradient,) = gradients(found.loss, heads.w2)
    slope = (3 / 4 - 1 / 8) * math.log(3)
    wanted = torch.tensor([[[slope, 0.0], [-slope, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, rtol=1e-13, atol=1e-15)


def test_hits_and_counts_are_those_of_cross_entropy():
    heads = random_heads(token_map=MAP)
    hidden, labels = random_text(60)
    hard = medusa_loss(hidden, heads, labels, top=3, chunk=7)
    soft = medusa_loss(hidden, heads, labels, top=3, chunk=7, teacher_lm_head=random_weight())
    assert soft.hits.tolist() == hard.hits.tolist()
    assert 0 < hard.hits[0, 0] < hard.counts[0]
    assert (soft.counts.tolist(), soft.outside.tolist()) == (hard.counts.tolist(), hard.outside.tolist())


def test_the_teacher_gets_no_gradient():
    backbone, lm_head = nn.Linear(HIDDEN, HIDDEN).double(), nn.Linear(HIDDEN, VOCAB, bias=False).double()
    heads = random_heads()
    states, labels = random_text()
    medusa_loss(backbone(states), heads, labels, teacher_lm_head=lm_head).loss.backward()
    assert [p.grad for p in [*backbone.parameters(), *lm_head.parameters()]] == [None, None, None]
    medusa_loss(backbone(states), heads, labels, teacher_lm_head=lm_head, through_backbone=True).loss.backward()
    assert all(p.grad.abs().max() > 0 for p in backbone.parameters())
    assert lm_head.weight.grad is None


@pytest.mark.parametrize("token_map", [None, MAP])
def test_a_teacher_that_is_not_a_plain_matrix_is_called(token_map):
    class Layer(nn.Module):
        out_features = VOCAB

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(random_weight() / 2)

        def forward(self, states):
            return 2 * states @ self.weight.T

    heads = random_heads(token_map=token_map)
    hidden, labels = random_text()
    called = medusa_loss(hidden, heads, labels, teacher_lm_head=Layer(), chunk=5)
    plain = medusa_loss(hidden, heads, labels, teacher_lm_head=random_weight(), chunk=5)
    torch.testing.assert_close(called.loss, plain.loss, rtol=1e-12, atol=0)
    for one, other in zip(*(gradients(x.loss, *heads.parameters()) for x in (called, plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)


def test_autocast_and_16_bits():
    hidden, labels = random_text(dtype=torch.float32)
    weight = random_weight()
    expected = plain_soft(hidden.double(), (exact := random_heads()), labels, weight)
    wanted = gradients(expected, *exact.parameters())
    for heads, states, context in (
        (random_heads(dtype=torch.float32), hidden.bfloat16(), torch.autocast("cpu", dtype=torch.bfloat16)),
        (random_heads(dtype=torch.bfloat16), hidden, torch.autocast("cpu", enabled=False)),
    ):
        with context:
            loss = medusa_loss(states, heads, labels, teacher_lm_head=weight.bfloat16()).loss
        loss.backward()
        assert loss.dtype == torch.float32
        assert 0 < abs(loss - expected) < 0.02 * expected
        for parameter, theirs in zip(heads.parameters(), wanted, strict=True):
            assert (parameter.grad - theirs).norm() < 0.05 * theirs.norm()


def test_no_tensor_is_as_large_as_the_logits_of_one_head():
    positions, vocab, chunk = 600, 1000, 16
    heads = random_heads(sizes=(8, vocab, 3), dtype=torch.float32)
    hidden, labels = random_text(positions, hidden=8, vocab=vocab, dtype=torch.float32, ignored=0)
    with Largest() as largest:
        teacher = torch.randn(vocab, 8)
        medusa_loss(hidden, heads, labels, teacher_lm_head=teacher, chunk=chunk).loss.backward()
    # The weights' gradient, or the logits of a chunk.
    assert chunk * vocab <= largest.elements <= 3 * vocab * 8


def test_no_target_at_all_gives_zero_and_zero_gradients():
    heads = random_heads()
    hidden, labels = random_text()
    found = medusa_loss(hidden, heads, torch.full_like(labels, IGNORE), teacher_lm_head=random_weight())
    assert found.loss == 0
    found.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in heads.parameters())


def test_bad_soft_labels_are_named():
    weight = random_weight()
    hidden, labels = random_text()
    with pytest.raises(ValueError, match=r"^teacher_lm_head: expected weight \[13, 6\], got \[12, 6\]"):
        medusa_loss(hidden, random_heads(), labels, teacher_lm_head=weight[:12])
