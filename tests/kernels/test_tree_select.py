"""tree_select against a sort of whole paths, one row at a time, in lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_kernels import tree_select
from medusa_kernels._registry import interpreted

Rows = list[list[Any]]


def lineages(parents: list[int]) -> list[list[int]]:
    """The nodes from the root to each node."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*found[parent], node] if parent >= 0 else [node])
    return found


def on(parents: list[int], tokens: Rows, logprobs: Rows, device: str) -> dict[str, Tensor]:
    lines = lineages(parents)
    length = max(map(len, lines))
    return {
        "tokens": torch.tensor(tokens, device=device),
        "logprobs": torch.tensor(logprobs, dtype=torch.float32, device=device),
        "depths": torch.tensor([len(line) - 1 for line in lines], dtype=torch.int32, device=device),
        "paths": torch.tensor([line + line[-1:] * (length - len(line)) for line in lines], device=device),
    }


def expected(parents: list[int], tokens: list[int], logprobs: list[float], nodes: int) -> list[list[Any]]:
    """Tokens, parents, depths, sets of ancestors and paths of the nodes to be selected in one row."""
    lines = lineages(parents)

    def score(node: int) -> float:
        total = np.float32(0.0)
        for step in lines[node][1:]:
            own = logprobs[step]
            total += np.float32(-np.inf if own != own else min(own, 0.0))
        return float(total)

    kept = sorted(sorted(range(len(parents)), key=lambda node: (-score(node), node))[:nodes])
    number = {node: place for place, node in enumerate(kept)}
    length = max(map(len, lines))
    paths = [[number[step] for step in lines[node]] for node in kept]
    return [
        [tokens[node] for node in kept],
        [number[parents[node]] if node else -1 for node in kept],
        [len(lines[node]) - 1 for node in kept],
        [set(path) for path in paths],
        [path + path[-1:] * (length - len(path)) for path in paths],
    ]


