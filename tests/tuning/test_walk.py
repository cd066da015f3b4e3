"""Walked trees: by hand, compared with all possible trees, and with the steps of real decoding."""

import hashlib
import itertools
import json
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_decoding import MedusaHeads, MedusaModel, Tree
from medusa_decoding.evaluation import Prompt
from medusa_decoding.evaluation.prompts import Conversations
from medusa_decoding.tuning.calibration import NONE, Calibration
from medusa_decoding.tuning.collect import calibrate
from medusa_decoding.tuning.expected import expect
from medusa_decoding.tuning.replay import walk
from medusa_decoding.tuning.search import joint_tree, walked_tree
from medusa_decoding.tuning.texts import Settings, Writer

N = NONE
# Eight tokens after the prompt; one path per position.
TEXT = ((0, 0), (0, 1), (N, 0), (0, 0), (1, N), (N, 0), (0, N))


def test_by_hand():
    found = Calibration(2, 2, [[TEXT], [], [((1, N),)]])
    # From 0, the first draft token is right: to 2; none: to 3; right: to 5; none: to 6; right: the end, all seven done.
    chain = walk(found, Tree([[0]]))
    assert (chain.tokens, chain.steps) == ((7, 0, 1), (5, 0, 1))
    assert chain.starts == Counter([(0, 0), (N, 0), (0, 0), (N, 0), (0, N), (1, N)])
    # From 0 two are right: to 3; two again: to 6.
    pairs = walk(found, Tree([[0], [0, 0]]))
    assert (pairs.tokens, pairs.steps) == ((7, 0, 1), (3, 0, 1))
    assert pairs.tokens_per_step == pytest.approx(2.0)
    assert walk(found, Tree([])).steps == (7, 0, 1)
    # A last step that the text's end cuts short.
    assert walk(Calibration(2, 2, [[((0, 0), (0, N))]]), Tree([[0], [0, 0]])).steps == (1,)


def test_three_expectations_by_hand():
    found = Calibration(2, 2, [[TEXT], [TEXT]])
    tree = Tree([[0], [0, 0]])
    expected = expect(found, tree)
    # Of the six positions with two targets: the first head is right at 3, the second at 4, both at 2.
    assert expected.independent.value == pytest.approx(1 + 3 / 6 + 3 / 6 * 4 / 6)
    assert expected.paths.value == pytest.approx(1 + 3 / 6 + 2 / 6)
    assert expected.walked.value == pytest.approx(7 / 3)
    # Equal prompts: another draw of them changes nothing.
    for one in (expected.independent, expected.paths, expected.walked):
        assert (one.low, one.high) == pytest.approx((one.value, one.value))


def test_intervals_are_over_prompts():
    """Two kinds of prompts, half of each: every draw has a number of the first kind, from the binomial distribution."""
    good, bad = ((0,),) * 40, ((N,),) * 40
    found = Calibration(1, 1, [[good]] * 8 + [[bad]] * 8)
    expected = expect(found, Tree([[0]]))
    # Of a binomial with 16 draws at 1/2, 2.5 % lie at or below 4 or so, 2.5 % at or above 12.
    assert (expected.paths.low, expected.paths.high) == pytest.approx((1 + 4 / 16, 1 + 12 / 16), abs=1 / 16 + 1e-9)
    assert expected.independent == expected.paths  # one head
    # n prompts of 20 steps, 16 - n of 40, 40 tokens each.
    ends = [16 * 40 / (20 * n + 40 * (16 - n)) for n in (4, 12)]
    assert (expected.walked.low, expected.walked.high) == pytest.approx(ends, abs=0.07)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (Tree([[0]], lookup=2), "tree: expected no copied branch, .* got one of 2"),
        (Tree([[0], [1]], keep=2), "tree: expected a static one, got a dynamic one"),
    ],
)
def test_trees_that_cannot_be_walked_are_refused(tree, words):
    found = Calibration(2, 2, [[TEXT]])
    for ask in (walk, expect):
        with pytest.raises(ValueError, match=words):
            ask(found, tree)


# --- the search, against every tree ---


def steps_by_hand(texts, choices):
    """Tokens per step, with an independent loop over the positions."""
    tokens = steps = 0
    for text in (text for of_prompt in texts for text in of_prompt):
        here = 0
        while here < len(text):
            deep = max((d for d in range(1, len(text[here]) + 1) if text[here][:d] in choices), default=0)
            here += deep + 1
            steps += 1
        tokens += len(text)
    return tokens / steps


