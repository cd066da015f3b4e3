"""Pictures of trees: small ones compared with drawings by hand, large ones by properties of every picture."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_decoding import Tree
from medusa_decoding.trees.plot import as_text


def picture(tree, width=80, shares=None):
    """The drawing, and the words below it as one line."""
    drawing, words = as_text(tree, width, shares).split("\n\n")
    return drawing.split("\n"), " ".join(words.split("\n"))


def test_ranks_by_hand():
    lines, words = picture(Tree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), width=20)
    assert lines == [
        "0        ●",
        "    ┌────┴┬───┐",
        "1   0     1   2",
        "  ┌─┴─┐   │",
        "2 0   1   0",
        "  │",
        "3 0",
    ]
    assert words.startswith("8 nodes, depth 3. ● root; digits (a is 10): rank")


def test_least_likely_nodes_are_left_out_and_counted():
    # 20 columns hold 9 leaves: with 12 children, 8 and a mark for the other 4.
    shares = [0.01 * (12 - rank) for rank in range(12)]
    shares[3], shares[11] = shares[11], shares[3]
    lines, words = picture(Tree([[rank] for rank in range(12)]), 20, shares)
    # Ranks 0 to 2 have 10 % or more, 3 and 9 to 11 are gone, 4 to 8 have 4 to 8 %.
    assert lines[-1].split() == ["1", "▓", "▓", "▓", "▒", "▒", "▒", "▒", "▒", "…"]
    assert "… stands for 4 of 13 nodes" in words


@st.composite
def trees(draw):
    size = draw(st.integers(1, 256))
    random = draw(st.randoms(use_true_random=False))
    known, choices = [()], []
    while len(choices) < size - 1:
        parent = random.choice(known[-40:] if random.random() < 0.5 else known)
        rank = sum(path[:-1] == parent and len(path) == len(parent) + 1 for path in choices)
        choices.append((*parent, rank))
        known.append(choices[-1])
    return Tree([list(path) for path in choices])


@given(trees(), st.integers(20, 200), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_picture_fits_and_says_what_is_missing(tree, width, shaded):
    shares = [0.9 ** (sum(path) + len(path)) for path in tree.choices] if shaded else None
    lines, words = picture(tree, width, shares)
    assert max(map(len, as_text(tree, width, shares).split("\n"))) <= width
    margin = len(str(tree.depth)) + 1
    marks = [line[margin:].replace(" ", "") for line in lines[::2]]
    nodes = sum(len(row) - row.count("…") for row in marks)
    hidden = re.search(r"… stands for (\d+) of (\d+) nodes", words)
    assert nodes + (int(hidden.group(1)) if hidden else 0) == tree.num_nodes
    assert (hidden is None) is ("…" not in "".join(marks))
    for number, row in enumerate(marks):
        assert lines[2 * number][: margin - 1].strip() == str(number)
        assert row.count("●") == (number == 0)
    # Every node but the root hangs from an edge above it, and every edge's end has a node.
    for above, edges, below in zip(lines[::2], lines[1::2], lines[2::2], strict=False):
        ends = {place for place, sign in enumerate(edges) if sign in "│┌┬┐┼" and place >= margin}
        assert ends == {place for place, sign in enumerate(below) if sign != " " and place >= margin}
        starts = {place for place, sign in enumerate(edges) if sign in "│┴┼" and place >= margin}
        assert starts <= {place for place, sign in enumerate(above) if sign != " " and place >= margin}


def test_the_candidates_of_a_dynamic_tree_are_drawn():
    """The nodes verified differ from step to step, so no expected tokens are shown."""
    tree = Tree([[0], [1], [0, 0]], keep=3)
    lines = as_text(tree, 40, [0.6, 0.2, 0.3]).splitlines()
    assert sum(line.count(mark) for line in lines[:5] for mark in "█▓▒░") == 3
    assert lines[6] == "3 nodes per step, of 4 candidates, depth"
    assert "tokens per step expected" not in " ".join(lines)
