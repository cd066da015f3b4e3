"""A small check of every op against its reference on a device, for a running installation.

The cases are few and fixed: enough to notice a broken build, a wrong driver or a miscompiled kernel. The test suite
tests the ops thoroughly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import medusa_kernels
from medusa_kernels import reference
from medusa_kernels._registry import OPS, served_by


@dataclass(frozen=True)
class Result:
    """One op's check: what serves the op on the device and why, and its largest difference from the reference.

    The error is infinite if the op raised; then `detail` is the exception's text, else "". `bound` is the most allowed.
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


Case = tuple[tuple[Any, ...], dict[str, Any]]
_EXACT = ("kv_compact", "tree_accept", "tree_select")  # they compute no floats


def run(device: str) -> list[Result]:
    """Check every op on a device ("cpu", "cuda:1", or "cuda" for the current GPU), in fp32.

    Raises:
        ValueError: neither a CPU nor a CUDA device.
    """
    results = []
    for op in OPS:
        chosen = served_by(op, device)
        try:
            cases = globals()[f"_{op}"](torch.Generator().manual_seed(0))
            errors = [_error(op, case, device) for case in cases]
            error, detail = torch.tensor(errors, dtype=torch.float64).max().item(), ""
        except Exception as problem:  # whatever an op raises is what this check is there to report
            error, detail = float("inf"), f"{type(problem).__name__}: {problem}"
        results.append(Result(op, device, chosen.name, chosen.reason, error, 0.0 if op in _EXACT else 1e-4, detail))
    return results


def _error(op: str, case: Case, device: str) -> float:
    """Return the largest difference from the reference, among the results and the arguments that the op may write."""
    both = []
    for module in (medusa_kernels, reference):
        args, options = tree_map_only(torch.Tensor, lambda tensor: tensor.clone().to(device), case)
        result = getattr(module, op)(*args, **options)
        both.append(tree_leaves((result, args, options)))
    pairs = [pair for pair in zip(*both, strict=True) if isinstance(pair[0], torch.Tensor)]
    return torch.stack([(got.double() - expected.double()).abs().max() for got, expected in pairs]).max().item()


