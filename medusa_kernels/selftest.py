"""A small check of every op against its reference on a device, for a running installation.

The cases are few and fixed: enough to notice a broken build, a wrong driver or a miscompiled kernel. The test suite is
where the ops are proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import medusa_kernels
from medusa_kernels import reference
from medusa_kernels._registry import OPS, served_by


@dataclass(frozen=True)
class Result:
    """One op's check.

    Attributes:
        op: its name.
        device: as `run` was given it.
        implementation: what serves it there.
        reason: why.
        error: largest absolute difference from the reference; infinite if the op raised.
        bound: what was allowed.
        detail: the exception's text, or "".
    """

    op: str
    device: str
    implementation: str
    reason: str
    error: float
    bound: float
    detail: str

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound (a NaN is not)."""
        return self.error <= self.bound


def run(device: str) -> list[Result]:
    """Check every op on a device ("cpu", "cuda:1", or "cuda" for the current GPU), in fp32.

    Raises:
        ValueError: neither a CPU nor a CUDA device.
    """
    results = []
    for op in OPS:
        chosen = served_by(op, device)
        generator = torch.Generator().manual_seed(0)
        try:
            error, detail = _CASES[op](device, generator), ""
        except Exception as problem:  # whatever an op raises is what this check is there to report
            error, detail = float("inf"), f"{type(problem).__name__}: {problem}"
        results.append(Result(op, device, chosen.name, chosen.reason, error, _BOUNDS.get(op, 1e-4), detail))
    return results


