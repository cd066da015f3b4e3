"""Backbones quantised by transformers' libraries, on real layers of each: read as they are, decoded, given back.

Layers that the ops read compute each row by itself, from activations that are not rounded: the text is the quantised
model's own, token for token, and so is that of layers that run as modules and do the same. Layers that also round their
inputs turn the last bit of an input into another rounding step now and then, and from there the two computations differ
by a fraction of a step: every token is then the model's own best within a bound, which is what `assert_own_text` checks
against the library's layers, one token at a time.
"""

import copy
import json
import logging
import re
from typing import NamedTuple

import pytest
import torch
from models import heads_for, padded, prompts, tiny, transformers_greedy
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, TorchAoConfig

from medusa_decoding import MedusaModel, Tree, medusa_generate
from medusa_decoding.backbone.fused_layers import forms, obstacle
from medusa_decoding.checkpoints import write_heads
from medusa_decoding.linears.holding import LinearHold
from medusa_decoding.linears.packed import PackedLinear
from medusa_decoding.linears.reading import plain_weight, read
from medusa_kernels import Projection, decode_linear, quantised

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


def asymmetric_int4(quantization):
    return int4(quantization) | {"mapping_type": quantization.MappingType.ASYMMETRIC}


def dynamic_int4(quantization):
    return {"weight_dtype": torch.int4, "weight_granularity": quantization.PerGroup(32)}


def packed_int4():
    prototype = pytest.importorskip("torchao.prototype.quantization.int4.inference_workflow", reason="torchao moved it")
    return TorchAoConfig(prototype.PrototypeInt4WeightOnlyConfig(group_size=32))


class Case(NamedTuple):
    """A way to quantise: a config, the type of a weight, the bound of `assert_own_text`, and what `read` finds.

    The bound is 0 where the text is the model's own token for token. Measured over 640 tokens per case: at most 0.024,
    and 0.065 in bfloat16. `found` is what `forms` says, or why layers run as modules.
    """

    config: object
    weight: str
    bound: float
    found: str


