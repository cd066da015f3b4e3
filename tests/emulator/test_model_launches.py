"""Every launch that steps of real models make, executed once: each compiled form on one op call with that form.

The steps are recorded on the meta device with one layer, for the GPU that the emulator stands for. Widths, numbers of
heads and vocabularies are the models' own, and so are tiles, strides and what the compiler knows of them; of OLMo,
Gemma and Granite, whose layers launch other forms, a small model is taken. Of several calls with a form the smallest
runs, with fewer tokens in the vocabulary if that keeps the form, and its results are compared with the op's reference.

`benchmarks/results/emulated-forms.txt` lists the executed forms per target. FORMS=write rewrites a target's lines:

    FORMS=write pytest -p emulator.plugin --sm 90 --races tests/emulator/test_model_launches.py
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers.generation import logits_process as lp
from triton.runtime.jit import JITFunction

import medusa_kernels
from benchmarks import bench_step, grids, inspection, launches
from benchmarks.inspection import TARGETS
from benchmarks.launches import Call, Launch
from medusa_decoding.decode.selection.sampling import Sampling
from medusa_decoding.decode.selection.typical import TypicalAcceptance
from medusa_kernels import reference
from medusa_kernels.reference import ancestor_words

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from budget import assert_within_twice

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "emulated-forms.txt"
LISTED = ("80", "86", "90")
PREFIX = 1024
GREEDY = {"heads": grids.HEADS, "dtype": torch.bfloat16, "selector": lambda: None}
SELECTORS = {
    "sampled": lambda: Sampling([lp.TemperatureLogitsWarper(0.7)]),
    "nucleus": lambda: Sampling([lp.TopKLogitsWarper(50), lp.TopPLogitsWarper(0.9)]),
    "typical": TypicalAcceptance,
}
MODELS = (*grids.MODELS, "OLMo-2-254M", "Gemma-2-254M", "Granite-254M")
WAYS = {
    # The models' own dtypes: Llama-2 is published in fp16.
    "": (MODELS, GREEDY),
    "fp16": (("Llama-2-7B", "Llama-2-13B"), GREEDY | {"dtype": torch.float16}),
    **{heads: (("Llama-2-7B",), GREEDY | {"heads": heads}) for heads in ("shared", "trimmed 8192", "full bf16")},
    # Of these only vocabulary and dtype matter.
    **{name: (("Llama-2-7B", "Qwen3-8B"), GREEDY | {"selector": make}) for name, make in SELECTORS.items()},
}
"""By name: models, and what else a step depends on."""


class Form:
    """A compiled form: one of its launches, how many there are by step, and the smallest call that makes one."""

    def __init__(self, launch):
        self.launch, self.launches, self.call = launch, {}, launch.call


def key(arch, launch):
    if launch.kernel is None:
        return ("kv_compact", 16)  # rows of any of these models are multiples of 16 bytes
    return grids.key(arch, launches.specialisation(launch))


def recorded(arch):
    """Return the forms of all steps on a target, by key."""
    forms, layers, shallow = {}, {}, {}
    for name in MODELS:
        config = bench_step.MODELS[name]()
        layers[name], config.num_hidden_layers = config.num_hidden_layers, 1
        shallow[name] = lambda config=config: config
    with mock.patch.dict(bench_step.MODELS, shallow):
        for way, (models, settings) in WAYS.items():
            for model, nodes, batch in ((m, n, b) for m in models for n in (1, 16, 64) for b in (1, 4)):
                step = f"{model} {way} {nodes} nodes batch {batch}"
                for launch in grids.step_launches(
                    model, nodes, PREFIX, settings["heads"], TARGETS[arch], settings["dtype"],
                    batch=batch, selector=settings["selector"](),
                ):  # fmt: skip
                    form = forms.setdefault(key(arch, launch), Form(launch))
                    # The norm after the last layer has the form of those after the others.
                    first_norm = any(name.endswith("input_layernorm.weight") for name in launch.weights.values())
                    in_layer = launch.op in ("decode_linear", "rope_append", "tree_attention", "add_rms_norm")
                    times = layers[model] if in_layer and not first_norm else 1
                    form.launches[step] = form.launches.get(step, 0) + times
                    form.call = min(form.call, launch.call, key=size_of)
    return forms


def size_of(call):
    """Return the elements of a call's arguments."""
    return sum(value.numel() for value in flat(call.arguments.values()) if isinstance(value, torch.Tensor))


def smaller(arch, number, call):
    """Return the call with as few tokens in the vocabulary as keep the form."""
    weight = {"tree_verify": "weight", "heads_topk": "w2"}.get(call.op)
    if weight is None or call.arguments.get("token_map") is not None:
        return call
    for tokens in (8448, 10240):
        fewer = {weight: call.arguments[weight][..., :tokens, :]}
        if call.arguments.get("noise") is not None:
            fewer["noise"] = call.arguments["noise"][..., :tokens]
        arguments = call.arguments | fewer
        with launches.recorded(TARGETS[arch], {}) as found:
            getattr(medusa_kernels, call.op)(**arguments)
        if any(key(arch, launch) == number for launch in found):
            return Call(call.op, arguments)
    return call


