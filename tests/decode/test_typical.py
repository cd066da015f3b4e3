"""Typical acceptance against a slow implementation of the papers' definition: path by path, in float64, with
transformers' own forward.
"""

import copy
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from oracles import assert_some_accepted, new_tokens, softmax
from test_lookup import searched
from torch import nn

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.selection.typical import TypicalAcceptance
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.decode.verify import Nodes
from medusa_kernels import reference

NEW = 20


class Definition:
    """The papers' rule, implemented independently.

    A draft token x after a prefix is accepted if p(x) > min(epsilon, delta exp(-H(p))). The longest path of accepted
    drafts is chosen, of several the likeliest; then follows the likeliest next token, the root of the next step.

    Attributes:
        margin: relative distance of the closest decision from the other outcome; 0 if it did not matter.
        unlikely: drafts accepted that were not the likeliest token.
    """

    def __init__(self, model, heads, epsilon=0.09, delta=0.3, temperature=1.0):
        self.model, self.heads = copy.deepcopy(model).double(), copy.deepcopy(heads).double()
        self.epsilon, self.delta, self.temperature = epsilon, delta, temperature
        self.margin, self.unlikely = math.inf, 0
        self.seen = {}

    def forward(self, text):
        if text not in self.seen:
            with torch.no_grad():
                hidden = self.model.model(torch.tensor([text])).last_hidden_state[0, -1]
                self.seen[text] = hidden.numpy(), self.model.lm_head(hidden).numpy()
        return self.seen[text]

    def logits(self, text, forbidden):
        logits = self.forward(text)[1].copy()
        logits[list(forbidden)] = -math.inf
        return logits

    def likeliest(self, text, forbidden):
        logits = self.logits(text, forbidden)
        order = np.argsort(-logits, kind="stable")
        if len(logits) - len(forbidden) > 1:
            self.margin = min(self.margin, logits[order[0]] - logits[order[1]])
        return int(order[0])

    def drafts(self, text):
        """Each head's tokens, best first."""
        hidden = self.forward(text)[0]
        ranked = []
        for head in range(self.heads.num_heads):
            inner = self.heads.w1[head, 0].detach().numpy() @ hidden + self.heads.b1[head, 0].detach().numpy()
            logits = self.heads.w2[head].detach().numpy() @ (hidden + inner / (1 + np.exp(-inner)))
            ranked.append([int(token) for token in np.argsort(-logits, kind="stable")])
        return ranked

    def judge(self, text, path, forbidden):
        """Whether every draft token of a path is accepted, and the path's log-likelihood."""
        likelihood = 0.0
        for place, token in enumerate(path):
            probabilities = softmax(self.logits((*text, *path[:place]), forbidden(place)) / self.temperature)
            positive = probabilities[probabilities > 0]
            bound = min(self.epsilon, self.delta * math.exp((positive * np.log(positive)).sum()))
            self.margin = min(self.margin, abs(probabilities[token] / bound - 1.0))
            if not probabilities[token] > bound:
                return False, likelihood
            likelihood += math.log(probabilities[token])
        return True, likelihood

    def write(self, prompt, tree, new, eos=(), min_new=0):
        """Return the new tokens and the accepted drafts of each step."""

        def forbidden_from(count):
            return lambda place: eos if count + place < min_new else ()

        text = tuple(prompt)
        emitted, steps = [self.likeliest(text, forbidden_from(0)(0))], []
        while len(emitted) < new and emitted[-1] not in eos:
            ranked = self.drafts(text)
            text, forbidden = (*text, emitted[-1]), forbidden_from(len(emitted))
            paths = [()] + [tuple(ranked[head][rank] for head, rank in enumerate(path)) for path in tree.choices]
            copied = searched(list(text), tree.lookup) if tree.lookup else []
            paths += [tuple(copied[: length + 1]) for length in range(len(copied))]
            accepted = {}
            for path in paths:
                right, likelihood = self.judge(text, path, forbidden)
                if right:
                    accepted[path] = likelihood
            longest = max(map(len, accepted))
            ordered = sorted(((value, path) for path, value in accepted.items() if len(path) == longest), reverse=True)
            if len(ordered) > 1:
                self.margin = min(self.margin, ordered[0][0] - ordered[1][0])
            path = ordered[0][1]
            self.unlikely += sum(
                token != int(self.logits((*text, *path[:place]), forbidden(place)).argmax())
                for place, token in enumerate(path)
            )
            step = [*path, self.likeliest((*text, *path), forbidden(len(path)))]
            text = (*text, *path)
            ends = [place for place, token in enumerate(step) if token in eos]
            step = step[: ends[0] + 1 if ends else None][: new - len(emitted)]
            emitted += step
            steps.append(len(step) - 1)
        return emitted, steps


