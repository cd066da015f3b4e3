"""Models whose hidden states or attentions transformers has recorded still decode."""

import pytest
from calls import IDS, NEW, TREE, plain, with_heads
from models import transformers_greedy

from medusa_decoding import MedusaModel
from medusa_decoding.backbone.fused_layers import obstacle


@pytest.mark.parametrize(
    ("backend", "wrapped_before"),
    [("eager", False), ("eager", True), pytest.param("compiled", False, marks=pytest.mark.slow)],
)
def test_models_with_recording_hooks_still_decode(model, heads, backend, wrapped_before):
    expected = transformers_greedy(model, IDS[0], NEW)
    if wrapped_before:
        with_heads(model, heads, IDS, backend=backend)
    recorded = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    plain(model, IDS, **recorded, max_new_tokens=2)
    hooks = [module for module in model.modules() if module._forward_hooks]
    assert hooks, "transformers leaves no hooks any more: the test shows nothing"
    assert with_heads(model, heads, IDS, backend=backend)[0, 3:].tolist() == expected
    with MedusaModel(model, heads, TREE) as medusa:
        assert obstacle(medusa.backbone.decoder) is None
    hidden = plain(model, IDS, **recorded, max_new_tokens=2).hidden_states
    assert [len(layers) for layers in hidden] == [3, 3]