def flat(values):
    for value in values:
        yield from value if isinstance(value, list) else [value]


class Values:
    """What a call's arguments hold: random numbers, and integers that mean something."""

    def __init__(self, call):
        self.call = call
        named = call.arguments
        if "q" in named:  # which may come in parts, on an axis of their own
            self.batch, self.nodes = named["q"].shape[-4:-2]
        else:
            names = ("tokens", "candidates", "logits", "path", "x", "seeds", "hidden")
            grid = next(named[name] for name in names if name in named)
            self.batch, self.nodes = len(grid), 64 if grid.dim() < 2 or "path" in named else grid.shape[1]
        places = next((named[name].shape[-1] for name in ("paths", "path") if name in named), min(5, self.nodes))
        self.random = torch.Generator().manual_seed(3)
        # A path as long as it may be, and nodes after it that hang anywhere above its end.
        self.parents, paths = [-1], [[0]]
        for node in range(1, self.nodes):
            above = [n for n in range(node) if len(paths[n]) < places]
            self.parents.append(node - 1 if node < places else above[self.below(len(above))])
            paths.append([*paths[self.parents[-1]], node])
        self.depths = torch.tensor([len(path) - 1 for path in paths])
        self.paths = torch.tensor([path + path[-1:] * (places - len(path)) for path in paths])
        self.visible = torch.zeros(self.nodes, self.nodes, dtype=torch.bool)
        for node, path in enumerate(paths):
            self.visible[node, path] = True

    def below(self, limit, *shape):
        drawn = torch.randint(limit, shape, generator=self.random)
        return drawn if shape else int(drawn)

    def integers(self, name, like):
        """Return the values of an argument of integers; 0 by default."""
        arguments, rows = self.call.arguments, torch.arange(self.batch)
        lengths = PREFIX - 37 * rows
        end = self.paths[self.depths.argmax()]
        vocabulary = 32000 if "weight" not in arguments else len(arguments["weight"])
        if name == "next_tokens":  # right along the longest path, but for the last row
            wanted = self.below(vocabulary, *like.shape)
            wanted[: max(1, self.batch - 1), end[:-1]] = self.tokens[: max(1, self.batch - 1), end[1:]]
            return wanted
        if name in ("tokens", "candidates"):
            self.tokens = self.below(vocabulary, *like.shape)
            return self.tokens
        return {
            "cache_lens": lengths, "lengths": lengths, "depths": self.depths, "noise_rows": self.depths,
            "parents": torch.tensor(self.parents), "paths": self.paths, "ancestors": ancestor_words(self.visible),
            "path": end.expand(self.batch, -1), "accept_lens": len(set(end.tolist())) - 1 - rows,
            "eos": torch.tensor(-1), "max_new": torch.tensor(1000), "seeds": 77 - 2**40 * rows, "first": 5 * rows,
            "token_map": 3 * torch.arange(like.numel()),
        }.get(name, torch.tensor(0))  # fmt: skip

    def floats(self, name, like):
        # Repeats after a number of elements that no row is a multiple of; normal numbers take long.
        block = torch.randn(1_000_003, generator=self.random)
        if name == "noise":
            block = -torch.log(-torch.log(torch.rand(1_000_003, generator=self.random).clamp(1e-7, 1 - 1e-7)))
        if name in ("weights", "w1", "w2", "weight") and like.dim() > 1:
            block *= like.shape[-1] ** -0.5
        block = block.to(like.dtype)
        count = like.numel()
        return block.repeat(-(-count // len(block)))[:count].view(like.shape)

    def real(self, name, value):
        if isinstance(value, list):
            return [self.real(name, one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        if value.is_floating_point():
            return tensor.copy_(self.floats(name, value))
        return tensor.copy_(self.integers(name, value).expand(value.shape))

    def arguments(self):
        return {name: self.real(name, value) for name, value in self.call.arguments.items()}


@contextlib.contextmanager
def noted(arch, op, executed):
    """Add the form of every launch to a set."""
    launch_it = JITFunction.run

    def run(kernel, *args, grid, warmup, **keywords):
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {n: v for n, v in keywords.items() if n in names}
        options = {name: value for name, value in keywords.items() if name not in names}
        executed.add(key(arch, Launch(op, kernel.fn.__name__, kernel, tuple(grid), given, options, {})))
        return launch_it(kernel, *args, grid=grid, warmup=warmup, **keywords)

    with mock.patch.object(JITFunction, "run", run):
        yield


def wide(value, dtype):
    if isinstance(value, list):
        return [wide(one, dtype) for one in value]
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def copied(value):
    return [copied(one) for one in value] if isinstance(value, list) else getattr(value, "clone", lambda: value)()


def same(got, plain, exact, largest=None):
    for mine, in_precision, wanted in zip(got, plain, exact, strict=True):
        if mine.is_floating_point():
            assert_within_twice(mine, in_precision, wanted.double(), largest)
        else:
            assert torch.equal(mine, wanted)


def check_any(op, before, after, got):
    """Hold results and changed arguments against the reference in fp64, with the budget of its own rounding."""
    function, largest = getattr(reference, op), None
    plain, exact = (
        # Of `check` the bits are copied.
        {n: copied(wide(v, d)) if d and n != "check" else copied(v) for n, v in before.items()}
        for d in (None, torch.float64)
    )
    results = [function(**arguments) for arguments in (plain, exact)]
    results = [[] if r is None else [r] if isinstance(r, torch.Tensor) else list(r) for r in (got, *results)]
    if op == "decode_linear" and before.get("parts", 1) > 1:  # where a part ends is the kernel's business
        results = [[r.sum(0)] for (r,) in results]
        # The emulator adds products one after another, so that more is rounded than in PyTorch's sums of blocks.
        largest = 2 * max((exact["x"].abs() @ weight.abs().T).max().item() for weight in exact["weights"])
    same(*results, largest)
    changed = [n for n, v in before.items() if isinstance(v, torch.Tensor) and not same_bits(v, plain[n])]
    same(*([arguments[n] for n in changed] for arguments in (after, plain, exact)))
    for name, value in before.items():
        if isinstance(value, torch.Tensor) and name not in changed:
            assert same_bits(after[name], value), f"{name} has changed"


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_moved(before, after, got):
    """Rows are moved without arithmetic."""
    reference.kv_compact(**before)
    assert all(same_bits(after[name], before[name]) for name in before)


def check_drawn(before, after, got):
    """No probability is so near an edge that rounding moves it across."""
    tokens, best = reference.draw_tokens(**before)
    assert torch.equal(got[0], tokens)
    assert torch.allclose(got[1], best, rtol=1e-6, atol=1e-5)


def check_noise(before, after, got):
    """Two logarithms in fp32."""
    assert torch.allclose(got, reference.gumbel_noise(**before), rtol=1e-6, atol=2e-6)


def check_verified(before, after, got):
    """No token that is better beyond rounding; statistics within twice that of logits in the model's dtype."""
    hidden, weight, temperature = before["hidden"], before["weight"], before.get("temperature", 0.0) or 1.0
    exact, options = hidden.float() @ weight.float().T, (before.get("divisor", 1.0), before.get("softcap"))
    exact, plain = (
        reference.scaled_logits(logits.float().clone(), *options) / temperature
        for logits in (exact, exact.to(hidden.dtype))
    )
    error, scores = 2 * (plain - exact).abs().max(), exact
    if before.get("noise") is not None:
        scores = exact + reference.of_nodes(before["noise"], before["noise_rows"])
    assert (scores.gather(-1, got[0][..., None])[..., 0] >= scores.amax(-1) - 2 * error).all()
    if before.get("want_stats", True):
        stats = [reference.verify_stats(logits, before["candidates"], before["parents"]) for logits in (plain, exact)]
        for mine, in_precision, wanted in zip(got[1:], *stats, strict=True):
            assert_within_twice(mine, in_precision.to(hidden.dtype), wanted.double(), exact.abs().max().item())


def check_candidates(before, after, got):
    """No candidate is better beyond rounding than those returned, whose log-probabilities are right."""
    rounded = {name: wide(value, torch.float32) for name, value in before.items()}
    ids = before.get("token_map")
    width = before["w2"].shape[-2] if ids is None else len(ids)
    everything, order = reference.heads_topk(**(rounded | {"k": width}))
    exact = torch.full((*order.shape[:2], int(order.max()) + 1), -torch.inf).scatter(-1, order, everything)
    # In the model's dtype: states and logits are rounded to it.
    state, dtype = rounded["hidden"][:, None], before["hidden"].dtype
    (w1,), (b1,) = rounded["w1"].unbind(1), rounded["b1"].unbind(1)  # one block per head
    inner = torch.einsum("bkh,kgh->bkg", state.expand(-1, len(w1), -1), w1) + b1
    state = (state + torch.nn.functional.silu(inner.to(dtype))).to(dtype).float()
    w2 = rounded["w2"][..., ids, :] if before.get("gather") else rounded["w2"]
    logits = torch.einsum("bkh,vh->bkv" if w2.dim() == 2 else "bkh,kvh->bkv", state, w2).to(dtype).float()
    logits = reference.scaled_logits(logits, before.get("divisor", 1.0), before.get("softcap"))
    logits = logits / before.get("temperature", 1.0)
    if before.get("noise") is not None:
        logits += before["noise"][:, : logits.shape[1]] if ids is None else before["noise"][:, : logits.shape[1], ids]
    plain = logits.log_softmax(-1)
    error = 2 * (plain - (exact if ids is None else exact[..., ids])).abs().max()
    logprobs, tokens = got
    assert (logprobs - exact.gather(-1, tokens)).abs().max() <= error
    assert (exact.gather(-1, tokens).amin(-1) >= everything[..., before["k"] - 1] - 2 * error).all()
    assert all(len(set(row)) == before["k"] for row in tokens.flatten(0, 1).tolist())


CHECKS = {
    "kv_compact": check_moved,
    "draw_tokens": check_drawn,
    "gumbel_noise": check_noise,
    "tree_verify": check_verified,
    "heads_topk": check_candidates,
}


@pytest.fixture(scope="module")
def forms(machine):
    return recorded(str(machine.settings.sm))


@pytest.fixture(scope="module")
def executed():
    """The forms executed so far."""
    return set()


OPS = (*(op for op in inspection.OPS if op != "tree_select"), "kv_compact")
"""Ops that launch anything in these steps; their trees are fixed, so none is selected."""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("most", [1, pytest.param(sys.maxsize, marks=pytest.mark.slow)], ids=["one", "every"])
def test_forms_compute_what_the_reference_does(machine, forms, executed, op, most):
    arch, found = str(machine.settings.sm), len(machine.findings)
    of_op = sorted((n for n in forms if forms[n].launch.op == op), key=lambda n: size_of(forms[n].call))
    assert of_op, "no step launches it"
    for number in of_op[:most]:
        if number in executed:
            continue
        name = " ".join(map(str, columns(number, forms[number])[:7]))
        before = Values(smaller(arch, number, forms[number].call)).arguments()
        # Weights are large, and not written.
        after = {n: v if n in ("weights", "weight", "w1", "w2") else copied(v) for n, v in before.items()}
        with noted(arch, op, executed):
            got = getattr(medusa_kernels, op)(**after)
        if op == "kv_compact":
            executed.add(number)
        assert number in executed, f"{name}: the call launched another form"
        CHECKS.get(op, functools.partial(check_any, op))(before, after, got)
        assert list(machine.findings)[found:] == [], name


def columns(number, form):
    """Return a line of the table; a form is told from others by the digest of all that the compiler knows of it."""
    launch, models = form.launch, dict.fromkeys(step.split()[0] for step in form.launches)
    dtypes = (v.dtype for v in launch.arguments.values() if isinstance(v, torch.Tensor))
    dtype = next((str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.itemsize == 2), "-")
    flags = (name for name, value in launch.arguments.items() if name.isupper() and value is True)
    warps, stages = (launch.options.get(name, "-") for name in ("num_warps", "num_stages"))
    digest = hashlib.sha256(repr(number).encode()).hexdigest()[:8]
    return (
        launch.op, launch.name.strip("_").removesuffix("_kernel"), dtype, digest, warps, stages,
        " ".join([grids.tile(launch), *flags]).strip() or "-", ", ".join(models), sum(form.launches.values()),
    )  # fmt: skip


HEAD = ("target", "op", "kernel", "dtype", "form", "warps", "stages", "constants", "models", "launches")
ABOUT = f"""\
Compiled forms of the launches of real models' steps that were executed without a GPU, races looked for, and held
against the reference: greedy at 1, 16 and 64 nodes, batch 1 and 4, {PREFIX:,} cached rows; also fp16, other heads,
sampled and typical. launches: of all these steps together. form: digest of what the compiler knows of a launch. A
target's lines are made by

    {__doc__.strip().splitlines()[-1].strip()}

"""


def lines_of(arch, forms):
    return sorted((f"sm_{arch}", *columns(*item)) for item in forms.items())


def test_every_form_is_listed_as_executed(machine, forms, executed):
    """With FORMS=write, and after all forms of the target have been executed, this writes the list."""
    lines = {arch: lines_of(arch, forms if arch == str(machine.settings.sm) else recorded(arch)) for arch in LISTED}
    listed = TABLE.read_text() if TABLE.exists() else ""
    if os.environ.get("FORMS") == "write":
        assert executed >= set(forms), "not all forms have been executed"
        kept = {arch: own for arch, own in lines.items() if arch == str(machine.settings.sm) or f"sm_{arch} " in listed}
        listed = ABOUT + inspection.aligned(HEAD, [line for own in kept.values() for line in own], 8) + "\n"
        TABLE.write_text(listed)
        lines = kept
    forms_in = {tuple(line.split()[:5]) for line in listed.splitlines() if line.startswith("sm_")}
    assert forms_in == {line[:5] for own in lines.values() for line in own}