TREES = {
    "chain": Tree.chain(4),
    "siblings": Tree.cartesian([3, 2, 2]),
    "uneven": Tree([[2], [0], [1], [2, 3], [0, 1], [2, 3, 0], [0, 1, 4], [5], [2, 3, 0, 1]]),
    "copied branch": Tree.cartesian([2, 2]).with_lookup(4),
}
CASES = [
    ("llama", "chain", {}),
    ("llama", "siblings", {}),
    ("mistral", "uneven", {}),
    ("qwen2", "copied branch", {}),
    ("qwen3", "siblings", {"temperature": 0.7}),
    ("llama", "siblings", {"temperature": 2.5, "epsilon": 0.3, "delta": 0.9}),
    ("llama", "uneven", {"epsilon": 0.01}),
    ("qwen3", "uneven", {"epsilon": 1.0, "delta": 0.999}),
    ("llama", "copied branch", {"epsilon": 0.02, "delta": 0.1}),
]


def of_generate(rule):
    """The rule's settings as `generate` calls them."""
    names = {"epsilon": "posterior_threshold", "delta": "posterior_alpha", "temperature": "temperature"}
    return {"acceptance": "typical"} | {names[name]: value for name, value in rule.items()}


def check(definition, output, width, expected):
    # A decision closer than float32 can resolve would show nothing: then take another seed.
    assert definition.margin > 1e-5
    assert new_tokens(output, width) == [text for text, _ in expected]
    assert output.accept_lengths == [steps for _, steps in expected]


@pytest.mark.parametrize(("family", "tree", "rule"), CASES)
def test_text_equals_the_definition(family, tree, rule):
    model = tiny(family)
    heads = heads_for(model)
    # Long enough to contain each token, so that there is always something to copy.
    rows = [torch.cat([torch.arange(VOCAB), row]) for row in prompts(3, [7, 2, 13])]
    definition = Definition(model, heads, **rule)
    expected = [definition.write(row.tolist(), TREES[tree], NEW) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, heads, TREES[tree]) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW, **of_generate(rule))
        alone = medusa.generate(rows[0][None], max_new_tokens=NEW, **of_generate(rule))
    check(definition, output, ids.shape[1], expected)
    assert new_tokens(alone, len(rows[0])) == [expected[0][0]]
    assert definition.unlikely > 0, "only greedy drafts were accepted"
    assert_some_accepted(output)


@pytest.mark.parametrize("min_new", [0, 6, NEW])
@pytest.mark.parametrize("tree", ["chain", "siblings"])
def test_ends_and_minimum_lengths(tree, min_new):
    """EOS tokens within accepted paths, and before the minimum length, where they have probability 0."""
    model = tiny(seed=2)
    heads = heads_for(model)
    rows = prompts(4, [5, 9, 3, 14], seed=5)
    definition = Definition(model, heads)
    eos = [1, 7]
    expected = [definition.write(row.tolist(), TREES[tree], NEW, eos, min_new) for row in rows]
    ids, mask = padded(rows, "right")
    with MedusaModel(model, heads, TREES[tree]) as medusa:
        output = medusa.generate(
            ids, mask, max_new_tokens=NEW, eos_token_id=eos, min_new_tokens=min_new, acceptance="typical"
        )
    check(definition, output, ids.shape[1], expected)
    if min_new < NEW:
        assert min(output.new_tokens) < NEW
    assert min(output.new_tokens) >= min_new