def every_tree(heads, ranks, size):
    paths = [path for d in range(1, heads + 1) for path in itertools.product(range(ranks), repeat=d)]
    for subset in itertools.combinations(paths, size):
        if all(len(path) == 1 or path[:-1] in subset for path in subset):
            yield set(subset)


def drawn_texts(seed, heads, ranks, prompts=3, length=30):
    """Texts with easy and hard parts, in which a head is right mostly when the previous head was right."""
    draws = random.Random(seed)
    found = []
    for _ in range(prompts):
        ease, text = draws.random(), []
        for place in range(length):
            ease = draws.random() if draws.random() < 0.2 else ease
            path = [draws.randrange(ranks) if draws.random() < ease else N for _ in range(heads)]
            text.append(tuple(path[: length - place] + [N] * max(0, heads - length + place)))
        found.append((tuple(text),))
    return tuple(found)


@given(st.integers(0, 10_000), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_walked_tree_is_between_the_other_searches_and_the_best_tree(seed, shape, size):
    heads, ranks = shape
    texts = drawn_texts(seed, heads, ranks)
    found = Calibration(heads, ranks, texts)
    tree = walked_tree(found, size + 1)
    assert tree.num_nodes == size + 1

    def worth(tree):
        return steps_by_hand(texts, {*map(tuple, tree.choices)})

    assert worth(tree) >= worth(joint_tree(found, size + 1)) - 1e-12
    assert worth(tree) >= worth(Tree.optimal(found.accuracies, size + 1)) - 1e-12
    best = max(steps_by_hand(texts, chosen) for chosen in every_tree(heads, ranks, size))
    assert worth(tree) <= best + 1e-12
    assert walk(found, tree).tokens_per_step == pytest.approx(worth(tree))


def test_walking_finds_the_best_tree_more_often_than_counts():
    """How often each search finds the best tree: counts alone do not contain where steps start."""
    found_best, better, cases = Counter(), 0, 60
    for seed in range(cases):
        texts = drawn_texts(seed, 3, 2, length=60)
        found = Calibration(3, 2, texts)
        best = max(steps_by_hand(texts, chosen) for chosen in every_tree(3, 2, 4))
        worth = {
            by: steps_by_hand(texts, {*map(tuple, tree.choices)})
            for by, tree in (
                ("walk", walked_tree(found, 5)),
                ("paths", joint_tree(found, 5)),
                ("products", Tree.optimal(found.accuracies, 5)),
            )
        }
        found_best.update(by for by in worth if worth[by] > best - 1e-12)
        better += worth["walk"] > worth["paths"] + 1e-12
    assert better > cases / 10
    assert found_best == {"walk": 46, "paths": 34, "products": 23}  # as docs/trees.md says


# --- against decoding ---

NEW = 16
PROMPTS = [
    Prompt(("abc", "go on")),
    Prompt(("which is it?",)),
    Prompt(("to be continued as it stands",), is_text=True),
    Prompt(("zz",)),
]
TREES = [Tree([]), Tree.chain(3), Tree.cartesian([8, 5, 3]), Tree([[1], [0], [1, 0], [0, 2], [1, 0, 1]])]


def steps_of_decoding(model, tokenizer, tree, temperature=0.0, seed=0):
    """Tokens and steps of each prompt's texts, from acceptance lengths where each is written alone."""
    conversations, found = Conversations(model, tokenizer, prompt_tokens=6), []
    for number, prompt in enumerate(PROMPTS):
        turns, new, lengths = conversations.turns(prompt), None, []
        for turn in range(len(prompt.turns)):
            ids, name = turns.send(new), json.dumps([seed, number, turn]).encode()
            drawn = {"seed": int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")}
            drawn |= {"do_sample": True, "temperature": temperature}
            how = conversations.ending(prompt) | (drawn if temperature else {})
            output = model.generate(torch.tensor([ids]), max_new_tokens=NEW, tree=tree, **how)
            new = output.sequences[0, len(ids) :].tolist()
            assert len(new) == NEW
            lengths += output.accept_lengths[0]
        found.append((len(lengths) + sum(lengths), len(lengths)))
    return found


def test_texts_written_at_once_accept_what_each_does_alone(make):
    model, tokenizer = make()
    writer = Writer(model, tokenizer, Settings(NEW, 6), slots=3)
    for tree in TREES[1], TREES[3]:
        steps = {}
        for one in writer.answers(enumerate(PROMPTS), tree):
            lengths = [length for text in one.written for length in text.accept_lengths]
            steps[one.number] = len(lengths) + sum(lengths), len(lengths)
        assert [steps[number] for number in range(len(PROMPTS))] == steps_of_decoding(model, tokenizer, tree)


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.6, "seed": 5}], ids=["greedy", "drawn"])
def test_walked_steps_equal_those_of_decoding(make, sampled):
    model, tokenizer = make()
    found = calibrate(model, tokenizer, PROMPTS, max_new_tokens=NEW, prompt_tokens=6, **sampled)
    for tree in TREES:
        assert walk(found, tree).by_prompt == steps_of_decoding(model, tokenizer, tree, **sampled)
    # Walking and counting positions differ here: steps accept many tokens.
    assert walk(found, TREES[2]).tokens_per_step > 1.15
    assert expect(found, TREES[2]).paths.value != pytest.approx(walk(found, TREES[2]).tokens_per_step, abs=1e-3)