ROUNDED, ROUNDED_BF16 = 0.06, 0.13
LLM_INT8 = "a bitsandbytes.nn.modules.Linear8bitLt"
NF4_LM_HEAD = {
    "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": NONE_LEFT_OUT, "bnb_4bit_quant_storage": "bfloat16",
}  # fmt: skip
INTX = "IntxUnpackedToInt8Tensor"
CASES = {
    "bnb 8 bit": Case(lambda: bnb(8), "Int8Params", ROUNDED, LLM_INT8),
    "bnb 8 bit, no outliers": Case(lambda: bnb(8, llm_int8_threshold=0.0), "Int8Params", ROUNDED, LLM_INT8),
    "bnb nf4": Case(lambda: bnb(4), "Params4bit", 0, "weights in nf4"),
    "bnb nf4, bfloat16": Case(
        lambda: bnb(4, bnb_4bit_compute_dtype="bfloat16"), "Params4bit", ROUNDED_BF16, "weights in nf4"
    ),
    "bnb fp4": Case(lambda: bnb(4, bnb_4bit_quant_type="fp4"), "Params4bit", 0, "weights in fp4"),
    "bnb nf4, double, lm_head": Case(lambda: bnb(4, **NF4_LM_HEAD), "Params4bit", 0, "weights in nf4"),
    "torchao int8": Case(lambda: torchao("Int8WeightOnlyConfig"), "Int8Tensor", 0, "weights in int8"),
    "torchao int8, lm_head": Case(
        lambda: torchao("Int8WeightOnlyConfig", modules_to_not_convert=NONE_LEFT_OUT),
        "Int8Tensor", 0, "weights in int8",
    ),
    "torchao fp8": Case(lambda: torchao("Float8WeightOnlyConfig"), "Float8Tensor", 0, "weights in float8_e4m3fn"),
    "torchao int8 dynamic": Case(
        lambda: torchao("Int8DynamicActivationInt8WeightConfig"), "Int8Tensor", ROUNDED, r"int8 \(dynamic\)"
    ),
    "torchao int4": Case(lambda: torchao("IntxWeightOnlyConfig", asymmetric_int4), INTX, 0, "weights in int4"),
    "torchao int4, embedding and lm_head": Case(
        lambda: torchao("IntxWeightOnlyConfig", int4, include_input_output_embeddings=True), INTX, 0, "weights in int4"
    ),
    "torchao int4 dynamic": Case(
        lambda: torchao("Int8DynamicActivationIntxWeightConfig", dynamic_int4), INTX, ROUNDED,
        r"weights in int4 \(dynamic\)",
    ),
    "torchao int4 packed": Case(packed_int4, "Int4OpaqueTensor", 0, "a weight of .*Int4OpaqueTensor"),
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


def loaded(name, folder, dtype=torch.float32):
    """Load the model of a case with the library's layers; as on a CPU without AVX512_BF16, where they do not round."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CASES[name].config(), dtype=dtype).eval()
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
    config, weight, bound, wanted = CASES[name]
    if dtype is torch.bfloat16:
        bound = ROUNDED_BF16
    own = loaded(name, folder / "base", dtype)
    layer = own.model.layers[1].mlp.down_proj
    assert type(layer.weight).__name__ == weight
    with MedusaModel.from_pretrained(folder / "heads", quantization_config=config(), dtype=dtype, tree=TREE) as medusa:
        assert medusa.backbone.dtype == medusa.heads.w1.dtype == dtype
        assert (plain_weight(medusa.base.lm_head) is None) == ("lm_head" in name)
        found = texts(medusa)
        decoder = medusa.backbone.decoder
        why_not = obstacle(decoder)
        assert re.search(wanted, why_not or forms(decoder))
        assert (medusa.backbone.native is None) == (why_not is not None)
        sizes = {tree.num_nodes for tree in medusa._adaptive().trees}
        assert sizes.issuperset([5, 6, 8, 9]) == (why_not is not None)
        if why_not is None:
            assert_same_product(read(decoder.layers[1].mlp.down_proj), layer, dtype)
            read_head = read(medusa.base.lm_head)
            assert not isinstance(read_head, str)
            assert (read_head.scale is not None) == ("lm_head" in name)
    expected = [assert_own_text(own, row, text, bound) for row, text in zip(ROWS, found, strict=True)]
    assert expected != unquantised, "quantising changes nothing: the test shows nothing"


def assert_same_product(found, layer, dtype):
    """Assert that what was read gives the product of the library's own layer, within a few roundings."""
    x = torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(4), dtype=dtype)
    zeros = None if found.zero is None else [found.zero]
    ours = decode_linear(x, [found.weight], scales=[found.scale], zeros=zeros, codes=found.codes)
    rounded = dtype is torch.bfloat16 or getattr(layer, "compute_dtype", None) is torch.bfloat16
    torch.testing.assert_close(ours, layer(x), rtol=0.02 if rounded else 1e-5, atol=0.1 if rounded else 1e-5)


EXACT = ["bnb nf4, double, lm_head", "torchao int8, lm_head", "torchao int4"]


@pytest.mark.parametrize(("name", "family"), [*zip(EXACT, ["mistral", "qwen2", "qwen3"], strict=True)])
def test_other_families_own_heads_and_padded_rows(name, family, tmp_path):
    plain = small(family)
    plain.save_pretrained(tmp_path)
    model, heads = loaded(name, tmp_path), heads_for(plain)
    expected = [transformers_greedy(model, row, NEW) for row in ROWS]
    ids, mask = padded(ROWS)
    with MedusaModel(model, heads, TREE) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert medusa.backbone.native is not None
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert output.tokens_per_step > 1, "no draft token was ever accepted"


def compressed(ignore=("lm_head",), form=None, inputs=None, **weights):
    """Return the small model compressed by compressed-tensors, and its compressor."""
    from compressed_tensors import quantization as ct
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model = small()
    arguments = ct.QuantizationArgs(**weights)
    rounding = None if inputs is None else ct.QuantizationArgs(**inputs)
    scheme = ct.QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=rounding, format=form)
    config = ct.QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore))
    ct.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            groups = module.weight.detach().unflatten(1, (-1, weights.get("group_size", module.in_features)))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    return model, compressor


