"""Sampling draws from the model's own distribution, whatever the tree: joint distributions, seeds, draws.

Joint distributions of several tokens are compared with exact ones, see `oracles`: a right implementation would fail any
of these checks with a probability of at most `oracles.FALSE_ALARM` for random seeds; with the seeds written here it
passes or fails for good.
"""

import functools
import math

import numpy as np
import pytest
import torch
from models import VOCAB, heads_for, padded, prompts, tiny
from oracles import assert_some_accepted, counted, fits, joint, log_false_alarm, new_tokens
from transformers import GenerationConfig

from medusa_decoding import MedusaHeads, MedusaModel, Tree
from medusa_decoding.backbone.tensor_parallel import Peers
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.selection.sampling import Sampling, follow
from medusa_decoding.decode.verify import allowed_logits
from medusa_decoding.generation.request import Request, row_seed

TREES = {
    "plain": Tree([]),
    "chain": Tree.chain(3),
    "siblings": Tree.cartesian([2, 2]),
    "every child": Tree.cartesian([4, 4]),
    "uneven": Tree([[1], [0], [1, 0], [1, 2], [1, 0, 3]]),
    "copied branch": Tree.cartesian([2]).with_lookup(2),
}
SETTINGS = {
    "as it is": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.6},
    "top k": {"temperature": 1.5, "top_k": 3},
    "nucleus": {"temperature": 1.5, "top_p": 0.8},
    "min p": {"temperature": 1.5, "min_p": 0.15},
    "all": {"temperature": 1.8, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}
PROMPT = [1, 2, 3, 0, 2]
ROWS = 1500


def identity(text, scores):
    """A processor that changes nothing, but makes the host select the tokens."""
    return scores


@functools.cache
def model_of(vocab):
    return tiny(vocab_size=vocab, num_hidden_layers=1)


@pytest.fixture(scope="module")
def small():
    """A model with 4 tokens: once for transformers, once swapped."""
    with MedusaModel(tiny(vocab_size=4, num_hidden_layers=1), heads_for(model_of(4))) as medusa:
        yield medusa


def sampled(medusa, prompt, length, rows=ROWS, **kwargs):
    """Texts of many rows of one prompt, [rows, length], and the output."""
    output = medusa.generate(
        torch.tensor([prompt]), max_new_tokens=length, do_sample=True, num_return_sequences=rows, **kwargs
    )
    return output.sequences[:, len(prompt) :].numpy(), output


CASES = [
    *(("hot", tree, "device") for tree in TREES),
    *(("all", tree, "device") for tree in ("siblings", "uneven", "copied branch")),
    *((rule, "siblings", "device") for rule in SETTINGS if rule not in ("hot", "all")),
    *(("hot", tree, "host") for tree in ("chain", "siblings", "copied branch")),
    ("all", "uneven", "host"),
]


@pytest.mark.parametrize(("rule", "tree", "route"), CASES)
def test_three_tokens_have_their_joint_distribution(small, rule, tree, route):
    exact = joint(model_of(4), PROMPT, 3, **SETTINGS[rule])
    extra = {"logits_processor": [identity]} if route == "host" else {}
    seed = 1000 + CASES.index((rule, tree, route))
    texts, output = sampled(small, PROMPT, 3, tree=TREES[tree], seed=seed, **SETTINGS[rule], **extra)
    assert fits(counted(texts, 4), exact)
    accepted = sum(map(sum, output.accept_lengths))
    if tree == "plain":
        assert accepted == 0
    elif tree == "every child":
        assert accepted == ROWS, "every token has its node: the third token is always found in the tree"
    else:
        assert 0 < accepted < ROWS


@pytest.mark.parametrize("route", ["device", "host"])
def test_texts_that_end_and_minimum_lengths(small, route):
    """An EOS token inside an accepted path ends the text; before the minimum none is drawn."""
    settings = {"temperature": 1.5}
    extra = {"logits_processor": [identity]} if route == "host" else {}

    def no_end_yet(text, logits):
        if len(text) - len(PROMPT) < 1:
            logits = logits.copy()
            logits[1] = -np.inf
        return logits

    exact = joint(model_of(4), PROMPT, 3, eos=[1], change=no_end_yet, **settings)
    output = small.generate(
        torch.tensor([PROMPT]), max_new_tokens=3, min_new_tokens=1, eos_token_id=1, pad_token_id=0, do_sample=True,
        num_return_sequences=ROWS, seed=4, tree=TREES["siblings"], **settings, **extra,
    )  # fmt: skip
    texts = output.sequences[:, len(PROMPT) :].numpy()
    assert fits(counted(texts, 4), exact)
    assert {2, 3} == set(output.new_tokens)


