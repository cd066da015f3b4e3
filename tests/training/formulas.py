"""The losses as in the papers, on full logits, and small heads and texts to test them with."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_decoding import MedusaHeads
from medusa_decoding.training.data.targets import IGNORE

HIDDEN, VOCAB, HEADS = 6, 13, 3
MAP = torch.tensor([9, 0, 4, 12, 2])
CASES = {
    "own": {},
    "own, trimmed": {"token_map": MAP},
    "shared": {"shared": True},
    "shared, trimmed": {"shared": True, "token_map": MAP},
    "own, two layers, no bias": {"layers": 2, "bias": False},
}


def random_heads(*, shared=False, token_map=None, layers=1, dtype=torch.float64, seed=0, bias=True, sizes=None):
    hidden, vocab, heads = sizes or (HIDDEN, VOCAB, HEADS)
    found = MedusaHeads(
        hidden, vocab, heads, layers, shared_projection=shared, token_map=token_map, bias=bias, dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return found.to(dtype)


def random_text(length=23, *, seed=1, hidden=HIDDEN, vocab=VOCAB, dtype=torch.float64, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(length, hidden, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocab, (length,), generator=generator)
    labels[torch.rand(length, generator=generator) < ignored] = IGNORE
    return states, labels


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


def plain_medusa(hidden, heads, labels, segments=None, weight=None, weights=None, divisors=None):
    """The loss by its formula on full logits of every head."""
    total, lm_head = 0.0, None
    if weight is not None:
        lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        del lm_head.weight
        lm_head.weight = weight
    logits = heads(hidden, lm_head)
    for k in range(heads.num_heads):
        target, _ = plain_targets(labels, segments, k + 2, heads.token_map)
        summed = F.cross_entropy(logits[:, k], target, ignore_index=IGNORE, reduction="sum")
        count = (target != IGNORE).sum().clamp(min=1) if divisors is None else divisors[k]
        total = total + (0.8 ** (k + 1) if weights is None else weights[k]) * summed / count
    return total


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors, allow_unused=True)


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
