"""Layers run in few fused launches instead of module by module: the same text, or a message that says why not."""

import logging
import re

import pytest
import torch
from models import FAMILIES, heads_for, padded, prompts, tiny, transformers_greedy
from peft import LoraConfig, get_peft_model

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone import fused_layers
from medusa_decoding.backbone.attention_swap import DecodeContext
from medusa_decoding.backbone.fused_layers import NativeLayers, native_limit, obstacle
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_kernels._registry import interpreted
from medusa_kernels.reference import visible_nodes

# In Triton's interpreter, where all ops but kv_compact are then its kernels, a pass takes a second.
NEW = 6 if interpreted() else 20
SETTINGS = {
    **{family: (family, {}) for family in FAMILIES},
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "window": ("mistral", {"sliding_window": 6}),
}


@pytest.mark.parametrize(("family", "overrides"), SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("tree", [Tree([]), Tree.cartesian([4, 3])], ids=["plain", "tree"])
def test_fused_layers_write_the_same_text(family, overrides, tree):
    model = tiny(family, **overrides)
    if overrides.get("mlp_bias"):
        for layer in model.model.layers:
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                torch.nn.init.normal_(linear.bias)
    rows = prompts(3, [7, 1, 12])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), tree) as medusa:
        assert obstacle(medusa.backbone.decoder) is None
        for layer in model.model.layers:
            # Calling a layer as a module now fails: the text below is made without.
            layer.forward = None
        medusa.backbone.choose_layers = lambda captured, **_: setattr(medusa.backbone, "fuse", True)
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    assert output.sequences[:, ids.shape[1] :].tolist() == expected


TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(("family", "overrides"), [("qwen2", {}), ("qwen3", {}), ("gemma3", TWO_KINDS)])
def test_divided_projections_write_the_same_text(family, overrides, monkeypatch):
    """Every projection that can be is divided, with biases and all norms, whatever the device would choose."""
    model = tiny(family, **overrides)
    rows = prompts(3, [7, 1, 12])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = padded(rows)
    asked = []
    monkeypatch.setattr(fused_layers, "linear_parts", lambda x, features, *_: asked.append(features) or 3)
    with MedusaModel(model, heads_for(model), Tree.cartesian([4, 3])) as medusa:
        medusa.backbone.choose_layers = lambda captured, **_: setattr(medusa.backbone, "fuse", True)
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    # q, k and v at once, and two more a layer
    assert asked
    assert len(asked) % 3 == 0
    assert output.sequences[:, ids.shape[1] :].tolist() == expected


def test_fused_layers_are_as_accurate_as_the_modules():
    """Hidden states of one pass, both compared with fp64: the error is at most twice that of the modules."""
    model = tiny(hidden_size=64, num_attention_heads=8, num_hidden_layers=3)
    ids = prompts(1, [17])[0][None]
    with MedusaModel(model) as medusa:
        hidden = {}
        for fuse in (False, True):
            medusa.backbone.fuse = fuse
            state = medusa._steps.pool.acquire(Sizes([17], 4), 40)
            positions = torch.arange(17, dtype=torch.int32)
            with torch.no_grad():
                hidden[fuse] = medusa.backbone.forward(ids, DecodeContext(state.cache, positions, None))[0].double()
    with torch.no_grad():
        exact = model.double().model(ids).last_hidden_state
    errors = {fuse: (got - exact).abs().max().item() for fuse, got in hidden.items()}
    assert 0 < errors[True] <= 2 * errors[False] + torch.finfo(torch.float32).eps * exact.abs().max().item()