COMPRESSED = {
    "groups": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "weights in int4"),
    "zero points": ({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}, "weights in int4"),
    "int8": ({"num_bits": 8, "type": "int", "strategy": "channel", "form": "int-quantized"}, "weights in int8"),
    "int8, dynamic": (
        {
            "num_bits": 8, "type": "int", "strategy": "channel", "form": "int-quantized",
            "inputs": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        },
        "weights in int8 (dynamic)",
    ),
    "fp8, lm_head": (
        {"num_bits": 8, "type": "float", "strategy": "channel", "ignore": ()}, "weights in float8_e4m3fn",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "wanted"), COMPRESSED.values(), ids=COMPRESSED.keys())
def test_compressed_weights_stay_compressed(settings, wanted):
    """compressed-tensors' own first forward restores all weights: afterwards it does that as before."""
    model, _ = compressed(**settings)
    heads = heads_for(small(), shared=True)
    names, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with MedusaModel(model, heads, TREE) as medusa:
        found = texts(medusa)
        assert forms(medusa.backbone.decoder) == wanted
        packed = model.model.layers[1].mlp.down_proj
        original = packed.original
        held = next(getattr(original, name) for name in ("weight_packed", "weight") if hasattr(original, name))
        assert packed.weight.data_ptr() == held.data_ptr()
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
        assert len(model(ROWS[0][None]).logits) == 1
        projection = packed.projection
    assert dict(model.named_modules()) == names
    assert list(model.state_dict()) == list(state)
    bound = ROUNDED if "inputs" in settings else 0
    expected = [assert_own_text(model, row, text, bound) for row, text in zip(ROWS, found, strict=True)]
    assert expected != [transformers_greedy(small(), row, NEW) for row in ROWS]
    assert_same_product(projection, model.model.layers[1].mlp.down_proj, torch.float32)


def test_a_compressed_model_is_loaded(folder, tmp_path):
    model, compressor = compressed(**COMPRESSED["groups"][0])
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    with MedusaModel.from_pretrained(folder / "heads", tmp_path, tree=TREE) as medusa:
        found = texts(medusa)
        assert medusa.backbone.native is not None
    assert found == [transformers_greedy(model, row, NEW) for row in ROWS]


AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # the column of each code in a word


def words(codes, places=range(8)):
    """Pack integers [.., 8 n] into int32 words [.., n], the first of `places` in the lowest bits."""
    codes = codes.long().unflatten(-1, (-1, 8))
    total = sum(codes[..., place] << 4 * index for index, place in enumerate(places))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


FILES = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "gptq, act-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
}


