"""Tokens copied from the text: found where a plain search finds them, lossless, and useful where text repeats."""

import random

import pytest
import torch
from models import FAMILIES, VOCAB, heads_for, padded, prompts, tiny, transformers_greedy

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.lookup import LONGEST_MATCH, Text, look_up
from medusa_decoding.decode.runtime import progress


def searched(text, length):
    """The tokens that a plain search copies, or None if the last token did not occur before."""
    end = len(text) - 1
    best = (0, -1)
    for place in range(end):
        matched = 0
        while matched < LONGEST_MATCH and matched <= place and text[place - matched] == text[end - matched]:
            matched += 1
        if matched and (matched, place) > best:
            best = (matched, place)
    if best[0] == 0:
        return None
    copied = list(text)
    for step in range(length):
        copied.append(copied[best[1] + 1 + step])
    return copied[len(text) :]


@pytest.mark.parametrize("vocab", [2, 3, 11])
def test_copies_what_a_plain_search_finds(vocab):
    generator = random.Random(0)
    found = 0
    for _ in range(60):
        lengths = [generator.randint(1, 20) for _ in range(3)]
        counts = [generator.randint(1, 12) for _ in range(3)]
        rows = [[generator.randrange(vocab) for _ in range(n + c)] for n, c in zip(lengths, counts, strict=True)]
        # A row's new tokens are followed by those of an earlier generation.
        output = torch.randint(0, vocab, (3, 16))
        for row, (text, prompt, count) in enumerate(zip(rows, lengths, counts, strict=True)):
            output[row, :count] = torch.tensor(text[prompt:])
        held = Text.allocate(3, 40, 16, torch.device("cpu"))
        held.begin([torch.tensor(text[:prompt]) for text, prompt in zip(rows, lengths, strict=True)])
        got = look_up(held, output, torch.tensor(counts, dtype=torch.int32), 6).tolist()
        for text, copied in zip(rows, got, strict=True):
            expected = searched(text, 6)
            if expected is not None:
                assert copied == expected
                found += 1
    assert found > 60


def test_a_text_can_be_used_again():
    held = Text.allocate(1, 12, 4, torch.device("cpu"))
    held.begin([torch.tensor([1, 2, 3, 4, 5, 1, 2, 3])])
    look_up(held, torch.tensor([[4, 9, 9, 9]]), torch.tensor([1]), 2)
    held.begin([torch.tensor([7, 8])])
    assert look_up(held, torch.tensor([[7, 1, 1, 1]]), torch.tensor([1]), 2).tolist() == [[8, 7]]


@pytest.fixture(params=[0, 1], ids=["host", "device"])
def late(request, monkeypatch):
    """The host copies, or as on a GPU the step does, because results are read one step late."""
    monkeypatch.setattr(progress, "STEPS_LATE", {"cpu": request.param})


TREES = [Tree.chain(2).with_lookup(6), Tree.cartesian([3, 2]).with_lookup(3)]


@pytest.mark.parametrize("tree", TREES, ids=repr)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("late")
def test_equals_transformers(family, tree):
    model = tiny(family, max_position_embeddings=256)
    rows = prompts(3, [7, 1, 30])
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), tree) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=40)
        plain = medusa.generate(ids, mask, max_new_tokens=40, tree=Tree(tree.choices))
    assert output.sequences[:, ids.shape[1] :].tolist() == [transformers_greedy(model, row, 40) for row in rows]
    assert output.steps < plain.steps, "nothing was copied"


@pytest.mark.usefixtures("late")
def test_text_that_certainly_repeats_is_copied_entirely():
    """A model whose next token depends on the last one alone runs in a circle."""
    model = tiny(num_hidden_layers=1, max_position_embeddings=512)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
    [row] = prompts(1, [2 * VOCAB])
    with MedusaModel(model, tree=Tree([], lookup=7)) as medusa:
        output = medusa.generate(row[None], max_new_tokens=80)
    assert output.sequences[0, 2 * VOCAB :].tolist() == transformers_greedy(model, row, 80)
    # After one round, the end of the text has occurred before.
    assert output.accept_lengths[0][-7:-1] == [7] * 6


def test_sampling_and_processors_follow_a_copied_branch_that_repeats_a_draft():
    """The copied branch often begins with a token that the heads also propose: either may lead further."""
    model = tiny(max_position_embeddings=256)
    rows = prompts(2, [20, 13])
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), Tree.cartesian([3]).with_lookup(6)) as medusa:
        for settings in ({"do_sample": True, "seed": 1, "temperature": 0.2}, {"repetition_penalty": 1.05}):
            output = medusa.generate(ids, mask, max_new_tokens=50, **settings)
            plain = medusa.generate(ids, mask, max_new_tokens=50, tree=Tree([]), **settings)
            assert output.sequences.tolist() == plain.sequences.tolist()
            assert max(map(max, output.accept_lengths)) > 1, "the copied branch was never followed"


@pytest.mark.parametrize("lookup", [-1, 256, 1.5])
def test_an_invalid_lookup_branch_is_refused(lookup):
    with pytest.raises(ValueError, match="lookup: expected 0 to 255 with 0 choices, got"):
        Tree([], lookup=lookup)
    with pytest.raises(ValueError, match="lookup: expected 0 to 192 with 63 choices, got 193"):
        Tree([[i] for i in range(63)], lookup=193)


def test_shape_and_file(tmp_path):
    tree = Tree([[0], [1], [0, 0]], lookup=3)
    assert tree.parents.tolist() == [-1, 0, 0, 1, 0, 4, 5]
    assert tree.depths.tolist() == [0, 1, 1, 2, 1, 2, 3]
    assert tree.ranks.tolist() == [-1, 0, 1, 0, -1, -1, -1]
    assert (tree.num_nodes, tree.depth, tree.top_k) == (7, 3, 2)
    assert tree.ancestors.flatten().tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10001, 0b110001, 0b1110001]
    tree.save(tmp_path / "tree.json")
    assert Tree.load(tmp_path / "tree.json") == tree
    assert tree != Tree(tree.choices)
    assert hash(tree) != hash(Tree(tree.choices))