def test_typical_acceptance_is_never_the_default():
    parameters = inspect.signature(MedusaModel.generate).parameters
    assert parameters["acceptance"].default == "lossless"
    assert (parameters["posterior_threshold"].default, parameters["posterior_alpha"].default) == (0.09, 0.3)
    model = tiny()
    [row] = prompts(1, [8])
    with MedusaModel(model, heads_for(model), TREES["siblings"]) as medusa:
        lossy = medusa.generate(row[None], max_new_tokens=40, acceptance="typical").sequences[0, 8:].tolist()
        default = medusa.generate(row[None], max_new_tokens=40).sequences[0, 8:].tolist()
    assert default == transformers_greedy(model, row, 40) != lossy


def accepted_path(selector, tree, tokens, weight, hidden):
    """The tokens of one step: the accepted ones and the one after them."""
    shape = TreeTensors.from_tree(tree, torch.device("cpu"))
    head = nn.Linear(*weight.T.shape, bias=False)
    with torch.no_grad():
        head.weight.copy_(weight)
        state = SimpleNamespace(count=torch.ones(1, dtype=torch.int32), check=torch.zeros(1))
        next_tokens = selector(Nodes(hidden, tokens, shape), head, state, SimpleNamespace(min_new_tensor=None))
    accepted = {
        "lengths": torch.ones(1, dtype=torch.int32), "root": torch.zeros(1, dtype=torch.int64),
        "state_hidden": torch.zeros(1, hidden.shape[-1]), "output": torch.zeros(1, 16, dtype=torch.int64),
        "count": torch.ones(1, dtype=torch.int32), "finished": torch.zeros(1, dtype=torch.bool),
        "log": torch.zeros(1, 4, dtype=torch.int32),
    }  # fmt: skip
    reference.tree_accept(
        tokens, next_tokens, hidden, shape.depths, shape.paths, torch.tensor([], dtype=torch.int64),
        torch.tensor([16], dtype=torch.int32), torch.tensor([1]), **accepted,
    )  # fmt: skip
    return accepted["output"][0, 1 : int(accepted["count"])].tolist()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_likeliest_token_is_accepted_despite_rounding(temperature):
    """Nearly uniform distributions with delta close to 1: the bound is the likeliest token's probability, rounded."""
    for vocab in range(3, 400, 7):
        weight = torch.zeros(vocab, 4)
        weight[0, 0] = -1e-4  # token 1 is the first of the likeliest
        tokens = torch.tensor([[2, 1, 1]])
        accepted = accepted_path(
            TypicalAcceptance(1.0, 1.0 - 1e-12, temperature), Tree.chain(2), tokens, weight, torch.ones(1, 3, 4)
        )
        assert accepted == [1, 1, 1], vocab


def test_a_copied_token_equal_to_a_draft_token_gives_the_same_text():
    """Node 3 is a copy with the token of node 1: its children are accepted or not by their own probability."""
    tree = Tree([[0], [0, 0]], lookup=2)
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3]
    probabilities = torch.tensor(
        [
            [0.01, 0.97, 0.01, 0.01],
            [0.01, 0.01, 0.97, 0.01],
            [0.25, 0.30, 0.25, 0.20],
            [0.01, 0.01, 0.97, 0.01],
            [0.97, 0.01, 0.01, 0.01],
        ]
    )
    for below_guess, below_copy, expected in ((2, 0, [1, 2, 1]), (0, 0, [1, 2]), (0, 2, [1, 2, 0]), (3, 2, [1, 2, 0])):
        tokens = torch.tensor([[3, 1, below_guess, 1, below_copy]])
        # Node n's hidden state is the n-th unit vector, its logits the n-th column of the weight.
        assert accepted_path(TypicalAcceptance(), tree, tokens, probabilities.log().T, torch.eye(5)[None]) == expected