@pytest.mark.skipif(interpreted(), reason="the C++ library does not serve in Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, "phi4", "granite", "olmo2", "gemma2"])
def test_layers_in_one_call_are_as_accurate_as_the_modules(family, dtype):
    """Hidden states of one tree pass, both compared with fp64: the error is at most twice that of the modules."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3, "initializer_range": 0.2}
    model = tiny(family, dtype=dtype, **sizes | ({"sliding_window": 96} if family == "gemma2" else {}))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    tree, prefix = Tree.cartesian([4, 3, 2]), 17
    [ids] = prompts(1, [prefix + tree.num_nodes])
    positions = torch.arange(prefix, dtype=torch.int32)
    hidden = {}
    with MedusaModel(model) as medusa, torch.no_grad():
        backbone = medusa.backbone
        assert obstacle(backbone.decoder) is native_limit(backbone.decoder) is None
        for native in (None, NativeLayers(backbone.decoder)):
            backbone.native = native
            cache = medusa._steps.pool.acquire(Sizes([prefix], tree.num_nodes), 40).cache
            backbone.forward(ids[None, :prefix], DecodeContext(cache, positions, None))
            cache.lengths.fill_(prefix)
            context = DecodeContext(cache, tree.depths, tree.ancestors)
            hidden[native is not None] = backbone.forward(ids[None, prefix:], context)[0].double()
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    mask[prefix:, prefix:] = visible_nodes(tree.ancestors, tree.num_nodes)
    with torch.no_grad():
        exact = (
            model.double()
            .model(
                ids[None],
                attention_mask=torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)[None, None],
                position_ids=torch.cat((positions, prefix + tree.depths)).long()[None],
            )
            .last_hidden_state[:, prefix:]
        )
    errors = {native: (got - exact).abs().max().item() for native, got in hidden.items()}
    assert 0 < errors[True] <= 2 * errors[False] + torch.finfo(dtype).eps * exact.abs().max().item()
    # The fp64 pass sees the same tree.
    assert errors[False] <= 0.1 * exact.abs().max().item()


def dora(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, use_dora=True)).eval()


def hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    return model


def hooked_norm(model):
    model = tiny("olmo2")
    model.model.layers[1].post_feedforward_layernorm.register_forward_hook(lambda *_: None)
    return model


def other_epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3
    return model


def gelu(model):
    return tiny(hidden_act="gelu")


class Wrapped(torch.nn.Parameter):
    """A stand-in for a quantised weight."""


def wrapped_weight(model):
    linear = model.model.layers[0].mlp.down_proj
    linear._parameters["weight"] = linear.weight.as_subclass(Wrapped)
    return model


OBSTACLES = {
    "DoRA": (dora, r"layer 0 has a peft\..*\.Linear$"),
    "hook": (hooked, "layer 1 has forward hooks on its LlamaMLP"),
    "hook on a norm": (hooked_norm, "layer 1 has forward hooks on its Olmo2RMSNorm"),
    "epsilon": (other_epsilon, "layer 1 has a norm with the epsilon 0.001, the final one 1e-06"),
    "activation": (gelu, "layer 0 has the activation GELUActivation, not SiLU or GELU by tanh"),
    "wrapped weight": (wrapped_weight, "layer 0 has a weight of test_fused.Wrapped"),
}


@pytest.mark.parametrize(("change", "why"), OBSTACLES.values(), ids=OBSTACLES.keys())
def test_what_cannot_be_fused_is_named_and_runs_as_modules(change, why, caplog):
    caplog.set_level(logging.INFO, logger="medusa_decoding")
    model = change(tiny())
    with MedusaModel(model) as medusa:
        found = obstacle(medusa.backbone.decoder)
        assert found is not None
        assert re.search(why, found)
        for _ in range(2):
            medusa.backbone.choose_layers(captured=True)
        assert not medusa.backbone.fuse
    assert [record.getMessage() for record in caplog.records] == [f"layers: module by module ({found})"]


def test_layers_with_a_hook_on_the_swapped_module_are_not_fused():
    model = tiny()
    with MedusaModel(model) as medusa:
        model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
        assert obstacle(medusa.backbone.decoder) == "layer 1 has forward hooks on its TreeAttention"