def test_rows_of_a_batch_are_independent(small):
    """The joint distribution of two neighbouring rows is the product of theirs."""
    texts, _ = sampled(small, PROMPT, 2, rows=3000, seed=6, temperature=1.7, tree=TREES["siblings"])
    own = joint(model_of(4), PROMPT, 2, temperature=1.7)
    for place in (0, 1):
        margin = own.sum(1 - place)
        pairs = texts[:, place].reshape(-1, 2)
        assert fits(counted(pairs, 4), margin[:, None] * margin[None, :])


def by_greedy_agreement(self, nodes, lm_head, state, limits):
    """Wrong on purpose: a draft token is accepted if it is the likeliest token; if none is, a token is drawn."""
    logits = allowed_logits(nodes, lm_head, state, limits)
    rows = torch.arange(len(logits))

    def choose(depth, node):
        scores = logits[rows, node].float()
        for processor in self.processors:
            scores = processor(None, scores)
        best = scores.argmax(-1)
        below = (nodes.shape.parents == node[:, None]) & (nodes.tokens == best[:, None])
        return torch.where(below.any(1), best, (scores + nodes.noise[:, depth]).argmax(-1))

    return follow(nodes.tokens, nodes.shape, choose)


def test_a_wrong_acceptance_rule_fails_these_checks(small, monkeypatch):
    """The power of the checks above: with as many rows they reject a rule that draws from another distribution.

    The rule is most wrong about the likeliest tokens, so these are the drafts here.
    """
    exact = joint(model_of(4), PROMPT, 3, **SETTINGS["hot"])
    monkeypatch.setattr(Sampling, "__call__", by_greedy_agreement)
    propose = small.heads.propose
    monkeypatch.setattr(small.heads, "propose", lambda *args, **inputs: propose(*args))
    texts, output = sampled(small, PROMPT, 3, tree=TREES["siblings"], seed=7, **SETTINGS["hot"])
    assert_some_accepted(output)
    assert not fits(counted(texts, 4), exact)
    # Plain decoding has no drafts: the statistic does not reject a right distribution.
    texts, _ = sampled(small, PROMPT, 3, tree=Tree([]), seed=8, **SETTINGS["hot"])
    assert fits(counted(texts, 4), exact)


def test_the_bound_on_false_alarms_holds_and_is_tight():
    """For two outcomes the bound is above the exact probability, and not far above."""
    tosses, share = 400, 0.3
    exact = [math.comb(tosses, k) * share**k * (1 - share) ** (tosses - k) for k in range(tosses + 1)]
    bounds = [log_false_alarm([k, tosses - k], [share, 1 - share]) for k in range(tosses + 1)]
    checked = 0
    for k in range(tosses + 1):
        beyond = sum(exact[other] for other in range(tosses + 1) if bounds[other] <= bounds[k])
        if bounds[k] < 0.0:
            assert math.log(beyond) <= bounds[k] <= 0.5 * math.log(beyond) + 2.0
            checked += 1
    assert checked > 300
    assert log_false_alarm([5, 0, 1], [0.5, 0.5, 0.0]) == -math.inf


def rows_and_padding(count=4, lengths=(7, 2, 12, 5)):
    rows = prompts(count, list(lengths), seed=3)
    return rows, *padded(rows)


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.02}])
def test_with_one_seed_all_trees_and_plain_decoding_write_the_same_text(extra):
    model = tiny()
    _, ids, mask = rows_and_padding()
    kwargs = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.9, "eos_token_id": [3]} | extra
    with MedusaModel(model, heads_for(model)) as medusa:
        plain = medusa.generate(ids, mask, seed=11, tree=Tree([]), **kwargs)
        for tree in (Tree.chain(4), Tree.cartesian([4, 3, 2]), Tree.cartesian([3]).with_lookup(4), medusa.tree):
            output = medusa.generate(ids, mask, seed=11, tree=tree, **kwargs)
            assert output.sequences.tolist() == plain.sequences.tolist()
            assert output.steps < plain.steps
        assert medusa.generate(ids, mask, seed=12, **kwargs).sequences.tolist() != plain.sequences.tolist()
    assert len(set(plain.new_tokens)) > 1, "no row ended early"