def write_quantised(settings, folder, family="qwen2"):
    """Write a model as GPTQ or AWQ store it; return the model that the files stand for."""
    model, generator = small(family), torch.Generator().manual_seed(5)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "proj.weight" not in name}
    awq, later = settings["quant_method"] == "awq", settings.get("checkpoint_format") == "gptq_v2"
    for name, linear in model.named_modules():
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        rows, columns = linear.weight.shape
        group = columns if settings["group_size"] == -1 else settings["group_size"]
        codes = torch.randint(16, (columns, rows), generator=generator)
        zeros = torch.randint(0 if awq or later else 1, 16, (columns // group, rows), generator=generator)
        if settings.get("sym"):
            zeros.fill_(8)
        scales = (torch.rand(zeros.shape, generator=generator) + 0.5).mul(0.04).half()
        groups = torch.arange(columns) // group
        if settings.get("desc_act"):
            groups = groups[torch.randperm(columns, generator=generator)]
        linear.weight.data = ((codes - zeros[groups]) * scales[groups].float()).T.contiguous()
        tensors[f"{name}.qweight"] = words(codes, AWQ_PLACES) if awq else words(codes.T).T.contiguous()
        tensors[f"{name}.qzeros"] = words(zeros, AWQ_PLACES) if awq else words(zeros - int(not later))
        tensors[f"{name}.scales"] = scales
        if not awq:
            tensors[f"{name}.g_idx"] = groups.to(torch.int32)
            if linear.bias is None:  # of AutoGPTQ's files all have one
                linear.bias = torch.nn.Parameter(torch.randn(rows, generator=generator) * name.endswith("o_proj"))
                tensors[f"{name}.bias"] = linear.bias.detach().half()
                linear.bias.data = tensors[f"{name}.bias"].float()
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("settings", FILES.values(), ids=FILES.keys())
def test_files_of_gptq_and_awq_are_read(settings, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="medusa_decoding")
    plain = write_quantised(settings, tmp_path)
    write_heads(heads_for(plain), tmp_path / "heads", base_model="..")
    with MedusaModel.from_pretrained(tmp_path / "heads", dtype=torch.float32, tree=TREE) as medusa:
        assert texts(medusa) == [transformers_greedy(plain, row, NEW) for row in ROWS]
        assert (medusa.backbone.native is None) == ("desc_act" in settings)
        packed = medusa.base.model.layers[0].mlp.up_proj
        values = quantised.dequantised(*packed.projection[:1], *packed.projection[2:])
        columns = slice(None) if packed.order is None else packed.order
        torch.testing.assert_close(values, plain.model.layers[0].mlp.up_proj.weight[:, columns], rtol=1e-6, atol=0)
    if "desc_act" in settings:
        assert any("(act-order)" in message for message in caplog.messages)
    if "awq" in settings.values():
        bad = json.loads((tmp_path / "config.json").read_text())
        bad["quantization_config"]["group_size"] = 56
        (tmp_path / "config.json").write_text(json.dumps(bad))
        with pytest.raises(ValueError, match="group_size: expected a multiple of 16 that divides the 192 columns of"):
            MedusaModel.from_pretrained(tmp_path / "heads")


def test_an_adapter_on_packed_weights(tmp_path):
    plain = write_quantised(FILES["gptq"], tmp_path)
    with MedusaModel.from_pretrained(tmp_path, dtype=torch.float32) as packed:
        base = packed.base
    lora = LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False)
    adapted = get_peft_model(base, lora).eval()
    expected = adapted.generate(input_ids=ROWS[0][None], max_new_tokens=NEW, do_sample=False)
    with MedusaModel(adapted, heads_for(plain), TREE) as medusa:
        found = medusa.generate(ROWS[0][None], max_new_tokens=NEW).sequences
    assert torch.equal(found, expected)
    assert found[0, 9:].tolist() != transformers_greedy(plain, ROWS[0], NEW)


@pytest.mark.parametrize(
    "name", ["bnb 8 bit", "bnb nf4, double, lm_head", "torchao int4, embedding and lm_head", "torchao int4 packed"]
)
def test_undo_restores_the_original_modules_and_weights(name, folder):
    """bitsandbytes repacks 4-bit weights for AVX512_BF16 in the first forward, but not while they are held."""
    config = CASES[name].config
    before, model = (
        AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config(), dtype=torch.float32).eval()
        for _ in range(2)
    )
    heads = heads_for(small(), shared=True)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    ids = torch.stack(prompts(2, [9], vocab=32))

    def assert_state():
        found = model.state_dict()
        assert list(found) == list(state)
        assert [key for key, tensor in state.items() if not same(found[key], tensor)] == []

    with MedusaModel(model, heads, TREE) as medusa, MedusaModel(model, heads) as other:
        text = medusa.generate(ids, max_new_tokens=NEW).sequences
        model(ids)
        assert_state()
        other.undo()
        medusa.suspend()
        assert dict(model.named_modules()) == modules
        medusa.resume()
        assert torch.equal(medusa.generate(ids, max_new_tokens=NEW).sequences, text)
    assert dict(model.named_modules()) == modules
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert_state()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before(ids).logits)


def same(left, right):
    """Compare tensors, and tensor subclasses by what they are made of."""
    if hasattr(left, "__tensor_flatten__"):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__tensor_flatten__()[0])
    return torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (left, right)))


