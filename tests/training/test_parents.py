"""Training with the parent term, evaluating 8-bit heads, and the trimmed vocabulary of a corpus."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from formulas import HIDDEN, MAP, VOCAB, Largest, gradients, of_parents, plain_targets, random_heads, random_text
from torch import nn

from medusa_decoding import MedusaHeads
from medusa_decoding.training.data.targets import IGNORE, most_frequent_tokens
from medusa_decoding.training.loss.medusa import medusa_loss

RANK = 2
KINDS = {
    "own": {},
    "own, trimmed": {"token_map": MAP},
    "shared": {"shared_projection": True},
    "shared, trimmed": {"shared_projection": True, "token_map": MAP},
}


def conditioned(*, sizes=(HIDDEN, VOCAB, 3), dtype=torch.float64, rank=RANK, seed=0, **changes):
    heads = MedusaHeads(*sizes, parent_rank=rank, dtype=torch.float64, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return heads.to(dtype)


def text_with_prompts(length=23, *, vocab=VOCAB, seed=3, ignored=0.1, **kwargs):
    """States, labels (some ignored, as a prompt's are), and all tokens."""
    hidden, labels = random_text(length, vocab=vocab, seed=seed, ignored=ignored, **kwargs)
    drawn = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed + 1))
    return hidden, labels, torch.where(labels == IGNORE, drawn, labels)


def plain_logits(hidden, tokens, w1, b1, w2, a, m, c, head):
    """A head's logits at every position by the definition; if the text ends before the parent, those of token 0."""
    inner = hidden @ w1[head, 0].T + b1[head, 0]
    state = hidden + inner * torch.sigmoid(inner)
    parents = torch.tensor([int(tokens[t + head + 1]) if t + head + 1 < len(tokens) else 0 for t in range(len(tokens))])
    return state @ w2[head].T + a[parents] @ m[head] @ c.T


