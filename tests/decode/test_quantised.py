"""Backbones quantised by transformers, on real layers of bitsandbytes and torchao: swap, decode, undo.

What holds depends on how a layer computes. Layers that restore their weights and multiply in float32 behave
like plain ones: the text is the quantised model's own, token for token. Layers that also round their inputs (to int8,
or to bfloat16 in bitsandbytes' 4-bit product for CPUs with AVX512_BF16) turn the last bit of an input into another
rounding step now and then, and from there the two computations differ by a fraction of a step: every token is then the
model's own best within a bound, which is what `assert_own_text` checks against the model alone, one token at a time.
"""

import copy
import logging

import pytest
import torch
from models import heads_for, padded, prompts, tiny, transformers_greedy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, TorchAoConfig

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone.fused_layers import obstacle
from medusa_decoding.checkpoints import write_heads
from medusa_decoding.heads import int8_rows, plain_weight

# torchao, imported for the first time, uses what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
TREE = Tree.cartesian([4, 3])
NEW = 24
# Names of modules that a quantiser must skip: if one of them does not exist, it also quantises lm_head.
NONE_LEFT_OUT = ["no such module"]


def bnb(bits, **settings):
    if bits == 4:
        settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"} | settings
    return BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **settings)


def torchao(name, settings=None, **config):
    # Imported where it is used: it is slow to import and prints many messages.
    from torchao import quantization

    arguments = {} if settings is None else settings(quantization)
    return TorchAoConfig(getattr(quantization, name)(**arguments), **config)


def int4(quantization):
    return {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)}


def dynamic_int4(quantization):
    return {"weight_dtype": torch.int4, "weight_granularity": quantization.PerGroup(32)}


def packed_int4():
    prototype = pytest.importorskip("torchao.prototype.quantization.int4.inference_workflow", reason="torchao moved it")
    return TorchAoConfig(prototype.PrototypeInt4WeightOnlyConfig(group_size=32))


# Each: how it is asked for, the type of a projection's weight, and the bound of `assert_own_text` in float32: 0 where
# the text is the model's own token for token. Measured over 640 tokens per case: at most 0.024, and 0.065 in bfloat16.
ROUNDED, ROUNDED_BF16 = 0.06, 0.13
CASES = {
    "bnb 8 bit": (lambda: bnb(8), "Int8Params", ROUNDED),
    "bnb 8 bit, no outliers": (lambda: bnb(8, llm_int8_threshold=0.0), "Int8Params", ROUNDED),
    "bnb nf4": (lambda: bnb(4), "Params4bit", ROUNDED),
    "bnb nf4, restored": (lambda: bnb(4), "Params4bit", 0),
    "bnb nf4, bfloat16": (lambda: bnb(4, bnb_4bit_compute_dtype="bfloat16"), "Params4bit", ROUNDED_BF16),
    "bnb fp4, double": (
        lambda: bnb(4, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True), "Params4bit", ROUNDED,
    ),
    "bnb nf4, double, lm_head, restored": (
        lambda: bnb(4, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=NONE_LEFT_OUT), "Params4bit", 0,
    ),
    "torchao int8": (lambda: torchao("Int8WeightOnlyConfig"), "Int8Tensor", 0),
    "torchao int8, lm_head": (
        lambda: torchao("Int8WeightOnlyConfig", modules_to_not_convert=NONE_LEFT_OUT), "Int8Tensor", 0,
    ),
    "torchao int8 dynamic": (lambda: torchao("Int8DynamicActivationInt8WeightConfig"), "Int8Tensor", ROUNDED),
    "torchao int4": (lambda: torchao("IntxWeightOnlyConfig", int4), "IntxUnpackedToInt8Tensor", 0),
    "torchao int4, embedding and lm_head": (
        lambda: torchao("IntxWeightOnlyConfig", int4, include_input_output_embeddings=True),
        "IntxUnpackedToInt8Tensor", 0,
    ),
    "torchao int4 dynamic": (
        lambda: torchao("Int8DynamicActivationIntxWeightConfig", dynamic_int4), "IntxUnpackedToInt8Tensor", ROUNDED,
    ),
    "torchao int4 packed": (packed_int4, "Int4OpaqueTensor", 0),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, logger="bitsandbytes")


def small(family="llama", **overrides):
    """Build a model with sizes that every quantiser accepts: inputs in groups of 64, outputs in groups of 32."""
    sizes = {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "initializer_range": 0.2}
    model = tiny(family, **sizes | overrides)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and heads that share its lm_head."""
    folder = tmp_path_factory.mktemp("quantised")
    model = small()
    model.save_pretrained(folder / "base")
    write_heads(heads_for(model, shared=True), folder / "heads", base_model="../base")
    return folder


ROWS = prompts(2, [9, 17], vocab=32)


@pytest.fixture(scope="module")
def unquantised():
    """The model's own texts without quantisation."""
    return [transformers_greedy(small(), row, NEW) for row in ROWS]