@pytest.mark.parametrize(
    "name", ["torchao int8, lm_head", "bnb nf4, double, lm_head", "torchao int4, embedding and lm_head"]
)
def test_shared_heads_propose_through_a_quantised_lm_head(name, folder):
    model = loaded(name, folder / "base")
    heads = heads_for(small(), shared=True)
    hidden = torch.randn(2, 128, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        # The rows of the identity, multiplied one at a time, are the columns of the weight that the layer restores.
        weight = torch.cat([model.lm_head(unit[None]) for unit in torch.eye(128)]).T
        with LinearHold(model):
            assert not isinstance(read(model.lm_head), str)
            logprobs, tokens = heads.propose(hidden, 5, model.lm_head)
        for head in range(heads.num_heads):
            update = torch.nn.functional.silu(hidden @ heads.w1[head, 0].T + heads.b1[head, 0])
            scores = ((hidden + update) @ weight.T).log_softmax(-1).topk(5)
            assert torch.equal(tokens[:, head], scores.indices)
            torch.testing.assert_close(logprobs[:, head], scores.values, rtol=1e-4, atol=1e-4)


SAVED = [
    ("bnb 8 bit", "auto"),
    ("bnb nf4, double, lm_head", {"": "cpu"}),
    ("torchao int8, lm_head", "cpu"),
]


@pytest.mark.parametrize(("name", "device_map"), SAVED)
def test_a_base_saved_quantised(name, device_map, folder, tmp_path):
    loaded(name, folder / "base").save_pretrained(tmp_path)
    with MedusaModel.from_pretrained(folder / "heads", tmp_path, device_map=device_map, tree=TREE) as medusa:
        assert type(medusa.base.model.layers[0].mlp.up_proj.weight).__name__ == CASES[name].weight
        text = medusa.generate(ROWS[0][None], max_new_tokens=NEW).sequences[0, 9:].tolist()
        assert_own_text(medusa.base, ROWS[0], text, CASES[name].bound)


def test_a_medusa_2_folder_is_quantised_except_for_its_heads(folder, tmp_path):
    name, model = "bnb nf4", small()
    heads = heads_for(model, shared=True)
    tensors = load_file(folder / "base" / "model.safetensors")
    for i in range(heads.num_heads):
        tensors[f"medusa_head.{i}.0.linear.weight"] = heads.w1[i, 0].detach().clone()
        tensors[f"medusa_head.{i}.0.linear.bias"] = heads.b1[i, 0].detach().clone()
        tensors[f"medusa_head.{i}.1.weight"] = model.lm_head.weight.detach().clone()
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with MedusaModel.from_pretrained(tmp_path, quantization_config=CASES[name].config(), tree=TREE) as medusa:
        assert torch.equal(medusa.heads.w1[:, 0], heads.w1[:, 0])
        text = medusa.generate(ROWS[0][None], max_new_tokens=NEW).sequences[0, 9:].tolist()
        assert_own_text(medusa.base, ROWS[0], text, CASES[name].bound)


def test_accelerates_hooks_are_refused_until_they_are_taken_off(folder):
    """accelerate puts hooks on every module of a model spread over devices, and on some quantised ones."""
    import accelerate

    model = loaded("torchao int8", folder / "base")
    expected = transformers_greedy(model, ROWS[0], NEW)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match="no forward hooks on LlamaForCausalLM"):
        MedusaModel(model)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    with MedusaModel(model, heads_for(small()), TREE) as medusa:
        assert medusa.generate(ROWS[0][None], max_new_tokens=NEW).sequences[0, 9:].tolist() == expected


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["torchao int8, lm_head", "torchao int4, embedding and lm_head", "bnb nf4"])
def test_weights_are_read_in_place_or_packed_once(name, backend, folder):
    options = {"quantization_config": CASES[name].config(), "dtype": torch.float32, "tree": TREE, "backend": backend}
    with MedusaModel.from_pretrained(folder / "heads", **options) as medusa:
        found = texts(medusa)
        native = medusa.backbone.native
        layer = medusa.base.model.layers[0].mlp.up_proj
        assert read(layer) is read(layer) or isinstance(layer, PackedLinear)
        held = getattr(layer.weight, "qdata", layer.weight)
        assert held.data_ptr() in {weight.data_ptr() for weight in native.weights}
        if isinstance(layer, PackedLinear):
            assert layer.original.weight.qdata.untyped_storage().nbytes() == 1
    for row, text in zip(ROWS, found, strict=True):
        assert_own_text(loaded(name, folder / "base"), row, text, 0)


def test_held_weights_have_gradients_and_are_neither_cast_nor_loaded(folder):
    model = loaded("torchao int4, embedding and lm_head", folder / "base")

    def gradient():
        x = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
        model.model.layers[0].mlp(x).square().sum().backward()
        return x.grad

    own, stored = gradient(), model.state_dict()
    with MedusaModel(model):
        torch.testing.assert_close(gradient(), own)
        with pytest.raises(ValueError, match=r"expected no move or cast while .* got one to torch.bfloat16 on cpu"):
            model.model.layers[0].mlp.up_proj.bfloat16()
        with pytest.raises(
            RuntimeError, match=r"up_proj.weight: expected a model whose layers MedusaModel does not hold"
        ):
            model.load_state_dict(stored)


