"""The losses as in the papers, on full logits, and small heads and texts to test them with."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_decoding import MedusaHeads
from medusa_decoding.training.data.targets import IGNORE

HIDDEN, VOCAB, HEADS = 6, 13, 3
MAP = torch.tensor([9, 0, 4, 12, 2])
SEGMENTS = torch.tensor([0] * 9 + [1] * 2 + [2] * 12)
CASES = {
    "own": {},
    "own, trimmed": {"token_map": MAP},
    "shared": {"shared_projection": True},
    "shared, trimmed": {"shared_projection": True, "token_map": MAP},
    "own, two layers, no bias": {"num_layers": 2, "bias": False},
    "own, parents": {"parent_rank": 2},
    "own, trimmed, parents": {"token_map": MAP, "parent_rank": 2},
    "shared, parents": {"shared_projection": True, "parent_rank": 2},
    "own, root": {"root_rank": 3},
    "own, trimmed, two layers, no bias, root": {"token_map": MAP, "num_layers": 2, "bias": False, "root_rank": 3},
    "own, parents, root": {"parent_rank": 2, "root_rank": 3},
    "own, features, root": {"feature_layers": (1, 4), "root_rank": 3},
    "shared, trimmed, parents, root": {
        "shared_projection": True, "token_map": MAP, "parent_rank": 2, "root_rank": 3
    },
}  # fmt: skip


def random_heads(*, sizes=(HIDDEN, VOCAB, HEADS), dtype=torch.float64, seed=0, **changes):
    found = MedusaHeads(*sizes, dtype=torch.float64, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return found.to(dtype)


def random_weight(seed=7, sizes=(VOCAB, HIDDEN)):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_text(length=23, *, seed=1, hidden=HIDDEN, vocab=VOCAB, dtype=torch.float64, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(length, hidden, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocab, (length,), generator=generator)
    labels[torch.rand(length, generator=generator) < ignored] = IGNORE
    return states, labels


def inputs_of(heads, labels, scale=0.05):
    """The text's tokens and an embedding of the size that a model's has, if the heads need them."""
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randint(0, heads.vocab_size, labels.shape, generator=generator)
    found = {}
    if heads.parent_rank or heads.root_rank:
        found["tokens"] = torch.where(labels == IGNORE, drawn, labels)
    if heads.root_rank:
        rows = torch.randn(heads.vocab_size, heads.hidden_size, generator=generator, dtype=torch.float64) * scale
        found["embed_tokens"] = nn.Embedding.from_pretrained(rows, freeze=False)
    return found


def of_parents(heads, table):
    """A row of A for each token of the vocabulary: those outside a trimmed one share the last."""
    if heads.token_map is None:
        return table
    place = {token: row for row, token in enumerate(heads.token_map.tolist())}
    assert len(table) == len(place) + 1
    return table[[place.get(token, -1) for token in range(heads.vocab_size)]]


def plain_targets(labels, segments, offset, token_map=None):
    """The label `offset` positions later, by a walk over positions, where the next token is learnt too."""
    found, outside = [], 0
    rows = None if token_map is None else {int(token): row for row, token in enumerate(token_map)}
    for t in range(len(labels)):
        later = t + offset
        target = IGNORE
        learnt = later < len(labels) and labels[later] != IGNORE and labels[t + 1] != IGNORE
        if learnt and (segments is None or segments[later] == segments[t]):
            target = int(labels[later])
            if rows is not None:
                target = rows.get(target, IGNORE)
                outside += target == IGNORE
        found.append(target)
    return torch.tensor(found, device=labels.device), outside


def plain_logits(hidden, heads, *, tokens=None, embed_tokens=None, lm_head=None, values=None):
    """Each head's logits at every position by their definition; after the end of the text there is token 0."""
    value = dict(heads.named_parameters()) if values is None else values
    found = []
    read, hidden = hidden.split(heads.hidden_size, 1), hidden[:, : heads.hidden_size]
    if heads.feature_layers:
        scaled = [states / (states.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() / 8 for states in read]
        hidden = hidden + torch.cat(scaled, 1) @ value["feature_map"].T
    for head in range(heads.num_heads):
        state = hidden
        if heads.root_rank:
            rows = embed_tokens.weight.detach()[F.pad(tokens, (0, 1))[1:]]
            rows = rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            state = hidden + rows @ value["root_down"].T @ value["root_up"][head].T
        for layer in range(heads.num_layers):
            bias = value["b1"][head, layer] if "b1" in value else None
            state = state + F.silu(F.linear(state, value["w1"][head, layer], bias))
        rows = lm_head if lm_head is None or heads.token_map is None else lm_head[heads.token_map]
        logits = F.linear(state, value["w2"][head] if rows is None else rows)
        if heads.parent_rank:
            parents = of_parents(heads, value["parent_tokens"])[F.pad(tokens, (0, head + 1))[head + 1 :]]
            logits = logits + parents @ value["parent_mix"][head] @ value["candidate_tokens"].T
        found.append(logits)
    return found


def plain_loss(hidden, heads, labels, *, segments=None, teacher=None, weights=None, **options):
    """The loss by its formula on full logits of every head; with a teacher [V, H], of its distributions."""
    total = 0.0
    for head, logits in enumerate(plain_logits(hidden, heads, **options)):
        target, _ = plain_targets(labels, segments, head + 2, heads.token_map)
        if teacher is None:
            loss = F.cross_entropy(logits, target, ignore_index=IGNORE)
        else:
            places = (target != IGNORE).nonzero().squeeze(1)
            theirs = hidden.detach()[places + head + 1, : heads.hidden_size] @ teacher.detach().T
            p = (theirs if heads.token_map is None else theirs[:, heads.token_map]).softmax(-1)
            loss = F.kl_div(logits[places].log_softmax(-1), p, reduction="batchmean")
        total = total + (0.8 ** (head + 1) if weights is None else weights[head]) * loss
    return total


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors, allow_unused=True)


def assert_equal_gradients(found, expected, inputs, *, least=1e-4, **tolerances):
    """Compare the gradients of two losses, none of which is zero."""
    inputs = list(inputs)
    for mine, theirs in zip(gradients(found, *inputs), gradients(expected, *inputs), strict=True):
        assert theirs.abs().max() > least
        torch.testing.assert_close(mine, theirs, **tolerances)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


class Made(TorchDispatchMode):
    """Counts new tensors of a shape that operations return; results in memory of their arguments do not count."""

    def __init__(self, *shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        held = {given.untyped_storage().data_ptr() for given in [*args, *kwargs.values()] if torch.is_tensor(given)}
        if torch.is_tensor(result) and result.shape == self.shape:
            self.count += result.untyped_storage().data_ptr() not in held
        return result