def plain_loss(hidden, tokens, labels, heads, weight, segments=None, values=None):
    values = dict(heads.named_parameters()) if values is None else values
    w2 = values.get("w2")
    if w2 is None:
        rows = weight if heads.token_map is None else weight[heads.token_map]
        w2 = rows.expand(heads.num_heads, *rows.shape)
    terms = [of_parents(heads, values["parent_tokens"]), values["parent_mix"], values["candidate_tokens"]]
    total = 0.0
    for head in range(heads.num_heads):
        target, _ = plain_targets(labels, segments, head + 2, heads.token_map)
        logits = plain_logits(hidden, tokens, values["w1"], values["b1"], w2, *terms, head)
        total = total + 0.8 ** (head + 1) * F.cross_entropy(logits, target, ignore_index=IGNORE)
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_loss_and_gradients_equal_the_formula_on_full_logits(kind, chunk):
    heads = conditioned(**KINDS[kind])
    hidden, labels, tokens = text_with_prompts()
    hidden.requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True) if heads.shared_projection else None
    segments = torch.tensor([0] * 9 + [1] * 2 + [2] * 12)
    found = medusa_loss(
        hidden, heads, labels, tokens=tokens, segments=segments, lm_head=weight, chunk=chunk, through_backbone=True
    )
    expected = plain_loss(hidden, tokens, labels, heads, weight, segments)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-12)
    inputs = [hidden, *heads.parameters(), *([] if weight is None else [weight])]
    for mine, theirs in zip(gradients(found.loss, *inputs), gradients(expected, *inputs), strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_gradients_pass_gradcheck():
    heads = conditioned(sizes=(3, 5, 2))
    hidden, labels, tokens = text_with_prompts(6, hidden=3, vocab=5, ignored=0.2)
    names = [name for name, _ in heads.named_parameters()]

    def loss(*parameters):
        copy = conditioned(sizes=(3, 5, 2))
        for name, parameter in zip(names, parameters, strict=True):
            delattr(copy, name)
            setattr(copy, name, parameter)
        return medusa_loss(hidden, copy, labels, tokens=tokens, chunk=3, top=0, repeatable=True).loss

    assert {"parent_tokens", "parent_mix", "candidate_tokens"} < set(names)
    assert torch.autograd.gradcheck(loss, tuple(heads.parameters()))


def test_an_untrained_parent_term_trains_its_candidate_side_first():
    torch.manual_seed(0)
    heads = MedusaHeads(HIDDEN, VOCAB, 3, parent_rank=RANK, dtype=torch.float64)
    plain = MedusaHeads(HIDDEN, VOCAB, 3, dtype=torch.float64)
    nn.init.normal_(heads.w2)
    plain.w2 = heads.w2
    hidden, labels, tokens = text_with_prompts()
    found = medusa_loss(hidden, heads, labels, tokens=tokens)
    torch.testing.assert_close(found.loss, medusa_loss(hidden, plain, labels).loss)
    found.loss.backward()
    assert heads.candidate_tokens.grad.abs().max() > 1e-3
    assert not heads.parent_tokens.grad.any()
    assert not heads.parent_mix.grad.any()


def test_frozen_parts_get_no_gradient():
    heads = conditioned()
    heads.requires_grad_(False)
    heads.parent_mix.requires_grad_()
    hidden, labels, tokens = text_with_prompts()
    medusa_loss(hidden, heads, labels, tokens=tokens).loss.backward()
    assert heads.parent_mix.grad.abs().max() > 1e-3
    assert [name for name, p in heads.named_parameters() if p.grad is not None] == ["parent_mix"]


def test_hits_are_counted_with_the_parent_term():
    heads = conditioned(token_map=MAP, seed=1)
    hidden, labels, tokens = text_with_prompts(120)
    found = medusa_loss(hidden, heads, labels, tokens=tokens, top=3)
    value = dict(heads.named_parameters())
    value["parent_tokens"] = of_parents(heads, heads.parent_tokens)
    terms = [value[name] for name in ("w1", "b1", "w2", "parent_tokens", "parent_mix", "candidate_tokens")]
    for head in range(3):
        target, outside = plain_targets(labels, None, head + 2, MAP)
        kept = target != IGNORE
        logits = plain_logits(hidden, tokens, *terms, head)[kept]
        hits = (logits.topk(3).indices == target[kept, None]).cumsum(1).sum(0)
        assert found.hits[head].tolist() == hits.tolist()
        assert found.outside[head] == outside > 0
        base = (heads(hidden)[kept, head].topk(3).indices == target[kept, None]).cumsum(1).sum(0)
        assert base.tolist() != hits.tolist(), "the term makes no difference: the case shows nothing"


def test_autocast_and_16_bits():
    hidden, labels, tokens = text_with_prompts(dtype=torch.float32)
    exact = conditioned()
    expected = plain_loss(hidden.double(), tokens, labels, exact, None)
    for heads, context in (
        (conditioned(dtype=torch.float32), torch.autocast("cpu", dtype=torch.bfloat16)),
        (conditioned(dtype=torch.bfloat16), torch.autocast("cpu", enabled=False)),
    ):
        with context:
            loss = medusa_loss(hidden, heads, labels, tokens=tokens).loss
        loss.backward()
        assert 0 < abs(loss - expected) < 0.02 * expected
        for name in ("parent_tokens", "parent_mix", "candidate_tokens"):
            (wanted,) = gradients(plain_loss(hidden.double(), tokens, labels, exact, None), getattr(exact, name))
            got = getattr(heads, name).grad
            assert got.dtype == heads.w1.dtype
            assert (got - wanted).norm() < 0.05 * wanted.norm()


def test_no_tensor_is_as_large_as_the_logits_of_one_head():
    positions, vocab, chunk = 600, 1000, 16
    heads = conditioned(sizes=(8, vocab, 3), dtype=torch.float32)
    hidden, labels, tokens = text_with_prompts(positions, hidden=8, vocab=vocab, dtype=torch.float32, ignored=0)
    with Largest() as largest:
        medusa_loss(hidden, heads, labels, tokens=tokens, chunk=chunk).loss.backward()
    # The weights' gradient, or the logits of a chunk.
    assert chunk * vocab <= largest.elements <= 3 * vocab * 8


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_8_bit_heads_are_evaluated_but_not_trained(storage):
    floats = conditioned(dtype=torch.float32)
    heads = floats.quantized(storage)
    hidden, labels, tokens = text_with_prompts(60, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"heads: expected projections in floats to be trained .*, got {storage}"):
        medusa_loss(hidden, heads, labels, tokens=tokens)
    with torch.no_grad():
        found = medusa_loss(hidden, heads, labels, tokens=tokens, chunk=7)
        values = dict(heads.named_parameters()) | {"w2": heads.w2.double() * heads.w2_scale[..., None].double()}
        values = {name: value.double() for name, value in values.items()}
        expected = plain_loss(hidden.double(), tokens, labels, heads, None, values=values)
        unquantised = medusa_loss(hidden, floats, labels, tokens=tokens).loss
    torch.testing.assert_close(found.loss.double(), expected, rtol=1e-6, atol=1e-6)
    assert 1e-6 < abs(found.loss - unquantised) < 0.05 * unquantised


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"tokens: expected the text's ids \(the heads have a parent_rank or root_rank\), got None"),
        ({"tokens": torch.zeros(22).long()}, r"tokens: expected int64 \[23\], got torch.int64 \[22\]"),
        ({"tokens": torch.zeros(23)}, r"tokens: expected int64 \[23\], got torch.float32 \[23\]"),
        ({"tokens": torch.full((23,), IGNORE)}, r"tokens: expected ids in \[0, 13\), got -100 to -100"),
        ({"tokens": torch.full((23,), 13)}, r"tokens: expected ids in \[0, 13\), got 13 to 13"),
        (
            {"heads": random_heads(), "tokens": torch.zeros(23).long()},
            r"tokens: expected None \(the heads have no parent_rank or root_rank\), got a tensor",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    hidden, labels, _ = text_with_prompts()
    with pytest.raises(ValueError, match=message):
        medusa_loss(hidden, labels=labels, **{"heads": conditioned()} | change)


def test_the_most_frequent_tokens():
    counts = Counter({7: 5, 2: 5, 9: 1, 4: 30, 5: 0})
    assert most_frequent_tokens(counts, 3).tolist() == [4, 2, 7]
    assert most_frequent_tokens(counts, 2).tolist() == [4, 2]
    assert most_frequent_tokens(counts, 3, always=(0, 7)).tolist() == [4, 7, 0]
    assert most_frequent_tokens(counts, 2, always=[11, 3, 3]).tolist() == [3, 11]
    # Fewer tokens occur than requested: the lowest ids fill up.
    assert most_frequent_tokens(counts, 7, always=[12]).tolist() == [4, 2, 7, 9, 0, 1, 12]
    assert most_frequent_tokens({}, 3, always=[2]).tolist() == [0, 1, 2]
    found = most_frequent_tokens({token: 1 for token in reversed(range(10))}, 10)
    assert found.dtype == torch.int64
    assert found.tolist() == list(range(10))
    MedusaHeads(4, 13, 1, token_map=most_frequent_tokens(counts, 7, always=[12]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({1: 2}, 0), "size: expected at least 1, got 0"),
        (({1: 2}, 1, [3, 4]), r"always: expected at most 1 ids \(the size\), got 2"),
        (({-1: 2}, 1), "counts: expected ids from 0, got -1"),
        (({1: 2}, 2, [-3]), "always: expected ids from 0, got -3"),
        (({1: -2}, 2), "counts: expected numbers from 0, got -2"),
    ],
)
def test_bad_counts_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        most_frequent_tokens(*arguments)