def test_held_weights_round_activations_that_have_gradients_too(folder):
    with MedusaModel(loaded("torchao int4 dynamic", folder / "base")) as medusa:
        layer, x = medusa.base.model.layers[0].mlp.up_proj, torch.randn(3, 128, requires_grad=True)
        with torch.no_grad():
            expected, unit = layer(x), layer(torch.eye(128))
        layer(x).sum().backward()
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(x.grad, unit.sum(1).expand(3, -1), rtol=0, atol=1e-4)


ROUNDABLE = {
    "torchao int8 dynamic": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int4 dynamic": lambda: torchao("IntxWeightOnlyConfig", int4),
}


@pytest.mark.parametrize(("name", "config"), ROUNDABLE.items(), ids=ROUNDABLE)
def test_inputs_of_quantised_layers_are_rounded_if_asked(name, config, folder):
    """As by the library's own layers that do so, which hold the same weights."""
    own, heads = loaded(name, folder / "base"), folder / "heads"
    settings = {"quantization_config": config(), "dtype": torch.float32, "tree": TREE}
    with MedusaModel.from_pretrained(heads, activation_dtype="int8", **settings) as medusa:
        model = medusa.base
        assert re.search(CASES[name].found, forms(medusa.backbone.decoder))
        found = texts(medusa)
        assert medusa.backbone.native is not None
        x = torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(4))
        layers = [one.model.layers[1].mlp.down_proj for one in (model, own)]
        torch.testing.assert_close(layers[0](x), layers[1](x), rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match=r"activation_dtype: expected .int8. like another .* got None"):
            MedusaModel(model)
        MedusaModel.from_pretrained(heads, model, activation_dtype="int8").undo()
        copied = copy.deepcopy(medusa)
        assert copied.activation_dtype == "int8"
    for row, text in zip(ROWS, found, strict=True):
        assert_own_text(own, row, text, ROUNDED)
    assert not torch.equal(model.model.layers[1].mlp.down_proj(x), layers[0](x))


def test_with_rounded_inputs_every_tree_writes_plain_decodings_text():
    """Over 8 layers a difference in a last bit becomes another rounding step, and that another text."""
    quantization = pytest.importorskip("torchao.quantization")
    model = small(num_hidden_layers=8)
    heads = heads_for(model, shared=True)
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    rows = prompts(6, range(40, 46), vocab=32)
    with MedusaModel(model, heads, TREE, activation_dtype="int8") as medusa:
        found = texts(medusa, rows)
        assert medusa.backbone.native is not None
        medusa.tree = Tree([])
        assert found == [
            medusa.generate(row[None], max_new_tokens=NEW).sequences[0, len(row) :].tolist() for row in rows
        ]


@pytest.mark.parametrize("ordered", [False, True])
def test_inputs_of_symmetric_gptq_are_rounded(ordered, tmp_path):
    plain = write_quantised(FILES["gptq"] | {"sym": True, "desc_act": ordered}, tmp_path)
    x = torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(4))
    with MedusaModel.from_pretrained(tmp_path, dtype=torch.float32, activation_dtype="int8") as medusa:
        layer = medusa.base.model.layers[1].mlp.down_proj
        rounded = quantised.rounded(x, "dynamic", layer.weight)
        expected = torch.nn.functional.linear(rounded, plain.model.layers[1].mlp.down_proj.weight)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_inputs_are_rounded_for_a_call_of_transformers_generate(folder):
    model, codes = loaded("torchao int8", folder / "base"), []

    def look(ids, scores):
        codes.append(read(model.model.layers[0].mlp.down_proj).codes)
        return torch.zeros(len(ids), dtype=torch.bool)

    settings = {"custom_generate": medusa_generate, "heads": folder / "heads", "stopping_criteria": [look]}
    for dtype in ("int8", None, "int8"):
        model.generate(ROWS[0][None], activation_dtype=dtype, max_new_tokens=1, **settings)
    assert codes == ["dynamic", "int4", "dynamic"]
    assert read(model.model.layers[0].mlp.down_proj).codes == "int4"