def _integers(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _tree_attention(generator: torch.Generator) -> Iterator[Case]:
    nodes = 65
    visible = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        visible[node] |= visible[int(torch.randint(node, (1,), generator=generator))]
    q, k, v = (torch.randn(2, *shape, generator=generator) for shape in ((nodes, 8, 64), (2, 2000, 64), (2, 2000, 64)))
    words = medusa_kernels.ancestor_words(visible)
    yield (q, k, v, _integers(100, 3), words), {}
    # Enough keys for shares.
    yield (q, k, v, _integers(1900, 3), words), {}
    yield (q[:, :1], k, v, _integers(1900, 3), words[:1, :1]), {}


def _rope_append(generator: torch.Generator) -> Iterator[Case]:
    q, k, v = (torch.randn(2, 5, heads, 64, generator=generator) for heads in (4, 2, 2))
    cos, sin = torch.randn(2, 40, 64, generator=generator)
    k_cache, v_cache = torch.zeros(2, 2, 2, 40, 64)
    rest = cos, sin, k_cache, v_cache, _integers(7, 0), _integers(0, 1, 1, 2, 3)
    norms = {name: torch.rand(64, generator=generator) for name in ("q_norm", "k_norm")}
    yield (q, k, v, *rest), {}
    parts = torch.randn(3, 2, 5, 8, 64, generator=generator).split((4, 2, 2), 3)
    yield (*parts, *rest), norms
    yield (q, k, v, cos[:, :48], sin[:, :48], *rest[2:]), norms | {"norm_offset": 1.0}


def _heads_topk(generator: torch.Generator) -> Iterator[Case]:
    hidden, b1 = torch.randn(2, 64, generator=generator), torch.randn(3, 64, generator=generator)
    w1, w2 = torch.randn(3, 64, 64, generator=generator) / 8, torch.randn(3, 500, 64, generator=generator)
    yield (hidden, w1, b1, w2, 5), {}
    small = torch.randint(-127, 128, (3, 500, 64), generator=generator, dtype=torch.int8)
    yield (hidden, w1, b1, small, 5), {"w2_scale": (1 + torch.rand(3, 500, generator=generator)) / 200}
    codes = torch.randint(256, (3, 500, 32), generator=generator, dtype=torch.uint8)
    yield (hidden, w1, b1, codes, 5), {"w2_scale": (1 + torch.rand(3, 500, 2, generator=generator)) / 9, "codes": "nf4"}
    root, w_root = torch.randn(2, 64, generator=generator), torch.randn(3, 64, 64, generator=generator) / 8
    noise = torch.randn(2, 4, 500, generator=generator)
    yield (hidden, w1, b1, w2, 5), {"root": root, "w_root": w_root, "temperature": 0.8, "noise": noise, "softcap": 5.0}


def _tree_verify(generator: torch.Generator) -> Iterator[Case]:
    hidden, weight = torch.randn(2, 9, 64, generator=generator), torch.randn(500, 64, generator=generator)
    tokens = torch.randint(500, (2, 9), generator=generator)
    yield (hidden, weight, tokens, _integers(-1, 0, 0, 1, 1, 3, 2, 5, 7)), {}
    codes = torch.randint(256, (500, 32), generator=generator, dtype=torch.uint8)
    scale, zero = (1 + torch.rand(500, 2, generator=generator)) / 9, codes[:, :2] & 15
    yield (hidden, codes, tokens), {"weight_scale": scale, "weight_zero": zero.contiguous()}
    yield (hidden, weight, tokens), {"divisor": 2.0, "softcap": 5.0}


def _kv_compact(generator: torch.Generator) -> Iterator[Case]:
    path = _integers([0, 2, 5, 9], [0, 1, 4, 4])
    yield (torch.randn(3, 2, 2, 2, 30, 64, generator=generator), _integers(4, 11), path, _integers(3, 2)), {}


def _decode_linear(generator: torch.Generator) -> Iterator[Case]:
    x, bias = torch.randn(5, 96, generator=generator), torch.randn(70, generator=generator)
    weights = [torch.randn(rows, 96, generator=generator) / 10 for rows in (70, 33, 70)]
    yield (x, weights, [bias, None, None]), {}
    yield (x, weights[::2]), {"gate": True}
    yield (x, weights[::2]), {"gate": True, "activation": "gelu_tanh"}
    yield (x, weights[1:2]), {"residual": torch.randn(5, 33, generator=generator), "factor": 0.5}
    yield (x, weights, [bias, None, None]), {"parts": 2}
    codes = torch.randint(256, (70, 48), generator=generator, dtype=torch.uint8)
    scales = [torch.rand(70, 3, generator=generator) / 10]
    yield (x, [codes]), {"scales": scales, "zeros": [codes[:, :3].contiguous() % 17]}


def _decoder_layers(generator: torch.Generator) -> Iterator[Case]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def layer(window: bool) -> medusa_kernels.LayerWeights:
        shapes = ((64, 48), (32, 48), (32, 48), (48, 64), (72, 48), (72, 48), (48, 72))
        projections = [medusa_kernels.Projection(random(*shape), random(shape[0])) for shape in shapes]
        head_norms = (torch.ones(16), torch.ones(16)) if window else (None, None)
        return medusa_kernels.LayerWeights(torch.ones(48), torch.ones(48), projections, *head_norms)

    weights, forms = medusa_kernels.packed([layer(False), layer(True)], torch.ones(48))
    visible = torch.tril(torch.ones(5, 5, dtype=torch.bool))
    tree = _integers(0, 1, 2, 3, 4), medusa_kernels.ancestor_words(visible)
    cos, sin = torch.randn(2, 40, 16, generator=generator)
    cache = torch.randn(2, 2, 2, 2, 30, 16, generator=generator)
    inputs = torch.randn(2, 5, 48, generator=generator), weights, forms, cache, cos, sin, _integers(20, 3)
    options = {"windows": [0, 6], "eps": 1e-6, "scale": 0.25}
    yield (*inputs, *tree), options
    yield (*inputs, *tree), options | {"norm_offset": 1.0, "activation": "gelu_tanh", "factor": 0.5, "softcap": 1.0}


def _add_rms_norm(generator: torch.Generator) -> Iterator[Case]:
    x, delta = torch.randn(2, 3, 200, generator=generator)
    yield (x, delta, torch.randn(200, generator=generator), 1e-6), {}
    parts = torch.randn(3, 3, 200, generator=generator)
    yield (x, parts, torch.randn(200, generator=generator), 1e-6), {}
    yield (x, parts, None, 1e-6), {"delta_norm": torch.randn(200, generator=generator), "norm_offset": 1.0}


_PATHS = [[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 2, 2], [0, 1, 3, 3], [0, 1, 3, 4]]
_DEPTHS = [0, 1, 1, 2, 3]


def _tree_accept(generator: torch.Generator) -> Iterator[Case]:
    next_tokens = torch.randint(9, (3, 5), generator=generator)
    tokens = next_tokens[:, [-1, 0, 0, 1, 3]]
    tokens[0, 4] += 1
    hidden, max_new = torch.arange(300.0).view(3, 5, 20), _integers(5, 5, 5)
    tree = _integers(*_DEPTHS), torch.tensor(_PATHS)
    state = {
        "lengths": _integers(7, 8, 9),
        "root": torch.zeros(3, dtype=torch.int64),
        "state_hidden": torch.zeros(3, 20),
        "output": torch.zeros(3, 30, dtype=torch.int64),
        "count": _integers(1, 2, 3),
        "finished": torch.tensor([False, False, True]),
        "log": torch.zeros(3, 4, dtype=torch.int32),
        "check": torch.randn(3, generator=generator),
        "report": torch.zeros(3, 9, dtype=torch.int32),
    }
    yield (tokens, next_tokens, hidden, *tree, torch.tensor([50]), max_new, torch.tensor([2])), state


def _tree_select(generator: torch.Generator) -> Iterator[Case]:
    tokens = torch.randint(9, (3, len(_PATHS)), generator=generator)
    logprobs = -torch.randn(3, len(_PATHS), generator=generator).abs()
    yield (tokens, logprobs, _integers(*_DEPTHS), torch.tensor(_PATHS), 3), {}


def _gumbel_noise(generator: torch.Generator) -> Iterator[Case]:
    yield (torch.randint(-(2**63), 2**63 - 1, (3,), generator=generator), _integers(0, 9, 70_000), 2, 301), {}


def _draw_tokens(generator: torch.Generator) -> Iterator[Case]:
    logits, noise = 3 * torch.randn(2, 5, 700, generator=generator), torch.randn(2, 3, 700, generator=generator)
    yield (logits, noise, _integers(0, 1, 1, 2, 2)), {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