def test_both_routes_write_the_same_text():
    model = tiny("mistral")
    _, ids, mask = rows_and_padding()
    kwargs = {
        "max_new_tokens": 25, "do_sample": True, "temperature": 1.2, "top_k": 6, "seed": 5, "eos_token_id": 2,
        "min_new_tokens": 6,
    }  # fmt: skip
    with MedusaModel(model, heads_for(model), Tree.cartesian([4, 3, 2])) as medusa:
        device = medusa.generate(ids, mask, **kwargs)
        host = medusa.generate(ids, mask, logits_processor=[identity], **kwargs)
    assert device.sequences.tolist() == host.sequences.tolist()
    assert device.accept_lengths == host.accept_lengths


def test_compiled_steps_draw_the_same_text(monkeypatch):
    model = tiny()
    _, ids, mask = rows_and_padding()
    kwargs = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.2, "top_p": 0.9, "seed": 5}
    with MedusaModel(model, heads_for(model), Tree.cartesian([3, 2])) as medusa:
        eager = [medusa.generate(ids, mask, **kwargs, **extra) for extra in ({}, {"repetition_penalty": 1.3})]
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    with MedusaModel(model, heads_for(model), Tree.cartesian([3, 2]), backend="compiled") as medusa:
        for extra, expected in zip(({}, {"repetition_penalty": 1.3}), eager, strict=True):
            output = medusa.generate(ids, mask, **kwargs, **extra)
            assert output.sequences.tolist() == expected.sequences.tolist()


def test_seeds_and_torch_manual_seed():
    model = tiny()
    [row] = prompts(1, [6])
    with MedusaModel(model, heads_for(model)) as medusa:
        write = functools.partial(medusa.generate, row[None], max_new_tokens=40, do_sample=True, temperature=1.5)
        one, again, other = (write(seed=seed).sequences.tolist() for seed in (1, 1, 2))
        assert one == again != other
        state = torch.get_rng_state()
        assert write(seed=1).sequences.tolist() == one
        assert torch.equal(torch.get_rng_state(), state), "a seed given takes nothing from torch's generator"
        torch.manual_seed(3)
        drawn, next_ = write().sequences.tolist(), write().sequences.tolist()
        torch.manual_seed(3)
        assert write().sequences.tolist() == drawn != next_
        assert write().sequences.tolist() == next_


def test_a_row_depends_on_its_index_and_not_on_the_others():
    model = tiny()
    rows, ids, mask = rows_and_padding()
    kwargs = {"do_sample": True, "temperature": 1.3, "seed": 9, "tree": Tree.cartesian([3, 2])}
    with MedusaModel(model, heads_for(model)) as medusa:
        together = new_tokens(medusa.generate(ids, mask, max_new_tokens=20, **kwargs), ids.shape[1])
        others = prompts(4, [3, 9, 4, 20], seed=77)
        for index, row in enumerate(rows):
            changed = [*others[:index], row]
            mixed, mixed_mask = padded(changed, "right")
            for new in (20, 7, 33):
                output = medusa.generate(mixed, mixed_mask, max_new_tokens=new, **kwargs)
                text = new_tokens(output, mixed.shape[1])[index]
                assert text[:20] == together[index][:new]
        moved = medusa.generate(rows[2][None], max_new_tokens=20, **kwargs)
    assert new_tokens(moved, len(rows[2]))[0] != together[2], "the same prompt in another row draws another text"