def test_inputs_that_cannot_be_rounded_are_named(folder):
    for name, reason in {
        "torchao int4": "int4 with zero points in model.layers.0",
        "bnb nf4": "weights in nf4 in model.layers.0",
        None: "expected a model with weights in int8 or int4, got none",
    }.items():
        model = small() if name is None else loaded(name, folder / "base")
        before = dict(model.named_modules())
        with pytest.raises(ValueError, match=f"activation_dtype: .*{reason}"):
            MedusaModel(model, activation_dtype="int8")
        assert dict(model.named_modules()) == before
    with pytest.raises(ValueError, match="activation_dtype: expected None or 'int8', got 'int4'"):
        MedusaModel(small(), activation_dtype="int4")


def test_a_shared_embedding_stays_whole(folder):
    model = loaded("torchao int4, embedding and lm_head", folder / "base")
    model.model.embed_tokens.weight = model.lm_head.weight
    expected = transformers_greedy(model, ROWS[0], NEW)
    with MedusaModel(model, heads_for(small()), TREE) as medusa:
        assert isinstance(model.lm_head, PackedLinear)
        assert medusa.generate(ROWS[0][None], max_new_tokens=NEW).sequences[0, 9:].tolist() == expected


def four_bit(columns=128, **state):
    from bitsandbytes.nn import Linear4bit

    linear = Linear4bit(columns, 32, bias=False, quant_type="nf4")
    linear.weight.data = torch.randn(32, columns)
    linear = linear.to("cpu")
    vars(linear.weight.quant_state).update(state)
    return linear


def int8_layer(name, value):
    from torchao import quantization

    linear = torch.nn.Linear(64, 32, bias=False)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    assert not isinstance(read(linear), str)
    setattr(linear.weight, name, value)
    return linear


def hooked():
    linear = torch.nn.Linear(8, 8)
    linear.register_forward_hook(lambda *_: None)
    return linear


REASONS = {
    "forward hooks on its Linear": hooked,
    "a torch.nn.modules.linear.Bilinear": lambda: torch.nn.Bilinear(2, 2, 2),
    r"repacked for AVX512_BF16 \(load the model again\)": lambda: four_bit(packing_format_for_cpu=True),
    "in nf4 with blocks of 64 in rows of 96": lambda: four_bit(96),
    "with its own table of nf4": lambda: four_bit(code=torch.zeros(16)),
    "not quantised yet": lambda: __import__("bitsandbytes").nn.Linear4bit(64, 32),
    "whose inputs are quantised or scaled too": lambda: int8_layer("act_pre_scale", torch.ones(1)),
    "more than one scale per row, or zero points": lambda: int8_layer("block_size", [1, 32]),
    r"columns in another order than the input's \(act-order\)": lambda: PackedLinear(
        Projection(torch.zeros(4, 16, dtype=torch.uint8), None, torch.ones(4, 1)), torch.arange(32).flip(0)
    ),
}


@pytest.mark.parametrize(("reason", "make"), REASONS.items())
def test_what_is_not_read_has_a_reason(reason, make):
    found = read(make())
    assert isinstance(found, str)
    assert re.search(reason, found)


def test_weights_side_by_side_must_be_stored_alike():
    model = small()
    model.model.layers[1].self_attn.k_proj = int8_layer("act_pre_scale", None)
    with MedusaModel(model) as medusa:
        assert obstacle(medusa.backbone.decoder) == (
            "layer 1 has projections side by side that are quantised differently"
        )


def test_compressed_weights_that_cannot_be_read_are_refused_whole():
    """Their modules cannot be called either, until the library has decompressed them."""
    model, _ = compressed(**COMPRESSED["groups"][0])
    last = model.model.layers[1].mlp.down_proj
    last.quantization_scheme = copy.deepcopy(last.quantization_scheme)
    last.quantization_scheme.weights.num_bits = 8
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"a scale per group in model\.layers\.1\.mlp\.down_proj; load it by"):
        MedusaModel(model)
    assert dict(model.named_modules()) == before
    assert model.ct_decompress_hook.id in model._forward_pre_hooks
