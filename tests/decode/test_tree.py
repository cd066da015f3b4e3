"""Tree: order, derived tensors, refusals, search and files."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_decoding import Tree


@st.composite
def prefix_closed(draw, max_choices=80):
    """Grow random prefix-closed sets of paths, returned in random order."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, max_choices))):
        parent = draw(st.sampled_from([(), *paths]))
        child = (*parent, draw(st.integers(0, 6)))
        if child not in paths:
            paths.append(child)
    return draw(st.permutations(paths))


def words_to_sets(ancestors: torch.Tensor) -> list[set[int]]:
    """Decode bit words independently of how they were packed."""
    found = []
    for row in ancestors.tolist():
        bits = "".join(format(word % 2**64, "064b")[::-1] for word in row)
        found.append({j for j, bit in enumerate(bits) if bit == "1"})
    return found


@given(prefix_closed())
@settings(max_examples=60, deadline=None)
def test_derived_tensors_follow_from_the_paths(paths):
    tree = Tree([list(path) for path in paths])
    nodes = [(), *sorted(paths, key=lambda p: (len(p), p))]
    assert [tuple(path) for path in tree.choices] == nodes[1:]
    assert tree.num_nodes == len(nodes)
    assert tree.depth == max(map(len, nodes))
    assert tree.depths.tolist() == [len(node) for node in nodes]
    assert tree.parents.tolist() == [-1] + [nodes.index(node[:-1]) for node in nodes[1:]]
    assert tree.ranks.tolist() == [-1] + [node[-1] for node in nodes[1:]]
    prefixes = [{nodes.index(node[:d]) for d in range(len(node) + 1)} for node in nodes]
    assert tree.ancestors.shape == (len(nodes), -(-len(nodes) // 64))
    assert tree.ancestors.dtype == torch.int64
    assert words_to_sets(tree.ancestors) == prefixes
    for i, node in enumerate(nodes):
        expected = [nodes.index(node[:d]) for d in range(len(node) + 1)] + [i] * (tree.depth - len(node))
        assert tree.paths[i].tolist() == expected


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([[0, 0]], r"\[0, 0\].*prefix \[0\]"),
        ([[0], [0]], r"\[0\] is given twice"),
        ([[0], []], "non-empty path"),
        ([[-1]], r"at least 0, got \[-1\]"),
        ([[0.5]], "ranks"),
        ([[i] for i in range(256)], "at most 255 paths, got 256"),
    ],
)
def test_bad_paths_are_named(choices, words):
    with pytest.raises(ValueError, match=words):
        Tree(choices)


def test_fit_to_heads_names_the_path():
    tree = Tree([[0], [4], [0, 0], [0, 0, 0]])
    tree.check_fits(3, 5)
    with pytest.raises(ValueError, match=r"path \[0, 0, 0\] has depth 3, expected at most 2"):
        tree.check_fits(2, 5)
    with pytest.raises(ValueError, match=r"path \[4\] has rank 4, expected below 4"):
        tree.check_fits(3, 4)


def test_files_round_trip_and_accept_the_bare_list(tmp_path):
    tree = Tree.cartesian([2, 2])
    tree.save(tmp_path / "tree.json")
    assert Tree.load(tmp_path / "tree.json") == tree
    (tmp_path / "bare.json").write_text("[[0], [0, 0]]")
    assert Tree.load(tmp_path / "bare.json") == Tree.chain(2)
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


@pytest.mark.parametrize("content", [b"{", b"3"])
def test_bad_files_are_named(tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.json"):
        Tree.load(tmp_path / "bad.json")


def test_heads_may_have_different_numbers_of_ranks():
    accuracies = [[0.5, 0.2, 0.1], [0.3, 0.1], [0.2]]
    tree = Tree.optimal(accuracies, 12)
    assert tree.expected_tokens(accuracies) > 1.8
    with pytest.raises(ValueError, match=r"path \[0, 2\], got 2"):
        Tree([[0], [0, 2]]).expected_tokens(accuracies)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Tree.optimal([[0.5, 0.2]], 4), "at most 3"),
        (lambda: Tree.optimal([[1.5]], 2), r"\[0, 1\], got 1.5"),
        (lambda: Tree.cartesian([16, 16]), "at most 255"),
        (lambda: Tree.cartesian([2, 0]), "at least 1"),
        (lambda: Tree.dynamic(257, 2), "num_nodes: expected 1 to 256, got 257"),
        (lambda: Tree.dynamic(4, 2, 33), "top_k: expected 1 to 32, got 33"),
        (lambda: Tree.dynamic(9, 2, 2), "num_nodes: expected at most 7 with depth 2 and 2 drafts a head, got 9"),
        (
            lambda: Tree.dynamic(256, 6, 32),
            "num_nodes, depth, top_k: expected at most 8191 candidates, got more with 256, 6 and 32",
        ),
        (lambda: Tree([[0]], keep=3), "keep: expected 1 to 2 with 1 choices, got 3"),
        (lambda: Tree([[0]], lookup=255, keep=2), "lookup: expected 0 to 254 with 2 nodes of 1 choices, got 255"),
        (lambda: Tree.dynamic(4, 2).expected_tokens([[0.5]]), "tree: expected a static one, got a dynamic one"),
    ],
)
def test_bad_requests_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_dynamic_tree_differs_from_the_tree_of_its_candidates(tmp_path):
    tree = Tree.dynamic(6, depth=3, top_k=4)
    assert (tree.num_nodes, tree.keep) == (6, 6)
    assert tree != Tree(tree.choices)
    assert tree != Tree(tree.choices, keep=5)
    assert tree == Tree(tree.choices[::-1], keep=6)
    assert len({tree, Tree(tree.choices), Tree(tree.choices, keep=5), Tree(tree.choices, keep=6)}) == 3
    copying = tree.with_lookup(5)
    assert (copying.num_nodes, copying.keep, copying.lookup, copying.depth) == (11, 6, 5, 5)
    assert len(copying.parents) == 1 + len(tree.choices) + 5
    for one in (tree, copying):
        one.save(tmp_path / "t.json")
        assert Tree.load(tmp_path / "t.json") == one
    assert repr(tree) == f"Tree(num_nodes=6, depth=3, candidates={len(tree.choices)})"


def test_limits_are_those_of_the_kernels():
    from medusa_decoding.trees import tree

    modules = (
        importlib.import_module("medusa_kernels.heads_topk"),
        importlib.import_module("medusa_kernels.tree_select"),
    )
    assert (modules[0].MAX_K, modules[1].MAX_CANDIDATES) == (tree.MAX_RANKS, tree.MAX_CANDIDATES)