def test_several_sequences_per_prompt_have_transformers_shape_and_order():
    model = tiny()
    _, ids, mask = rows_and_padding(2, (3, 6))
    kwargs = {"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 3, "top_k": 1}
    # With one token to draw from, transformers' own sampling is deterministic too.
    expected = model.generate(ids, attention_mask=mask, **kwargs)
    with MedusaModel(model, heads_for(model)) as medusa:
        output = medusa.generate(ids, mask, **kwargs)
        assert output.sequences.tolist() == expected.tolist()
        kwargs |= {"top_k": 0, "temperature": 2.0, "max_new_tokens": 20}
        rows = medusa.generate(ids, mask, seed=1, **kwargs).sequences
    assert torch.equal(rows[:, : ids.shape[1]], ids.repeat_interleave(3, 0))
    assert len({tuple(row.tolist()) for row in rows}) == 6


def request(rows, budget, seed):
    limits = Limits([budget] * rows, [0] * rows, [])
    return Request(None, [], GenerationConfig(do_sample=True), limits, seed=seed)


def test_row_seeds_belong_to_seed_and_row():
    """Neither the batch nor the budget matters; a list of seeds gives each row what it would get alone."""
    seeds = request(300, 40, seed=1).row_seeds(Peers())
    assert (seeds.dtype, len(seeds.unique())) == (torch.int64, 300)
    assert request(3, 90, seed=1).row_seeds(Peers()).tolist() == seeds[:3].tolist()
    alone = [request(1, 5, seed=seed).row_seeds(Peers()).item() for seed in (7, 1, 2**63)]
    assert request(3, 5, seed=[7, 1, 2**63]).row_seeds(Peers()).tolist() == alone
    assert not set(alone) & set(seeds[1:].tolist())
    # Neither the second word of a seed nor a row stands for the other one.
    assert row_seed(7, 1) != row_seed(7 + 2**32, 0)
    greedy = Request(None, [], GenerationConfig(do_sample=False), Limits([5], [0], []), seed=1)
    assert greedy.row_seeds(Peers()) is None


def the_same_everywhere():
    """A model whose hidden state, and so its distribution, is the same at every place of every text."""
    model = tiny(vocab_size=VOCAB)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[:1].expand(VOCAB, -1))
    return model


def knowing(model, **kwargs):
    """Heads that repeat the model's own distribution, which is right at every place."""
    heads = MedusaHeads(model.config.hidden_size, VOCAB, 4, **kwargs)
    if heads.w2 is not None:
        rows = slice(None) if heads.token_map is None else heads.token_map
        with torch.no_grad():
            heads.w2.copy_(model.lm_head.weight[rows].expand_as(heads.w2))
    return heads.eval()


KNOWING = {
    "own": {},
    "shared": {"shared_projection": True},
    "another order, shared": {"token_map": torch.tensor([3, 9, 0, 10, 1, 7, 4, 2, 8, 6, 5]), "shared_projection": True},
    "parents": {"parent_rank": 3},
}
OTHER_WAYS = {
    "fused": {},
    "device": {"top_k": VOCAB - 1},
    "host": {"logits_processor": [identity]},
    "no early end": {"min_new_tokens": 5, "eos_token_id": [VOCAB - 1]},
}


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "fused") for name in KNOWING), *(("own", way) for way in [*OTHER_WAYS][1:])]
)
@pytest.mark.parametrize("tree", [Tree.chain(4), Tree.dynamic(5, depth=4, top_k=1)], ids=str)
def test_heads_that_know_the_distribution_draft_the_very_draws(name, way, tree):
    """Their first candidates are always accepted, which the likeliest tokens would not be."""
    model = the_same_everywhere()
    ids, mask = padded(prompts(3, [7, 2, 12]))
    kwargs = {"max_new_tokens": 40, "do_sample": True, "temperature": 1.4, "seed": 3, **OTHER_WAYS[way]}
    with MedusaModel(model, knowing(model, **KNOWING[name])) as medusa:
        output = medusa.generate(ids, mask, tree=tree, **kwargs)
        plain = medusa.generate(ids, mask, tree=Tree([]), **kwargs)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert len(output.sequences[:, ids.shape[1] :].unique()) > 4, "the distribution is not nearly certain"
    for row in output.accept_lengths:
        # The first token is the prefill's, the last step is cut.
        assert set(row[:-2]) == {tree.depth}


@pytest.mark.parametrize("route", ["device", "host"])
def test_the_step_is_named_if_no_token_can_be_drawn(route):
    """A temperature that overflows; a minimum length when every token is EOS."""
    model = tiny()
    [row] = prompts(1, [5])
    words = {
        "device": (FloatingPointError, "got NaN or infinity at step 0"),
        "host": (ValueError, "expected scores to draw from at new token 1, got NaN, infinity or no token allowed"),
    }
    extra = {"logits_processor": [identity]} if route == "host" else {}
    error, text = words[route]
    with MedusaModel(model, heads_for(model)) as medusa:
        for broken in ({"temperature": 1e-42}, {"eos_token_id": list(range(VOCAB)), "min_new_tokens": 2}):
            with pytest.raises(error, match=text):
                medusa.generate(row[None], max_new_tokens=8, do_sample=True, **broken, **extra)
        output = medusa.generate(row[None], max_new_tokens=8, do_sample=True, seed=1, **extra)
    assert output.new_tokens == [8]
