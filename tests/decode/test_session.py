"""Sessions: cached tokens are not run again, and the text is the same as without a session."""

import pytest
import torch
from models import FAMILIES, VOCAB, heads_for, padded, prompts, rope, tiny, transformers_greedy

from medusa_decoding import MedusaModel, Session, Tree
from medusa_decoding.backbone.backbone import Backbone

TREE = Tree.cartesian([3, 2])


@pytest.fixture
def prefilled(monkeypatch):
    """The number of tokens of every prefill; it runs by modules, which tells it from steps."""
    seen, forward = [], Backbone.forward

    def counted(self, tokens, context):
        if context.ancestors is None:
            seen.append(tokens.shape[1])
        return forward(self, tokens, context)

    monkeypatch.setattr(Backbone, "forward", counted)
    monkeypatch.setattr(Backbone, "prefill_nodes", lambda *_: 0)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", [Tree([]), TREE], ids=repr)
def test_a_chat_of_several_turns(family, tree, prefilled):
    model = tiny(family, max_position_embeddings=512)
    turns = prompts(4, [9, 5, 1, 30], seed=5)
    session, text = Session(), []
    with MedusaModel(model, heads_for(model), tree) as medusa:
        for number, turn in enumerate(turns):
            text += turn.tolist()
            prefilled.clear()
            output = medusa.generate(torch.tensor([text]), max_new_tokens=12, session=session)
            new = output.sequences[0, len(text) :].tolist()
            assert new == transformers_greedy(model, torch.tensor(text), 12)
            # The last token of an answer has not run through the model: it is prefilled with the next turn.
            assert prefilled == [len(turn) + (1 if number else 0)]
            assert session.reused == len(text) - prefilled[0]
            text += new


def test_an_edited_history_runs_again_from_where_it_differs(prefilled):
    model = tiny(max_position_embeddings=512)
    [first] = prompts(1, [40])
    changed = torch.cat([first[:25], (first[25:26] + 1) % VOCAB, first[26:]])
    session = Session()
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        medusa.generate(first[None], max_new_tokens=10, session=session)
        for prompt, reused in ((changed, 25), (changed, 39), (first[:7], 6), (first[5:], None)):
            prefilled.clear()
            output = medusa.generate(prompt[None], max_new_tokens=10, session=session)
            assert output.sequences[0, len(prompt) :].tolist() == transformers_greedy(model, prompt, 10)
            if reused is not None:
                assert session.reused == reused
            assert prefilled == [len(prompt) - session.reused]


def test_rows_of_a_batch_reuse_the_prefix_that_all_have():
    model = tiny(max_position_embeddings=512)
    rows = prompts(3, [12, 7, 20])
    ids, mask = padded(rows)
    session = Session()
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        medusa.generate(ids, mask, max_new_tokens=9, session=session)
        longer = [torch.cat([row, row[:3]]) for row in rows]
        ids, mask = padded(longer)
        output = medusa.generate(ids, mask, max_new_tokens=9, session=session)
        assert session.reused == 7
        with pytest.raises(ValueError, match="session: expected 3 rows as before, got 1"):
            medusa.generate(ids[:1], mask[:1], max_new_tokens=9, session=session)
    assert output.sequences[:, ids.shape[1] :].tolist() == [transformers_greedy(model, row, 9) for row in longer]


@pytest.mark.parametrize("ending", ["eos", "criterion", "budget"])
def test_an_answer_cut_within_a_path_continues_correctly(ending):
    """The cache holds keys and values of accepted tokens after the cut: they must not count as part of the text."""
    model = tiny(max_position_embeddings=512)
    cut = 0
    for seed in range(8):
        [prompt] = prompts(1, [9], seed=seed)
        full = transformers_greedy(model, prompt, 30)
        settings = {
            "eos": {"eos_token_id": full[10]},
            "criterion": {"stopping_criteria": [lambda text, scores: torch.tensor([text.shape[1] >= 9 + 7])]},
            "budget": {"max_new_tokens": 6},
        }[ending]
        session = Session()
        with MedusaModel(model, heads_for(model), Tree.cartesian([5, 4])) as medusa:
            output = medusa.generate(prompt[None], **({"max_new_tokens": 30} | settings), session=session)
            whole = medusa.generate(prompt[None], max_new_tokens=30)
            steps = len(output.accept_lengths[0])
            cut += steps > 0 and output.accept_lengths[0][-1] < whole.accept_lengths[0][steps - 1]
            history = torch.cat([output.sequences[0], torch.tensor([3, 1, 4])])
            following = medusa.generate(history[None], max_new_tokens=12, session=session)
        assert session.reused == len(history) - 4
        assert following.sequences[0, len(history) :].tolist() == transformers_greedy(model, history, 12)
    assert cut > 0, "no answer was cut within a path"


