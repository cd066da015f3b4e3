"""Pictures of trees: small ones compared with drawings by hand, large ones by properties of every picture."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_decoding import Tree
from medusa_decoding.trees.plot import PLAIN_CHARACTERS, as_figure, as_text, path_shares

ACCURACIES = [[0.6, 0.2, 0.05], [0.5, 0.1, 0.02], [0.4, 0.1, 0.01]]


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


def test_shades_by_hand():
    tree = Tree([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
    shares = path_shares(tree, ACCURACIES)
    assert shares == pytest.approx([0.6, 0.2, 0.05, 0.3, 0.06, 0.1])
    lines, words = picture(tree, 20, [0.6, 0.2, 0.05, 0.3, 0.02, 0.1])
    assert lines == [
        "0        ●",
        "    ┌────┴┬───┐",
        "1   █     ▓   ▒",
        "  ┌─┴─┐   │",
        "2 █   ░   ▓",
    ]
    assert words.startswith("7 nodes, depth 2; 2.270 tokens per step expected.")
    assert "█ 30% or more, ▓ 10% or more, ▒ 3% or more, ░ fewer" in words


def test_root_alone_and_copied_branch():
    assert picture(Tree([]))[0] == ["0 ●"]
    lines, words = picture(Tree([[0]], lookup=2))
    assert lines == ["0   ●", "  ┌─┴─┐", "1 0   ◇", "      │", "2     ◇"]
    assert words.startswith("4 nodes, 2 of them copied from the text, depth 2.")
    assert words.endswith("◇ copied.")


def test_plain_characters():
    text = as_text(Tree([[rank] for rank in range(50)], lookup=1), 30).translate(PLAIN_CHARACTERS)
    assert text.isascii()


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


def test_too_few_columns_are_refused():
    with pytest.raises(ValueError, match="width: expected at least 20 columns, got 19"):
        as_text(Tree([[0], [1]]), 19)


def test_figure_has_one_point_per_node():
    pytest.importorskip("matplotlib")
    tree = Tree([[0], [1], [0, 0], [0, 1]], lookup=1)
    shares = [0.64, 0.16, 0.36, 0.04]
    figure = as_figure(tree, shares)
    lines, drafted, copied = figure.axes[0].collections
    points = {tuple(point) for dots in (drafted, copied) for point in dots.get_offsets().tolist()}
    assert len(points) == tree.num_nodes == 6
    assert len(copied.get_offsets()) == 1
    assert sorted(-y for _, y in points) == [0, 1, 1, 1, 2, 2]
    segments = [tuple(map(tuple, segment.tolist())) for segment in lines.get_segments()]
    assert all(start in points and end in points and start[1] - end[1] == 1 for start, end in segments)
    assert len({end for _, end in segments}) == 5


def test_plot_writes_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    tree = Tree.cartesian([3, 2])
    figure = tree.plot(ACCURACIES, tmp_path / "tree.png")
    content = (tmp_path / "tree.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["tree.png"]
    expected = 1 + 0.85 + 0.85 * 0.6
    assert f"{expected:.3f} tokens per step" in figure.axes[0].get_title()
    assert "tokens" not in tree.plot().axes[0].get_title()


def test_the_candidates_of_a_dynamic_tree_are_drawn():
    """The nodes verified differ from step to step, so no expected tokens are shown."""
    tree = Tree([[0], [1], [0, 0]], keep=3)
    lines = as_text(tree, 40, [0.6, 0.2, 0.3]).splitlines()
    assert sum(line.count(mark) for line in lines[:5] for mark in "█▓▒░") == 3
    assert lines[6] == "3 nodes per step, of 4 candidates, depth"
    assert "tokens per step expected" not in " ".join(lines)
