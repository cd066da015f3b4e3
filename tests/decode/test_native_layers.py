"""All layers of a step in one call of the C++ library: when it is so, why not otherwise, and that changes are seen."""

import copy
import logging

import pytest
import torch
from models import heads_for, prompts, tiny, transformers_greedy
from torch import nn

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.linears.logits import ScaledLogits, logits_of
from medusa_kernels import _native, _registry
from medusa_kernels._registry import interpreted

pytestmark = pytest.mark.skipif(interpreted(), reason="the C++ library does not serve in Triton's interpreter")
NEW = 20
TREE = Tree.cartesian([3, 2])
[ROW] = prompts(1, [7])


def text(medusa):
    return medusa.generate(ROW[None], max_new_tokens=NEW).sequences[0, len(ROW) :].tolist()


@pytest.fixture
def chosen_anew(monkeypatch):
    monkeypatch.setattr(_registry, "_chosen", {})


def strided_norm(model):
    model.model.norm.weight = nn.Parameter(torch.rand(2 * model.config.hidden_size)[::2])
    return model


def narrower(model):
    config = copy.deepcopy(model.config)
    config.intermediate_size //= 2
    model.model.layers[1].mlp = type(model.model.layers[1].mlp)(config)
    return model


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.half(), "the weights are torch.float16, not float32 or bfloat16"),
        (narrower, "the layers differ in the sizes of their weights"),
        (strided_norm, "the final norm's weight is not contiguous"),
    ],
    ids=["float16", "narrower layer", "strided norm"],
)
def test_other_models_run_module_by_module_and_the_log_says_why(change, why, caplog):
    caplog.set_level(logging.INFO, logger="medusa_decoding")
    model = tiny()
    heads = heads_for(model)
    model = change(model)
    with MedusaModel(model, heads.to(next(model.parameters()).dtype), TREE) as medusa:
        text(medusa)
        assert medusa.backbone.native is None
    [message] = [message for message in caplog.messages if message.startswith("layers: ")]
    assert message.startswith(f"layers: module by module ({why}")


def test_the_logits_of_a_node_do_not_depend_on_the_nodes_beside_it():
    lm_head, hidden = nn.Linear(300, 70, bias=False), torch.randn(1, 9, 300)
    capped = ScaledLogits(lm_head, 3.0, 2.0)
    together = logits_of(capped, hidden)
    assert torch.equal(together, torch.cat([logits_of(capped, one) for one in hidden.split(1, 1)], 1))
    torch.testing.assert_close(together, 2 * torch.tanh(lm_head(hidden) / 3 / 2))


@pytest.mark.usefixtures("chosen_anew")
def test_without_the_library_the_text_is_the_same(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="medusa_decoding")
    model = tiny("qwen3")
    expected = transformers_greedy(model, ROW, NEW)
    monkeypatch.setattr(_native, "LIBRARY_FOLDER", tmp_path)
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        assert text(medusa) == expected
        assert medusa.backbone.native is None
    assert f"layers: module by module (the other ops in turn; {_native.why_missing('cpu')})" in caplog.messages


def replaced(linear, tensor):
    linear.weight = nn.Parameter(tensor)


def written(linear, tensor):
    with torch.no_grad():
        linear.weight.copy_(tensor)


def assigned(linear, tensor):
    linear.weight.data = tensor


@pytest.mark.parametrize(
    ("change", "backend"), [(replaced, "eager"), (written, "compiled"), (assigned, "eager"), (assigned, "compiled")]
)
def test_weights_that_change_between_generations_are_seen(change, backend):
    model, other = tiny(), tiny(seed=5)
    expected = []
    with MedusaModel(model, heads_for(model), TREE, backend=backend) as medusa:
        before = text(medusa)
        for name in ("q_proj", "o_proj"):
            new = getattr(other.model.layers[1].self_attn, name).weight.detach().clone()
            change(getattr(model.model.layers[1].self_attn, name), new)
            after = text(medusa)
            assert medusa.backbone.native is not None
            expected.append(after)
    plain = copy.deepcopy(tiny())
    assert before == transformers_greedy(plain, ROW, NEW)
    for name, after in zip(("q_proj", "o_proj"), expected, strict=True):
        replaced(getattr(plain.model.layers[1].self_attn, name), getattr(other.model.layers[1].self_attn, name).weight)
        assert after == transformers_greedy(plain, ROW, NEW)
        assert after != before