def _random(device: str, generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(device)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (got.double() - expected.double()).abs().max().item()


def _tree(device: str, generator: torch.Generator, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    visible = torch.eye(nodes, dtype=torch.bool)
    parents = [-1]
    for node in range(1, nodes):
        parent = int(torch.randint(node, (1,), generator=generator))
        visible[node] |= visible[parent]
        parents.append(parent)
    return medusa_kernels.ancestor_words(visible).to(device), torch.tensor(parents, dtype=torch.int32, device=device)


def _tree_attention(device: str, generator: torch.Generator) -> float:
    words, _ = _tree(device, generator, 65)
    q, k, v = (_random(device, generator, 2, *shape) for shape in ((65, 8, 64), (2, 200, 64), (2, 200, 64)))
    lengths = torch.tensor([100, 3], dtype=torch.int32, device=device)
    return _difference(
        medusa_kernels.tree_attention(q, k, v, lengths, words), reference.tree_attention(q, k, v, lengths, words)
    )


def _rope_append(device: str, generator: torch.Generator) -> float:
    q, k, v = (_random(device, generator, 2, 5, heads, 64) for heads in (4, 2, 2))
    cos, sin = (_random(device, generator, 40, 64) for _ in range(2))
    lengths = torch.tensor([7, 0], dtype=torch.int32, device=device)
    depths = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32, device=device)
    caches = torch.zeros(2, 2, 2, 2, 40, 64, device=device)
    (k_got, v_got), (k_expected, v_expected) = caches
    got = medusa_kernels.rope_append(q, k, v, cos, sin, k_got, v_got, lengths, depths)
    expected = reference.rope_append(q, k, v, cos, sin, k_expected, v_expected, lengths, depths)
    return max(_difference(got, expected), _difference(caches[0], caches[1]))


def _heads_topk(device: str, generator: torch.Generator) -> float:
    hidden = _random(device, generator, 2, 64)
    w1, b1 = _random(device, generator, 3, 64, 64) / 8, _random(device, generator, 3, 64)
    w2 = _random(device, generator, 3, 500, 64)
    got, tokens = medusa_kernels.heads_topk(hidden, w1, b1, w2, 5)
    expected, expected_tokens = reference.heads_topk(hidden, w1, b1, w2, 5)
    return _difference(got, expected) if torch.equal(tokens, expected_tokens) else float("inf")


def _tree_verify(device: str, generator: torch.Generator) -> float:
    _, parents = _tree(device, generator, 9)
    hidden, weight = _random(device, generator, 2, 9, 64), _random(device, generator, 500, 64)
    tokens = torch.randint(500, (2, 9), generator=generator).to(device)
    got = medusa_kernels.tree_verify(hidden, weight, tokens, parents)
    expected = reference.tree_verify(hidden, weight, tokens, parents)
    return max(_difference(a, b) for a, b in zip(got, expected, strict=True))


def _kv_compact(device: str, generator: torch.Generator) -> float:
    got = _random(device, generator, 3, 2, 2, 2, 30, 64)
    expected = got.clone()
    lengths = torch.tensor([4, 11], dtype=torch.int32, device=device)
    path = torch.tensor([[0, 2, 5, 9], [0, 1, 4, 4]], dtype=torch.int32, device=device)
    accepted = torch.tensor([3, 2], dtype=torch.int32, device=device)
    medusa_kernels.kv_compact(got, lengths, path, accepted)
    reference.kv_compact(expected, lengths, path, accepted)
    return _difference(got, expected)


def _decode_linear(device: str, generator: torch.Generator) -> float:
    x, bias = _random(device, generator, 5, 96), _random(device, generator, 70)
    weights = [_random(device, generator, rows, 96) / 10 for rows in (70, 33, 70)]
    residual = _random(device, generator, 5, 33)
    cases: list[tuple[list[torch.Tensor], list[torch.Tensor | None] | None, bool, torch.Tensor | None]] = [
        (weights, [bias, None, None], False, None),
        (weights[::2], None, True, None),
        (weights[1:2], None, False, residual),
    ]
    errors = []
    for matrices, biases, gate, added in cases:
        got = medusa_kernels.decode_linear(x, matrices, biases, gate=gate, residual=added)
        errors.append(_difference(got, reference.decode_linear(x, matrices, biases, gate=gate, residual=added)))
    return max(errors)


def _add_rms_norm(device: str, generator: torch.Generator) -> float:
    x, delta = _random(device, generator, 2, 3, 200)
    weight = _random(device, generator, 200)
    got = medusa_kernels.add_rms_norm(x, delta, weight, 1e-6)
    expected = reference.add_rms_norm(x, delta, weight, 1e-6)
    return max(_difference(a, b) for a, b in zip(got, expected, strict=True))


def _tree_accept(device: str, generator: torch.Generator) -> float:
    parents, paths = [-1, 0, 0, 1, 3], [[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 2, 2], [0, 1, 3, 3], [0, 1, 3, 4]]
    next_tokens = torch.randint(9, (3, 5), generator=generator)
    tokens = next_tokens[:, parents]
    tokens[0, 4] += 1
    results = []
    for function in (medusa_kernels.tree_accept, reference.tree_accept):
        integers = {name: torch.tensor(value, dtype=torch.int32) for name, value in
                    (("lengths", [7, 8, 9]), ("count", [1, 2, 3]), ("log", [[0] * 4] * 3))}  # fmt: skip
        state = {
            **integers,
            "root": torch.zeros(3, dtype=torch.int64),
            "state_hidden": torch.zeros(3, 20),
            "output": torch.zeros(3, 30, dtype=torch.int64),
            "finished": torch.tensor([False, False, True]),
        }
        state = {name: tensor.to(device) for name, tensor in state.items()}
        inputs = (
            tokens, next_tokens, torch.arange(300.0).view(3, 5, 20), torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32),
            torch.tensor(paths), torch.tensor([50]), torch.full((3,), 5, dtype=torch.int32), torch.tensor([2]),
        )  # fmt: skip
        returned = function(*(tensor.to(device) for tensor in inputs), **state)
        results.append([*returned, *state.values()])
    return max(_difference(a, b) for a, b in zip(*results, strict=True))


def _tree_select(device: str, generator: torch.Generator) -> float:
    paths = [[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 2, 2], [0, 1, 3, 3], [0, 1, 3, 4]]
    depths = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32, device=device)
    tokens = torch.randint(9, (3, len(paths)), generator=generator).to(device)
    logprobs = -_random(device, generator, 3, len(paths)).abs()
    arguments = (tokens, logprobs, depths, torch.tensor(paths, device=device), 3)
    got, expected = medusa_kernels.tree_select(*arguments), reference.tree_select(*arguments)
    return max(_difference(a, b) for a, b in zip(got, expected, strict=True))


_CASES: dict[str, Callable[[str, torch.Generator], float]] = {
    "tree_attention": _tree_attention,
    "rope_append": _rope_append,
    "heads_topk": _heads_topk,
    "tree_verify": _tree_verify,
    "kv_compact": _kv_compact,
    "decode_linear": _decode_linear,
    "add_rms_norm": _add_rms_norm,
    "tree_accept": _tree_accept,
    "tree_select": _tree_select,
}
_BOUNDS = {"kv_compact": 0.0, "tree_accept": 0.0, "tree_select": 0.0}  # they compute no floats
