"""Training with the root token's embedding as an input of every head."""

import pytest
import torch
import torch.nn.functional as F
from formulas import HIDDEN, MAP, VOCAB, gradients, of_parents, plain_targets, random_heads, random_text
from torch import nn

from medusa_decoding import MedusaHeads
from medusa_decoding.training.data.targets import IGNORE
from medusa_decoding.training.loss.medusa import medusa_loss

LENGTH = 23
SEGMENTS = torch.tensor([0] * 9 + [1] * 2 + [2] * 12)
KINDS = {
    "own": {},
    "own, trimmed, two blocks, no bias": {"token_map": MAP, "num_layers": 2, "bias": False},
    "own, parents": {"parent_rank": 2},
    "shared, trimmed, parents": {"shared_projection": True, "token_map": MAP, "parent_rank": 2},
}


def rooted(*, sizes=(HIDDEN, VOCAB, 3), dtype=torch.float64, root_rank=3, **changes):
    heads = MedusaHeads(*sizes, root_rank=root_rank, dtype=torch.float64, **changes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return heads.to(dtype)


def text_and_embedding(scale=0.05, dtype=torch.float64):
    """States, labels, all tokens, and an embedding of the size that a model's has."""
    hidden, labels = random_text(LENGTH, seed=3, dtype=dtype, ignored=0.1)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.where(labels == IGNORE, torch.randint(0, VOCAB, (LENGTH,), generator=generator), labels)
    embedding = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64) * scale)
    return hidden, labels, tokens, embedding


def plain_loss(hidden, tokens, labels, heads, table, segments=None, lm_head=None):
    """The loss by the definition on full logits, from the token after each position."""
    value, total = dict(heads.named_parameters()), 0.0
    for head in range(heads.num_heads):
        states = []
        for t in range(len(tokens)):
            row = table[int(tokens[t + 1]) if t + 1 < len(tokens) else 0]
            shared = value["root_down"] @ (row / (row.pow(2).mean() + 1e-6).sqrt())
            states.append(hidden[t] + value["root_up"][head] @ shared)
        state = torch.stack(states)
        for layer in range(heads.num_layers):
            inner = state @ value["w1"][head, layer].T
            inner = inner + value["b1"][head, layer] if "b1" in value else inner
            state = state + inner * torch.sigmoid(inner)
        rows = lm_head if lm_head is None or heads.token_map is None else lm_head[heads.token_map]
        logits = state @ (value["w2"][head] if rows is None else rows).T
        if heads.parent_rank:
            before = [int(tokens[t + head + 1]) if t + head + 1 < len(tokens) else 0 for t in range(len(tokens))]
            mixed = of_parents(heads, value["parent_tokens"])[before] @ value["parent_mix"][head]
            logits = logits + mixed @ value["candidate_tokens"].T
        target, _ = plain_targets(labels, segments, head + 2, heads.token_map)
        total = total + 0.8 ** (head + 1) * F.cross_entropy(logits, target, ignore_index=IGNORE)
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [4, 100])
def test_loss_and_gradients_equal_the_formula_on_full_logits(kind, chunk):
    heads = rooted(**KINDS[kind])
    hidden, labels, tokens, embedding = text_and_embedding()
    hidden.requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True) if heads.shared_projection else None
    found = medusa_loss(
        hidden, heads, labels, tokens=tokens, embed_tokens=embedding, segments=SEGMENTS, lm_head=weight, chunk=chunk,
        through_backbone=True,
    )  # fmt: skip
    expected = plain_loss(hidden, tokens, labels, heads, embedding.weight.detach(), SEGMENTS, weight)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-12)
    inputs = [hidden, *heads.parameters(), *([] if weight is None else [weight])]
    assert {"root_down", "root_up"} < {name for name, _ in heads.named_parameters()}
    assert gradients(found.loss, embedding.weight) == (None,)
    for mine, theirs in zip(gradients(found.loss, *inputs), gradients(expected, *inputs), strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_an_untrained_root_input_changes_nothing_and_is_trained():
    heads = MedusaHeads(HIDDEN, VOCAB, 3, root_rank=HIDDEN, dtype=torch.float32)
    plain = random_heads(dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            heads.get_parameter(name).copy_(parameter)
    hidden, labels, tokens, embedding = text_and_embedding(dtype=torch.float32)
    found = medusa_loss(hidden, heads, labels, tokens=tokens, embed_tokens=embedding)
    # Adding zeros is exact; a state per head instead of one for all may be multiplied by another routine of the CPU's.
    roundings = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found.loss, medusa_loss(hidden, plain, labels).loss, **roundings)
    torch.testing.assert_close(heads(hidden, root_embedding=embedding(tokens)), plain(hidden), **roundings)
    found.loss.backward()
    assert heads.root_up.grad.abs().amax((1, 2)).min() > 1e-3
    assert not heads.root_down.grad.any()
    assert embedding.weight.grad is None


def test_the_scale_of_the_embedding_makes_no_difference():
    """Some families multiply embeddings by a constant, which a model's states then have too."""
    heads = rooted()
    losses = []
    for scale in (1.0, 60.0):
        hidden, labels, tokens, embedding = text_and_embedding(scale)
        losses.append(medusa_loss(hidden, heads, labels, tokens=tokens, embed_tokens=embedding).loss)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def test_autocast_and_16_bits():
    hidden, labels, tokens, embedding = text_and_embedding()
    exact = rooted()
    expected = plain_loss(hidden, tokens, labels, exact, embedding.weight.detach())
    wanted = gradients(expected, exact.root_down, exact.root_up)
    for dtype, context in (
        (torch.float32, torch.autocast("cpu", dtype=torch.bfloat16)),
        (torch.bfloat16, torch.autocast("cpu", enabled=False)),
    ):
        heads = rooted(dtype=dtype)
        with context:
            loss = medusa_loss(hidden.float(), heads, labels, tokens=tokens, embed_tokens=embedding.bfloat16()).loss
        loss.backward()
        assert 0 < abs(loss - expected) < 0.02 * expected
        for got, of_exact in zip((heads.root_down.grad, heads.root_up.grad), wanted, strict=True):
            assert got.dtype == dtype
            assert (got - of_exact).norm() < 0.05 * of_exact.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, r"tokens: expected the text's ids \(the heads have a parent_rank or root_rank\), got None"),
        ({"embed_tokens": None}, r"embed_tokens: expected the model's \(the heads have a root_rank\), got NoneType"),
        (
            {"heads": random_heads(), "tokens": None},
            r"embed_tokens: expected None \(they have no root_rank\), got Embedding",
        ),
        (
            {"embed_tokens": nn.Embedding(VOCAB, HIDDEN + 1)},
            rf"root_embedding: expected \[\d+, {HIDDEN}\], got \[\d+, {HIDDEN + 1}\]",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    hidden, labels, tokens, embedding = text_and_embedding()
    given = {"heads": rooted(), "tokens": tokens, "embed_tokens": embedding} | change
    with pytest.raises(ValueError, match=message):
        medusa_loss(hidden, labels=labels, **given)