def test_growth_and_longer_budgets_keep_the_cached_prefix(monkeypatch):
    monkeypatch.setattr("medusa_decoding.decode.runtime.runner.HEADROOM", 8)
    model = tiny(max_position_embeddings=1024)
    [text] = prompts(1, [50])
    session = Session()
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        for budget in (5, 100, 300, 20):
            before = len(text)
            output = medusa.generate(text[None], max_new_tokens=budget, session=session)
            assert output.sequences[0, before:].tolist() == transformers_greedy(model, text, budget)
            text = torch.cat([output.sequences[0], torch.tensor([2, 7])])
        assert session.reused > 400


def test_dynamic_rope_reuses_no_keys_with_other_frequencies():
    settings = {"max_position_embeddings": 48, **rope("dynamic", factor=4.0)}
    model = tiny(**settings)
    [text] = prompts(1, [20])
    session, reused = Session(), []
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        for _ in range(4):
            before = len(text)
            output = medusa.generate(text[None], max_new_tokens=14, session=session)
            assert output.sequences[0, before:].tolist() == transformers_greedy(tiny(**settings), text, 14)
            text = torch.cat([output.sequences[0], torch.tensor([2, 7])])
            reused.append(session.reused)
    assert reused[1] == 33, "within the trained context all is reused"
    # Position 0 is turned by no angle, whatever the frequencies.
    assert max(reused[2:]) <= 1, "the case never asked for other frequencies"


def test_changed_weights_reuse_nothing():
    model = tiny()
    [prompt] = prompts(1, [20])
    session = Session()
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        medusa.generate(prompt[None], max_new_tokens=5, session=session)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(-2.0)
        output = medusa.generate(prompt[None], max_new_tokens=12, session=session)
        assert session.reused == 0
    assert output.sequences[0, 20:].tolist() == transformers_greedy(model, prompt, 12)


def test_a_session_of_another_model_is_refused():
    model, other = tiny(), tiny(seed=1)
    [prompt] = prompts(1, [8])
    session = Session()
    with MedusaModel(model, heads_for(model), TREE) as medusa, MedusaModel(other, heads_for(other), TREE) as second:
        medusa.generate(prompt[None], max_new_tokens=5, session=session)
        with pytest.raises(ValueError, match="session: expected one of this model"):
            second.generate(prompt[None], max_new_tokens=5, session=session)
        assert session.tokens == 12
        session.clear()
        output = second.generate(prompt[None], max_new_tokens=5, session=session)
    assert output.sequences[0, 8:].tolist() == transformers_greedy(other, prompt, 5)


def test_a_failed_call_leaves_the_session_empty_and_usable():
    model = tiny()
    [prompt] = prompts(1, [8])
    session = Session()

    def fail(text, scores):
        raise InterruptedError

    with MedusaModel(model, heads_for(model), TREE) as medusa:
        medusa.generate(prompt[None], max_new_tokens=5, session=session)
        with pytest.raises(InterruptedError):
            medusa.generate(prompt[None], max_new_tokens=5, session=session, stopping_criteria=[fail])
        assert session.tokens == 0
        output = medusa.generate(prompt[None], max_new_tokens=5, session=session)
    assert output.sequences[0, 8:].tolist() == transformers_greedy(model, prompt, 5)


def test_a_short_turn_after_one_with_a_long_budget_can_grow(monkeypatch):
    """The first turn's state has room for more new tokens than the second asks for, and keeps it."""
    monkeypatch.setattr("medusa_decoding.decode.runtime.runner.HEADROOM", 8)
    model = tiny(max_position_embeddings=2048)
    [prompt] = prompts(1, [50])
    session = Session()
    three = [lambda text, scores: torch.tensor([text.shape[1] >= 53])]
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        first = medusa.generate(prompt[None], max_new_tokens=900, stopping_criteria=three, session=session)
        longer = torch.cat([first.sequences[0], prompt[:4]])
        output = medusa.generate(longer[None], max_new_tokens=150, session=session)
        assert session.reused == 52
    assert output.sequences[0, len(longer) :].tolist() == transformers_greedy(model, longer, 150)