def check(got: tuple[Tensor, ...], parents: list[int], tokens: Rows, logprobs: Rows, nodes: int) -> None:
    out_tokens, out_parents, depths, ancestors, paths = got
    dtypes = [torch.int64, torch.int32, torch.int32, torch.int64, torch.int64]
    assert [tensor.dtype for tensor in got] == dtypes
    assert all(tensor.is_contiguous() for tensor in got)
    assert ancestors.shape == (len(tokens), nodes, -(-nodes // 64))
    for row, (own_tokens, own_logprobs) in enumerate(zip(tokens, logprobs, strict=True)):
        wanted = expected(parents, own_tokens, own_logprobs, nodes)
        assert out_tokens[row].tolist() == wanted[0]
        assert out_parents[row].tolist() == wanted[1]
        assert depths[row].tolist() == wanted[2]
        words = [[int(word) % 2**64 for word in node] for node in ancestors[row].tolist()]
        sets = [{64 * w + bit for w, word in enumerate(node) for bit in range(64) if word >> bit & 1} for node in words]
        assert sets == wanted[3]
        assert paths[row].tolist() == wanted[4]


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of up to 90 candidates, each after its parent."""
    size, far = draw(st.integers(1, 90)), draw(st.sampled_from([1, 3, 90]))
    return [-1, *(draw(st.integers(max(0, node - far), node - 1)) for node in range(1, size))]


@given(data=st.data())
@settings(max_examples=25 if interpreted() else 100)
def test_matches_a_sort(device: str, data: st.DataObject) -> None:
    """Few values, so that scores are equal; impossible and certain tokens; invalid log-probabilities."""
    parents = data.draw(trees(), label="parents")
    batch, size = data.draw(st.integers(1, 3), label="batch"), len(parents)
    nodes = data.draw(st.integers(1, size), label="nodes")
    values = st.sampled_from([0.0, -0.0, -0.1, -0.25, -1.0, -30.0, -1e-9, -float("inf"), float("nan"), 0.5])
    rows = st.lists(st.lists(values, min_size=size, max_size=size), min_size=batch, max_size=batch)
    logprobs = data.draw(rows, label="logprobs")
    tokens = [[1000 * row + node for node in range(size)] for row in range(batch)]
    check(tree_select(**on(parents, tokens, logprobs, device), nodes=nodes), parents, tokens, logprobs, nodes)


def test_example_by_hand(device: str) -> None:
    """Row 0's second child is likelier than the first, with its own child; row 1's first child is certain."""
    parents = [-1, 0, 0, 1, 1, 2, 5]
    logs = [[7.0, -2.0, -0.5, -0.1, -3.0, -0.25, -4.0], [7.0, 0.0, -5.0, 0.0, -1.0, -0.1, -0.1]]
    tokens = [[10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26]]
    got = tree_select(**on(parents, tokens, logs, device), nodes=4)
    assert got[0].tolist() == [[10, 11, 12, 15], [20, 21, 23, 24]]
    assert got[1].tolist() == [[-1, 0, 0, 2], [-1, 0, 1, 1]]
    assert got[2].tolist() == [[0, 1, 1, 2], [0, 1, 2, 2]]
    assert got[3][..., 0].tolist() == [[0b1, 0b11, 0b101, 0b1101], [0b1, 0b11, 0b111, 0b1011]]
    assert got[4].tolist() == [
        [[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 2, 2], [0, 2, 3, 3]],
        [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 3, 3]],
    ]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("size", "nodes"), [(257, 256), (1000, 65), (8192, 256)])
def test_many_candidates(device: str, size: int, nodes: int) -> None:
    generator = np.random.default_rng(size)
    parents = [-1, *(int(generator.integers(max(0, node // 9), max(1, node // 7 + 1))) for node in range(1, size))]
    logprobs = (-generator.exponential(size=(2, size)).astype(np.float32)).tolist()
    tokens = generator.integers(0, 10**6, size=(2, size)).tolist()
    check(tree_select(**on(parents, tokens, logprobs, device), nodes=nodes), parents, tokens, logprobs, nodes)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("certain", [True, False])
def test_a_chain_of_256_nodes(device: str, certain: bool) -> None:
    """A path as long as the tree, with equal or falling scores."""
    parents = list(range(-1, 255))
    tokens, logprobs = [list(range(256))], [[0.0 if certain else -0.01] * 256]
    check(tree_select(**on(parents, tokens, logprobs, device), nodes=256), parents, tokens, logprobs, 256)


def case(device: str) -> dict[str, Any]:
    parents = [-1, 0, 0, 1, 1, 2, 5]
    logs = [[0.0, -2.0, -0.5, -0.1, -3.0, -0.25, -4.0], [0.0, 0.0, -5.0, 0.0, -1.0, -0.1, -0.1]]
    return {**on(parents, [[10, 11, 12, 13, 14, 15, 16]] * 2, logs, device), "nodes": 5}


def test_views_and_empty_inputs(device: str) -> None:
    arguments = case(device)
    wanted = tree_select(**arguments)
    spread = {**arguments, "paths": arguments["paths"].T.contiguous().T}
    spread["logprobs"] = torch.stack([arguments["logprobs"], arguments["logprobs"] - 1], -1)[..., 0]
    for got, tensor in zip(tree_select(**spread), wanted, strict=True):
        assert torch.equal(got, tensor)
    none = tree_select(**(arguments | {name: arguments[name][:0] for name in ("tokens", "logprobs")}))
    assert [tuple(tensor.shape) for tensor in none] == [(0, 5), (0, 5), (0, 5), (0, 5, 1), (0, 5, 4)]


GOOD = case("cpu")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "tokens-dtype": ({"tokens": torch.zeros(2, 7)}, "tokens: expected dtype int64"),
    "many": ({"tokens": torch.zeros(1, 8193).long()}, "tokens: expected 1 to 8192 candidates, got 8193"),
    "logprobs": ({"logprobs": torch.zeros(2, 6)}, r"logprobs: expected shape \[2, 7\], got \[2, 6\]"),
    "depths": ({"depths": torch.zeros(7).long()}, "depths: expected dtype int32"),
    "paths": ({"paths": torch.zeros(6, 4).long()}, r"paths: expected shape \[7, P\]"),
    "no-paths": ({"paths": torch.zeros(7, 0).long()}, "paths: expected at least 1 step"),
    "no-nodes": ({"nodes": 0}, "nodes: expected 1 to 7, got 0"),
    "many-nodes": ({"nodes": 8}, "nodes: expected 1 to 7, got 8"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_select(**(GOOD | change))


def test_passes_opcheck(device: str) -> None:
    torch.library.opcheck(torch.ops.medusa_kernels.tree_select.default, tuple(case(device).values()))