def test_an_end_token_ends_the_walk(make):
    from chats import CHAT_TEMPLATE

    model, tokenizer = make(CHAT_TEMPLATE)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    with torch.no_grad():  # the text ends sooner or later
        model.backbone.lm_head.weight[end] *= 2.0
    asked = [Prompt((letter * n,)) for letter in "abcdefg" for n in (1, 4)]
    found = calibrate(model, tokenizer, asked, max_new_tokens=30)
    made, ended = [], 0
    for prompt in asked:
        question = [{"role": "user", "content": prompt.turns[0]}]
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
        out = model.generate(torch.tensor([ids]), max_new_tokens=30, tree=TREES[2], eos_token_id=[end])
        made.append((out.new_tokens[0] - 1, len(out.accept_lengths[0])))
        ended += out.new_tokens[0] < 30
    assert walk(found, TREES[2]).by_prompt == made
    assert 0 < ended < len(asked)


def test_a_stop_string_ends_the_walk(make, monkeypatch):
    """A plain template's answers end after the token that completes a string, also in the middle of a step."""

    monkeypatch.setattr("medusa_decoding.chat.template.PLAIN_STOP", "f")
    model, tokenizer = make()
    asked = [Prompt((letter * n,)) for letter in "abcdefg" for n in (1, 4)]
    found = calibrate(model, tokenizer, asked, max_new_tokens=30, template="plain")
    made, ended, inside = [], 0, 0
    for prompt in asked:
        text = f"User: {prompt.turns[0]}\n\nAssistant:"
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        out = model.generate(ids, max_new_tokens=30, tree=TREES[2], stop_strings=["f"], tokenizer=tokenizer)
        made.append((out.new_tokens[0] - 1, len(out.accept_lengths[0])))
        ended += out.new_tokens[0] < 30
        inside += out.new_tokens[0] < 30 and out.accept_lengths[0][-1:] > [0]
    assert walk(found, TREES[2]).by_prompt == made
    assert 0 < ended < len(asked)
    assert inside


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "drawn"])
def test_drafts_that_depend_on_their_parents_are_walked_as_decoded(sampled):
    from chats import chat_tokenizer
    from models import tiny

    tokenizer = chat_tokenizer([], None)
    base = tiny(vocab_size=len(tokenizer), max_position_embeddings=256)
    torch.manual_seed(3)
    heads = MedusaHeads(base.config.hidden_size, len(tokenizer), 3, parent_rank=4)
    with torch.no_grad():
        heads.w2.copy_(base.lm_head.weight.expand_as(heads.w2))
        for weight in heads.parent_term:
            weight.normal_(std=1.0)
    with MedusaModel(base, heads.eval()) as model:
        found = calibrate(model, tokenizer, PROMPTS, max_new_tokens=NEW, prompt_tokens=6, **sampled)
        for tree in TREES:
            assert walk(found, tree).by_prompt == steps_of_decoding(model, tokenizer, tree, **sampled)
        assert walk(found, TREES[2]).tokens_per_step > 1.1
