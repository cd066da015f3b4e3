"""Models adapted by peft: the text is the adapted model's own, whatever is wrapped, switched or merged, and when."""

import pytest
import torch
from models import FAMILIES, heads_for, prompts, tiny, transformers_greedy
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone.attention_swap import TreeAttention

TREE = Tree.cartesian([3, 2])
NEW = 20
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
[ROW] = prompts(1, [7])


def lora(*targets, **settings):
    return LoraConfig(target_modules=list(targets), **{"r": 4, "init_lora_weights": False} | settings)


def perturbed(adapted, seed=0):
    """Change all trainable weights, as most methods start at values that change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.3)
    return adapted.eval()


def own_text(adapted, row=ROW):
    """New tokens of one prompt from peft's own generate."""
    ids = row[None]
    out = adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return out[0, len(row) :].tolist()


def text(medusa, row=ROW):
    return medusa.generate(row[None], max_new_tokens=NEW).sequences[0, len(row) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_every_linear_layer_off_on_and_merged(family):
    model = tiny(family)
    plain = transformers_greedy(model, ROW, NEW)
    heads = heads_for(model)
    modules = [layer.self_attn for layer in model.model.layers]
    adapted = get_peft_model(model, lora(*LINEARS)).eval()
    expected = own_text(adapted)
    assert expected != plain, "the adapter changes nothing: the test shows nothing"
    with MedusaModel(adapted, heads, TREE) as medusa:
        assert text(medusa) == expected
        assert medusa.backbone.fuse, "adapters run module by module"
        with adapted.disable_adapter():
            assert text(medusa) == plain
            assert medusa.backbone.native is not None
        adapted.merge_adapter()
        assert text(medusa) == own_text(adapted) != plain
        with adapted.disable_adapter():
            assert text(medusa) == plain
        adapted.merge_adapter()
        assert text(medusa) == own_text(adapted) != plain
        adapted.unmerge_adapter()
        assert text(medusa) == own_text(adapted) != plain
    assert all(layer.self_attn is module for layer, module in zip(model.model.layers, modules, strict=True))


def test_adapters_switched_between_generations(tmp_path):
    model = tiny()
    get_peft_model(tiny(), lora("q_proj", "down_proj", "lm_head")).save_pretrained(tmp_path / "first")
    torch.manual_seed(1)
    get_peft_model(tiny(), lora("v_proj", "up_proj")).save_pretrained(tmp_path / "second")
    adapted = PeftModel.from_pretrained(model, tmp_path / "first", "first").eval()
    with MedusaModel(adapted, heads_for(tiny()), TREE) as medusa:
        seen = [text(medusa)]
        assert seen[0] == own_text(adapted)
        adapted.load_adapter(tmp_path / "second", "second")
        for active in ("second", ["first", "second"], "first"):
            adapted.base_model.set_adapter(active)
            seen.append(text(medusa))
            assert seen[-1] == own_text(adapted), active
        assert seen[3] == seen[0]
        assert seen[0] != seen[1] != seen[2] != seen[0], "the adapters change nothing: the test shows nothing"
        adapted.delete_adapter("first")
        adapted.set_adapter("second")
        assert text(medusa) == seen[1]
        # Nothing notices such a write, by which peft swaps adapters in place too.
        for module in adapted.modules():
            if hasattr(module, "lora_B") and "second" in module.lora_B:
                module.lora_B["second"].weight.data.mul_(-2)
        assert text(medusa) == own_text(adapted) != seen[1]


def test_a_model_wrapped_while_swapped():
    """peft finds the projections within the swapped modules, and its layers stay there."""
    model = tiny()
    modules = [layer.self_attn for layer in model.model.layers]
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        plain = text(medusa)
        adapted = get_peft_model(model, lora(*LINEARS)).eval()
        expected = text(medusa)
        assert expected == own_text(adapted)
        assert expected != plain
        names = list(adapted.state_dict())
    assert all(layer.self_attn is module for layer, module in zip(model.model.layers, modules, strict=True))
    assert list(adapted.state_dict()) == names == list(get_peft_model(tiny(), lora(*LINEARS)).state_dict())
    assert own_text(adapted) == expected


def test_an_adapter_is_merged_and_unloaded_while_swapped():
    model = tiny()
    plain = transformers_greedy(model, ROW, NEW)
    adapted = get_peft_model(model, lora(*LINEARS)).eval()
    with MedusaModel(adapted, heads_for(tiny()), TREE) as medusa:
        merged = adapted.merge_and_unload()
        assert text(medusa) == transformers_greedy(merged, ROW, NEW) != plain
        assert isinstance(merged.model.layers[0].self_attn, TreeAttention)
    assert {type(module) for module in merged.modules()} == {type(module) for module in tiny().modules()}


METHODS = {
    "embedding": lora("embed_tokens", "q_proj"),
    "DoRA": lora(*LINEARS, use_dora=True),
    "whole embedding and lm_head": lora("q_proj", modules_to_save=["embed_tokens", "lm_head"]),
    "whole MLP": lora("q_proj", modules_to_save=["mlp"]),
    "some tokens": lora("q_proj", trainable_token_indices=[1, 2, 3]),
    "layers twice": lora("q_proj", layer_replication=[[0, 2], [0, 2]]),
    "IA3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.mark.parametrize("config", METHODS.values(), ids=METHODS.keys())
def test_other_peft_methods_and_whole_modules(config):
    plain = transformers_greedy(tiny(), ROW, NEW)
    adapted = perturbed(get_peft_model(tiny(), config))
    expected = own_text(adapted)
    assert expected != plain, "the method changes nothing: the test shows nothing"
    with MedusaModel(adapted, heads_for(tiny()), TREE) as medusa:
        assert text(medusa) == expected
    assert own_text(adapted) == expected


def quantised_folder(tmp_path):
    model = tiny(vocab_size=32, hidden_size=128, intermediate_size=192, head_dim=32, initializer_range=0.2)
    model.save_pretrained(tmp_path)
    return heads_for(model, shared=True)


def test_qlora(tmp_path):
    """bitsandbytes in 4 bits, prepared for training, which turns norms and lm_head to float32, with LoRA on top."""
    heads = quantised_folder(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    modules = [layer.self_attn for layer in model.model.layers]
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # its product rounds inputs, see test_quantised.py
    adapted = get_peft_model(prepare_model_for_kbit_training(model), lora(*LINEARS)).eval()
    up_proj = model.model.layers[0].mlp.up_proj
    assert type(up_proj).__module__ == "peft.tuners.lora.bnb"
    assert type(up_proj.base_layer.weight).__name__ == "Params4bit"
    expected = own_text(adapted)
    with MedusaModel(adapted, heads, TREE) as medusa:
        assert medusa.backbone.dtype == torch.float32
        assert text(medusa) == expected
        assert medusa.backbone.fuse, "adapters run module by module"
        with adapted.disable_adapter():
            without = text(medusa)
            assert without == own_text(adapted)
    assert without != expected, "the adapter changes nothing: the test shows nothing"
    assert all(layer.self_attn is module for layer, module in zip(model.model.layers, modules, strict=True))


def test_lora_over_torchao_int8(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    heads = quantised_folder(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    plain = transformers_greedy(model, ROW, NEW)
    with MedusaModel(model, heads, TREE) as medusa:
        adapted = get_peft_model(model, lora(*LINEARS)).eval()
        assert type(model.model.layers[0].mlp.up_proj).__name__ == "TorchaoLoraLinear"
        assert text(medusa) == own_text(adapted) != plain
        adapted.merge_adapter()
        assert text(medusa) == own_text(adapted)


def test_prompt_learning_is_refused():
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="no prompt learning"):
        MedusaModel(get_peft_model(tiny(), config))


def test_a_whole_attention_saved_by_peft_is_refused_and_unchanged():
    adapted = get_peft_model(tiny(), lora("up_proj", modules_to_save=["self_attn"]))
    with pytest.raises(ValueError, match=r"layer 0: expected an attention of .*, got ModulesToSaveWrapper"):
        MedusaModel(adapted)
    assert not any(isinstance(module, TreeAttention) for module in adapted.modules())


def test_a_whole_attention_put_in_while_swapped_is_refused_and_undone():
    model = tiny()
    medusa = MedusaModel(model, heads_for(model), TREE)
    adapted = get_peft_model(model, lora("up_proj", modules_to_save=["self_attn"])).eval()
    expected = own_text(adapted)
    with pytest.raises(ValueError, match="layer 0: expected the attention as swapped, got ModulesToSaveWrapper"):
        text(medusa)
    medusa.undo()
    assert not any(isinstance(module, TreeAttention) for module in adapted.modules())
    assert own_text(adapted) == expected


@pytest.mark.parametrize("first", ["wrapped", "swapped"])
def test_activated_lora_is_refused_while_it_is_active(first):
    model, heads = tiny(), heads_for(tiny())
    plain = transformers_greedy(model, ROW, NEW)
    config = lora("q_proj", "v_proj", alora_invocation_tokens=ROW[-2:].tolist(), task_type="CAUSAL_LM")
    medusa = MedusaModel(model, heads, TREE) if first == "swapped" else None
    adapted = get_peft_model(model, config, "invoked").eval()
    assert own_text(adapted) != plain, "the adapter changes nothing: the test shows nothing"
    medusa = medusa or MedusaModel(adapted, heads, TREE)
    with pytest.raises(ValueError, match=r"no activated LoRA \(invocation tokens\), got adapter invoked"):
        text(medusa)
    with adapted.disable_adapter():
        assert text(medusa) == plain
    adapted.add_adapter("always", lora("up_proj"))
    adapted.set_adapter("always")
    assert text(medusa) == own_text(adapted) != plain
    medusa.undo()
