"""Loss and gradient in chunks: gradcheck, memory, 16 bits, and projections that are not plain matrices."""

import pytest
import torch
import torch.nn.functional as F
from formulas import (
    CASES,
    HEADS,
    HIDDEN,
    MAP,
    VOCAB,
    Largest,
    Made,
    assert_equal_gradients,
    gradients,
    inputs_of,
    plain_loss,
    plain_targets,
    random_heads,
    random_text,
    random_weight,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_decoding.training.data.targets import IGNORE
from medusa_decoding.training.loss import projections
from medusa_decoding.training.loss.language import distillation_loss, language_loss, without_adapter
from medusa_decoding.training.loss.medusa import medusa_loss


@pytest.mark.parametrize("token_map", [None, MAP])
def test_an_lm_head_that_is_not_plain_is_called(token_map):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("lm_head", nn.Linear(HIDDEN, VOCAB, bias=False).double())
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["lm_head"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    lm_head = model.base_model.model.lm_head
    for name, parameter in lm_head.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    lora = [p for n, p in lm_head.named_parameters() if "lora" in n]
    whole = lm_head.base_layer.weight.detach() + 2 * lora[1] @ lora[0]
    heads = random_heads(shared_projection=True, token_map=token_map)
    hidden, labels = random_text()
    hidden.requires_grad_()
    found = medusa_loss(hidden, heads, labels, lm_head=lm_head, through_backbone=True, chunk=5)
    logits = heads.residual(hidden) @ whole.T
    logits = logits if token_map is None else logits[..., token_map]
    expected = sum(
        0.8 ** (k + 1) * F.cross_entropy(logits[:, k], plain_targets(labels, None, k + 2, token_map)[0])
        for k in range(HEADS)
    )
    torch.testing.assert_close(found.loss, expected)
    assert_equal_gradients(found.loss, expected, [hidden, *heads.parameters(), *lora])
    assert without_adapter(lm_head) is lm_head.base_layer


@pytest.mark.parametrize("case", ["own", "shared", "own, parents"])
def test_no_tensor_is_as_large_as_the_logits_of_one_head(case):
    positions, hidden_size, vocab, chunk = 600, 8, 1000, 16
    heads = random_heads(sizes=(hidden_size, vocab, 3), dtype=torch.float32, **CASES[case])
    hidden, labels = random_text(positions, hidden=hidden_size, vocab=vocab, dtype=torch.float32, ignored=0)
    hidden.requires_grad_()
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    given = inputs_of(heads, labels) | ({"lm_head": weight} if heads.shared_projection else {})
    for teacher in (None, weight.detach()):
        with Largest() as largest:
            options = {"teacher_lm_head": teacher, "chunk": chunk, "through_backbone": True}
            medusa_loss(hidden, heads, labels, **given, **options).loss.backward()
        # The weights' gradient, or the logits of a chunk.
        assert chunk * vocab <= largest.elements <= 3 * vocab * hidden_size
    with Largest() as largest:
        plain_loss(hidden, heads, labels, **given).backward()
    assert largest.elements >= positions * vocab
    with Largest() as largest:
        language_loss(hidden, weight.detach(), labels, chunk=chunk).loss.backward()
        distillation_loss(hidden, weight.detach(), hidden, weight.detach(), labels, chunk=chunk)
    assert chunk * vocab == largest.elements


@pytest.mark.parametrize("shared", [False, True])
def test_chunks_share_the_writing_of_a_weight_s_gradient(shared):
    """No product [V', H] per chunk, but one per H/2 positions, an eighth of the vocabulary at a time."""
    positions, hidden_size, vocab, num_heads = 140, 24, 256, 2
    heads = random_heads(shared_projection=shared, sizes=(hidden_size, vocab, num_heads))
    hidden, labels = random_text(positions, hidden=hidden_size, vocab=vocab, ignored=0)
    weight = torch.randn(vocab, hidden_size, dtype=torch.float64, requires_grad=True) if shared else None
    with Made(vocab, hidden_size) as whole, Made(vocab // 8, hidden_size) as eighth:
        loss = medusa_loss(hidden, heads, labels, lm_head=weight, chunk=4, through_backbone=True).loss
    # Heads that share a matrix sum their gradients in one tensor; separate ones each have a slice of the result.
    assert whole.count == shared
    assert 0 < eighth.count <= num_heads * 8 * -(-positions // (hidden_size // 2))
    expected = plain_loss(hidden, heads, labels, lm_head=weight)
    inputs = [*heads.parameters(), *([weight] if shared else [])]
    assert_equal_gradients(loss, expected, inputs, rtol=1e-10, atol=1e-12)


def errors_of_ours_and_pytorch(case, dtype, device):
    """Relative errors (norms) of loss and gradients: ours, and PyTorch's on full logits in the same dtype."""
    sizes, changes = (32, 200, 3), CASES[case]
    heads = random_heads(dtype=dtype, sizes=sizes, **changes).to(device)
    wide = random_heads(dtype=dtype, sizes=sizes, **changes).double().to(device)
    hidden, labels = random_text(300, hidden=32, vocab=200, dtype=dtype)
    labels = torch.where(labels == IGNORE, labels, MAP[labels % len(MAP)])
    hidden, labels = hidden.to(device), labels.to(device)
    weight = torch.randn(200, 32, dtype=dtype).to(device) if heads.shared_projection else None
    results = {}
    for name, these, kind in (("mine", heads, dtype), ("plain", heads, dtype), ("exact", wide, torch.float64)):
        states = hidden.to(kind).requires_grad_()
        matrix = None if weight is None else nn.Parameter(weight.to(kind))
        if name == "mine":
            loss = medusa_loss(states, these, labels, lm_head=matrix, chunk=7, through_backbone=True).loss
        else:
            loss = plain_loss(states, these, labels, lm_head=matrix)
        inputs = [states, *these.parameters(), *([] if matrix is None else [matrix])]
        results[name] = [loss.double(), *(g.double() for g in gradients(loss, *inputs))]
    return [
        [((x - exact).norm() / exact.norm()).item() for x in (mine, plain)]
        for mine, plain, exact in zip(*results.values(), strict=True)
    ]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("case", ["own", "shared, trimmed"])
def test_bf16_is_as_exact_as_pytorch_on_full_logits(case, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    for error, allowed in errors_of_ours_and_pytorch(case, torch.bfloat16, "cpu"):
        assert 0 < error <= 2 * allowed + 1e-9, (error, allowed)


@pytest.mark.parametrize("case", ["own", "shared, trimmed"])
def test_products_added_at_once_are_as_exact(case, monkeypatch):
    """As on a GPU; a CPU lacks only the product itself. Under the emulator the gradients are those of the kernel."""

    def add_product(total, a, b):
        assert a.dtype == b.dtype == torch.bfloat16
        total += a.float() @ b.float()

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(projections, "_adds", lambda dtype, device: dtype == torch.bfloat16)
    monkeypatch.setattr(projections, "_add_product", add_product)
    for error, allowed in errors_of_ours_and_pytorch(case, torch.bfloat16, "cpu"):
        assert 0 < error <= 2 * allowed + 1e-9, (error, allowed)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_fp32_products_by_onednn(monkeypatch):
    monkeypatch.setattr(projections, "_mkl_is_slow", lambda: True)
    heads, (hidden, labels) = random_heads(dtype=torch.float32), random_text(dtype=torch.float32)
    hidden.requires_grad_()
    loss = medusa_loss(hidden, heads, labels, chunk=5, through_backbone=True).loss
    expected = plain_loss(hidden, heads, labels)
    assert_equal_gradients(loss, expected, [hidden, *heads.parameters()], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has", ["neither", "avx512_bf16", "amx"])
@pytest.mark.parametrize("learns", [True, False])
def test_bf16_products_on_a_cpu(has, learns, monkeypatch):
    """Logits that are measured, and with AMX all, are fp32; bfloat16 is allowed inside their products alone."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has != "neither")
    monkeypatch.setattr(projections, "_amx", lambda: has == "amx")
    monkeypatch.setattr(projections, "_mkl_is_slow", lambda: False)
    settings, seen = torch.backends.mkldnn.matmul, set()
    before = settings.fp32_precision

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                seen.add((args[0].dtype, settings.fp32_precision))
            return func(*args, **(kwargs or {}))

    hidden, labels = random_text(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), Products(), torch.set_grad_enabled(learns):
        medusa_loss(hidden, random_heads(dtype=torch.float32), labels)
    fp32, rounded = (torch.float32, "bf16" if has != "neither" else before), (torch.bfloat16, before)
    steps = {"neither": {fp32}, "avx512_bf16": {rounded}, "amx": {fp32, rounded}}[has]
    assert seen == (steps if learns else {fp32})
    assert settings.fp32_precision == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["own", "shared, trimmed"])
def test_16_bits_on_cuda_are_as_exact_as_pytorch_on_full_logits(case, dtype):
    for error, allowed in errors_of_ours_and_pytorch(case, dtype, "cuda"):
        assert 0 < error <= 2 * allowed + 1e-9, (error, allowed)


@pytest.mark.parametrize("case", ["own", "own, parents", "own, root"])
@pytest.mark.parametrize("targets", ["hard", "kl"])
def test_autocast_and_16_bits(case, targets):
    exact = random_heads(**CASES[case])
    hidden, labels = random_text()
    given, weight = inputs_of(exact, labels), random_weight()
    teacher = weight if targets == "kl" else None
    expected = plain_loss(hidden, exact, labels, **given, teacher=teacher)
    wanted = gradients(expected, *exact.parameters())
    if "embed_tokens" in given:
        given["embed_tokens"].bfloat16()
    given["teacher_lm_head"] = None if teacher is None else weight.bfloat16()
    for dtype, states, context in (
        (torch.float32, hidden.bfloat16(), torch.autocast("cpu", dtype=torch.bfloat16)),
        (torch.bfloat16, hidden.float(), torch.autocast("cpu", enabled=False)),
    ):
        heads = random_heads(dtype=dtype, **CASES[case])
        with context:
            loss = medusa_loss(states, heads, labels, **given).loss
        loss.backward()
        assert loss.dtype == torch.float32
        assert 0 < abs(loss - expected) < 0.02 * expected
        for parameter, theirs in zip(heads.parameters(), wanted, strict=True):
            assert parameter.grad.dtype == dtype
            assert (parameter.grad - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("token_map", [None, MAP])
def test_a_teacher_that_is_not_a_plain_matrix_is_called(token_map):
    class Layer(nn.Module):
        out_features = VOCAB

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(random_weight() / 2)

        def forward(self, states):
            return 2 * states @ self.weight.T

    heads = random_heads(token_map=token_map)
    hidden, labels = random_text()
    called = medusa_loss(hidden, heads, labels, teacher_lm_head=Layer(), chunk=5)
    plain = medusa_loss(hidden, heads, labels, teacher_lm_head=random_weight(), chunk=5)
    torch.testing.assert_close(called.loss, plain.loss, rtol=1e-12, atol=0)
    assert_equal_gradients(called.loss, plain.loss, heads.parameters(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_lm_head_gives_its_own_loss(bits):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    if bits == 4:
        lm_head = bitsandbytes.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4").to(
            "cpu"
        )
        weight = bitsandbytes.functional.dequantize_4bit(lm_head.weight.data, lm_head.weight.quant_state).float()
    else:
        lm_head = bitsandbytes.nn.Linear8bitLt(64, 128, bias=False, has_fp16_weights=False, threshold=0.0).to("cpu")
        lm_head(torch.zeros(1, 64))
        weight = lm_head.state.CB.float() * lm_head.state.SCB[:, None] / 127
    heads = random_heads(shared_projection=True, sizes=(64, 128, 2), dtype=torch.float32)
    hidden, labels = random_text(40, hidden=64, vocab=128, dtype=torch.float32)
    found = medusa_loss(hidden, heads, labels, lm_head=lm_head, chunk=9, top=0)
    expected = plain_loss(hidden, heads, labels, lm_head=nn.Parameter(weight))
    # 8-bit layers also round their inputs.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if bits == 4 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found.loss, expected, **tolerance)
    mine, theirs = gradients(found.loss, heads.w1)[0], gradients(expected, heads.w1)[0]
    assert (mine - theirs).norm() <= tolerance["rtol"] * theirs.norm()
    assert theirs.norm() > 1e-3