def quantised(name, folder, dtype=torch.float32):
    """Load the model of a case; as on a CPU without AVX512_BF16 if 4-bit weights are to be restored."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CASES[name][0](), dtype=dtype).eval()
    return restored(model) if "restored" in name else model


def restored(model):
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


@torch.no_grad()
def own_scores(model, row, text):
    """Score a text by the model itself, one token at a time after `row`.

    Returns:
        For each token: how far its logit is below the best one, and how far the second best one is, both in standard
        deviations of the logits.
    """
    below, gaps = [], []
    cache = DynamicCache(config=model.config)
    out = model(row[None], None, None, cache, use_cache=True)
    for token in text:
        logits = out.logits[0, -1].float()
        best, second = logits.topk(2).values
        below.append(((best - logits[token]) / logits.std()).item())
        gaps.append(((best - second) / logits.std()).item())
        out = model(torch.tensor([[token]]), None, None, cache, use_cache=True)
    return torch.tensor(below), torch.tensor(gaps)


def assert_own_text(model, row, text, bound):
    """Assert that a text is the model's own greedy one: token for token, or each token the best within a bound.

    Returns:
        What transformers' own generate writes.
    """
    expected = transformers_greedy(model, row, len(text))
    if bound == 0:
        assert text == expected
        return expected
    below, gaps = own_scores(model, row, text)
    assert below.max() <= bound
    # Most tokens win clearly, so that a wrong text would not pass. The texts differ at near-ties alone.
    assert gaps.median() > bound
    parted = [i for i, (ours, theirs) in enumerate(zip(text, expected, strict=True)) if ours != theirs]
    assert not parted or gaps[parted[0]] <= bound
    return expected


def texts(medusa, rows=ROWS):
    outputs = [medusa.generate(row[None], max_new_tokens=NEW) for row in rows]
    assert max(output.tokens_per_step for output in outputs) > 1, "no draft token was ever accepted"
    return [output.sequences[0, len(row) :].tolist() for output, row in zip(outputs, rows, strict=True)]


IN_BFLOAT16 = ["bnb 8 bit", "bnb nf4", "torchao int8, lm_head"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, torch.float32, id=name) for name in CASES),
        *(pytest.param(name, torch.bfloat16, id=f"{name}, in bfloat16") for name in IN_BFLOAT16),
    ],
)
def test_the_text_is_that_of_the_quantised_model(name, dtype, folder, unquantised):
    config, weight, bound = CASES[name]
    if dtype is torch.bfloat16:
        bound = ROUNDED_BF16
    with MedusaModel.from_pretrained(folder / "heads", quantization_config=config(), dtype=dtype, tree=TREE) as medusa:
        model = medusa.base
        if "restored" in name:
            restored(model)
        assert type(model.model.layers[1].mlp.down_proj.weight).__name__ == weight
        assert medusa.backbone.dtype == medusa.heads.w1.dtype == dtype
        assert (plain_weight(model.lm_head) is None) == ("lm_head" in name)
        assert obstacle(medusa.backbone.decoder).startswith("layer 0 has a ")
        expected = [assert_own_text(model, row, text, bound) for row, text in zip(ROWS, texts(medusa), strict=True)]
    assert expected != unquantised, "quantising changes nothing: the test shows nothing"


EXACT = ["bnb nf4, double, lm_head, restored", "torchao int8, lm_head", "torchao int4"]


@pytest.mark.parametrize(("name", "family"), [*zip(EXACT, ["mistral", "qwen2", "qwen3"], strict=True)])
def test_other_families_own_heads_and_padded_rows(name, family, tmp_path):
    plain = small(family)
    plain.save_pretrained(tmp_path)
    model, heads = quantised(name, tmp_path), heads_for(plain)
    expected = [transformers_greedy(model, row, NEW) for row in ROWS]
    ids, mask = padded(ROWS)
    with MedusaModel(model, heads, TREE) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert output.tokens_per_step > 1, "no draft token was ever accepted"


@pytest.mark.parametrize("name", ["bnb 8 bit", "bnb nf4", "torchao int4 packed"])
def test_undo_restores_the_original_modules_and_weights(name, folder):
    model = quantised(name, folder / "base")
    heads = heads_for(small(), shared=True)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    # Before any forward: bitsandbytes 0.50 repacks 4-bit weights for AVX512_BF16 in the first one, and state_dict()
    # after that leaves scales that the next one misreads.
    state = copy.deepcopy(model.state_dict())
    with MedusaModel(model, heads, TREE) as medusa:
        swapped = model.state_dict()
        assert list(swapped) == list(state)
        assert all(same(swapped[key], tensor) for key, tensor in state.items())
        ids = torch.stack(prompts(2, [9], vocab=32))
        with torch.no_grad():
            before = model(ids).logits
            medusa.generate(ids, max_new_tokens=NEW)
            assert torch.equal(model(ids).logits, before)
    assert dict(model.named_modules()) == modules
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def same(left, right):
    """Compare tensors, and tensor subclasses by what they are made of."""
    if hasattr(left, "__tensor_flatten__"):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__tensor_flatten__()[0])
    return torch.equal(left, right)


@pytest.mark.parametrize("name", ["torchao int8, lm_head", "bnb nf4, double, lm_head, restored"])
def test_shared_heads_propose_through_a_quantised_lm_head(name, folder):
    model = quantised(name, folder / "base")
    heads = heads_for(small(), shared=True)
    hidden = torch.randn(2, 128, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        # The rows of the identity, multiplied one at a time, are the columns of the weight that the layer restores.
        weight = torch.cat([model.lm_head(unit[None]) for unit in torch.eye(128)]).T
        logprobs, tokens = heads.propose(hidden, 5, model.lm_head)
        for head in range(heads.num_heads):
            update = torch.nn.functional.silu(hidden @ heads.w1[head, 0].T + heads.b1[head, 0])
            scores = ((hidden + update) @ weight.T).log_softmax(-1).topk(5)
            assert torch.equal(tokens[:, head], scores.indices)
            torch.testing.assert_close(logprobs[:, head], scores.values, rtol=1e-4, atol=1e-4)


SAVED = [
    ("bnb 8 bit", "auto"),
    ("bnb nf4, double, lm_head, restored", {"": "cpu"}),
    ("torchao int8, lm_head", "cpu"),
]


@pytest.mark.parametrize(("name", "device_map"), SAVED)
def test_a_base_saved_quantised(name, device_map, folder, tmp_path):
    quantised(name, folder / "base").save_pretrained(tmp_path)
    with MedusaModel.from_pretrained(folder / "heads", tmp_path, device_map=device_map, tree=TREE) as medusa:
        assert type(medusa.base.model.layers[0].mlp.up_proj.weight).__name__ == CASES[name][1]
        if "restored" in name:
            restored(medusa.base)
        text = medusa.generate(ROWS[0][None], max_new_tokens=NEW).sequences[0, 9:].tolist()
        assert_own_text(medusa.base, ROWS[0], text, CASES[name][2])


def test_a_medusa_2_folder_is_quantised_except_for_its_heads(folder, tmp_path):
    name, model = "bnb nf4, restored", small()
    heads = heads_for(model, shared=True)
    tensors = load_file(folder / "base" / "model.safetensors")
    for i in range(heads.num_heads):
        tensors[f"medusa_head.{i}.0.linear.weight"] = heads.w1[i, 0].detach().clone()
        tensors[f"medusa_head.{i}.0.linear.bias"] = heads.b1[i, 0].detach().clone()
        tensors[f"medusa_head.{i}.1.weight"] = model.lm_head.weight.detach().clone()
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with MedusaModel.from_pretrained(tmp_path, quantization_config=CASES[name][0](), tree=TREE) as medusa:
        restored(medusa.base)
        assert torch.equal(medusa.heads.w1[:, 0], heads.w1[:, 0])
        text = medusa.generate(ROWS[0][None], max_new_tokens=NEW).sequences[0, 9:].tolist()
        assert_own_text(medusa.base, ROWS[0], text, CASES[name][2])


def test_accelerates_hooks_are_refused_until_they_are_taken_off(folder):
    """accelerate puts hooks on every module of a model spread over devices, and on some quantised ones."""
    import accelerate

    model = quantised("torchao int8", folder / "base")
    expected = transformers_greedy(model, ROWS[0], NEW)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match="no forward hooks on LlamaForCausalLM"):
        MedusaModel(model)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    with MedusaModel(model, heads_for(small()), TREE) as medusa:
        assert medusa.generate(ROWS[0][None], max_new_tokens=NEW).sequences[0, 9:].tolist() == expected


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["torchao int8", "torchao int8, lm_head"])
def test_int8_rows_are_read_as_they_are(name, backend, folder):
    """The C++ library runs the layers, with the int8 values and scales that the quantised tensors hold."""
    config = CASES[name][0]()
    options = {"quantization_config": config, "dtype": torch.float32, "tree": TREE, "backend": backend}
    with MedusaModel.from_pretrained(folder / "heads", **options) as medusa:
        found = texts(medusa)
        native = medusa.backbone.native
        assert native is not None
        held = medusa.base.model.layers[0].mlp.up_proj.weight.qdata
        assert held.data_ptr() in {weight.data_ptr() for weight in native.weights}
        for row, text in zip(ROWS, found, strict=True):
            assert_own_text(medusa.base, row, text, 0)


def test_quantised_activations_run_module_by_module(folder):
    """What the int8 values stand for then depends on more than their scales."""
    config = CASES["torchao int8 dynamic"][0]()
    with MedusaModel.from_pretrained(folder / "heads", quantization_config=config, dtype=torch.float32) as medusa:
        texts(medusa)
        assert medusa.backbone.native is None
        weight = medusa.base.model.layers[0].mlp.up_proj.weight
        assert int8_rows(weight) is None
        weight.act_quant_kwargs = None
        assert int8_rows(weight) is not None
        weight.act_pre_scale = torch.ones(1)
        assert int8_rows(weight) is None
