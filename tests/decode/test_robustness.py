"""Failures and recovery: broken models, interrupts, several models, threads, memory.

Elsewhere: empty prompts and other bad arguments (test_model); prompts up to the context limit and past it, EOS lists,
bfloat16 (test_greedy); copies and saved files of a swapped model (test_attention); steps that are rebuilt, calls within
inference mode (test_states); a streamer whose end fails (test_stopping); sessions after a failure (test_session); what
does not fit into memory (test_memory); kernels that are given NaN (tests/kernels).
"""

import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import math
import mmap
import pickle
import sys
import threading
from pathlib import Path

import pytest
import torch
from calls import Recorder, read_by_thread
from models import VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from oracles import byte_tokenizer, new_tokens

from medusa_decoding import MedusaModel, Session, Tree
from medusa_decoding.backbone.attention_swap import TreeAttention
from medusa_decoding.decode.runtime.state_pool import StatePool

TREE = Tree.cartesian([3, 2])
WAYS = {
    "greedy": {},
    "greedy, no end before": {"min_new_tokens": 5, "eos_token_id": [VOCAB + 1]},
    "plain": {"tree": Tree([])},
    "sampled": {"do_sample": True, "seed": 5},
    "top k": {"do_sample": True, "seed": 5, "top_k": 4, "temperature": 0.8},
    "processed": {"repetition_penalty": 1.1},
    "processed and sampled": {"repetition_penalty": 1.1, "do_sample": True, "seed": 5},
    "scores": {"output_scores": True},
    "typical": {"acceptance": "typical"},
    "typical, warm": {"acceptance": "typical", "temperature": 0.8},
}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def medusa():
    model = tiny()
    with MedusaModel(model, heads_for(model), TREE) as swapped:
        yield swapped


@pytest.fixture
def kept_states(monkeypatch):
    """Pools keep states between generations, as they do when steps are captured."""
    monkeypatch.setattr(StatePool, "keep", property(lambda self: 2, lambda self, value: None), raising=False)


def right_again(medusa, row, count=12):
    """Check that the model and its base alone write the right text."""
    expected = transformers_greedy(medusa.base, row, count)
    assert new_tokens(medusa.generate(row[None], max_new_tokens=count), len(row)) == [expected]
    assert len(expected) == count


@contextlib.contextmanager
def hooked(module, hook):
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# Broken models


@pytest.mark.parametrize(
    ("module", "place", "value"),
    [("model.layers.1.mlp.down_proj", (3, 5), math.nan), ("lm_head", (7, 2), math.nan), ("lm_head", 7, math.inf)],
)
def test_a_weight_that_is_not_finite_is_an_error_before_any_token(medusa, module, place, value):
    [row] = prompts(1, [6])
    whole = {name: tensor.clone() for name, tensor in medusa.base.state_dict().items()}
    with torch.no_grad():
        medusa.base.get_submodule(module).weight[place] = value
    for way, settings in WAYS.items():
        streamer = Recorder()
        with pytest.raises(FloatingPointError, match=r"^model: .* NaN or infinity at step 0 .* in row 0$"):
            medusa.generate(row[None], max_new_tokens=20, streamer=streamer, **settings)
        assert streamer.values == [[row.tolist()]], way
        assert streamer.ended == 1, way
    medusa.base.load_state_dict(whole)
    right_again(medusa, row)


class Breaks:
    """A forward hook that puts NaN into one row of a module's output, from its n-th call on; the prefill is call 0."""

    def __init__(self, row, first, value=math.nan):
        self.row, self.first, self.value, self.calls = row, first, value, 0

    def __call__(self, module, args, out):
        self.calls += 1
        if self.calls <= self.first:
            return out
        out = out.clone()
        out[self.row] = self.value
        return out


@pytest.mark.parametrize(("way", "value"), [*((way, math.nan) for way in WAYS), ("greedy", math.inf)])
def test_the_step_and_the_row_that_break_are_named(medusa, kept_states, way, value):
    rows = prompts(3, [5, 8, 3])
    ids, mask = padded(rows)
    for first, row in ((5, 1), (1, 2)):
        with (
            hooked(medusa.base.model.layers[0].mlp, Breaks(row, first, value)),
            pytest.raises(FloatingPointError, match=rf"at step {first} \(0 is the prefill\) in row {row}$"),
        ):
            medusa.generate(ids, mask, max_new_tokens=60, **WAYS[way])
    # The state, whose cache holds NaN, serves again.
    broken = medusa._steps.pool._idle[-1]
    assert broken.cache.kv.isnan().any()
    output = medusa.generate(ids, mask, max_new_tokens=60)
    assert medusa._steps.pool._idle[-1] is broken
    assert new_tokens(output, ids.shape[1]) == [transformers_greedy(medusa.base, row, 60) for row in rows]


@every_way
def test_a_row_that_has_ended_may_produce_nan(medusa, way):
    """It stays in the batch until the others have ended, and is not read."""
    rows = prompts(3, [5, 8, 3])
    ids, mask = padded(rows)
    ended = len(rows[0]) + 2
    settings = {
        "stopping_criteria": [lambda ids, scores: ids[0, :5].equal(rows[0]) and ids.shape[1] == ended],
        "max_new_tokens": 20,
    } | WAYS[way]
    expected = medusa.generate(ids, mask, **settings)
    assert expected.new_tokens == [2, 20, 20]
    if "do_sample" not in settings and "typical" not in way and "processed" not in way:
        texts = [transformers_greedy(medusa.base, row, n) for row, n in zip(rows, expected.new_tokens, strict=True)]
        assert new_tokens(expected, ids.shape[1]) == texts
    # Two tokens are there at the latest after the second step.
    hook = Breaks(0, 3)
    with hooked(medusa.base.model.layers[1].mlp, hook):
        got = medusa.generate(ids, mask, **settings)
    assert hook.calls > 4
    assert torch.equal(got.sequences, expected.sequences)
    assert got.accept_lengths == expected.accept_lengths


def test_a_row_that_has_met_eos_may_produce_nan(medusa):
    rows = prompts(3, [5, 8, 3], seed=3)
    ids, mask = padded(rows)
    eos = transformers_greedy(medusa.base, rows[0], 1)
    expected = [transformers_greedy(medusa.base, row, 20, eos_token_id=eos) for row in rows]
    assert len(expected[0]) == 1
    assert min(map(len, expected[1:])) > 8, "the others have to go on"
    with hooked(medusa.base.model.layers[0].mlp, Breaks(0, 1)):
        output = medusa.generate(ids, mask, max_new_tokens=20, eos_token_id=eos)
    assert new_tokens(output, ids.shape[1]) == expected


# No reader waits for ever


def failing(*args):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, None),
        ({"logits_processor": [failing]}, ZeroDivisionError),
        ({"stopping_criteria": [failing]}, ZeroDivisionError),
        ({"weight": math.nan}, FloatingPointError),
        ({"num_beams": 4}, ValueError),
        ({"max_new_tokens": 0}, ValueError),
        ({"tree": Tree.chain(5)}, ValueError),
        ({"acceptance": "typical", "do_sample": True}, ValueError),
    ],
)
def test_a_reader_in_another_thread_comes_to_an_end(settings, error):
    model = tiny(vocab_size=256)
    [row] = prompts(1, [6])
    tokenizer = byte_tokenizer()
    expected = "" if error else tokenizer.decode(transformers_greedy(model, row, 12))
    settings = {"max_new_tokens": 12} | settings
    with torch.no_grad():
        model.model.norm.weight[0] *= settings.pop("weight", 1.0)
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        assert read_by_thread(tokenizer, functools.partial(medusa.generate, row[None], **settings), error) == expected


# Interrupts


def interrupt_at(count):
    """A function that is interrupted at its n-th call, and returns its last argument at the others."""
    calls = []

    def call(*args):
        calls.append(1)
        if len(calls) == count:
            raise KeyboardInterrupt
        return args[-1]

    return call


def interrupted(place, count):
    """Settings of a generation that is interrupted somewhere."""
    call = interrupt_at(count)
    return {
        "streamer": {"streamer": Recorder(lambda seen: call(seen) if seen > 1 else None)},
        "criterion": {"stopping_criteria": [lambda ids, scores: call(False)]},
        "processor": {"logits_processor": [call]},
        "prefix": {"prefix_allowed_tokens_fn": lambda row, text: call(list(range(VOCAB)))},
        "module": {},
    }[place]


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        ("streamer", "eager"),
        ("criterion", "eager"),
        ("processor", "eager"),
        ("prefix", "eager"),
        ("module", "eager"),
        ("streamer", "compiled"),
    ],
)
def test_an_interrupt_leaves_everything_usable(monkeypatch, kept_states, place, backend):
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    model = tiny()
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, 20)
    acquired, acquire = [], StatePool.acquire
    monkeypatch.setattr(StatePool, "acquire", lambda *args: acquired.append(acquire(*args)) or acquired[-1])
    with MedusaModel(model, heads_for(model), TREE, backend=backend) as medusa:
        for count in (1, 2, 5):
            # In the middle of a step: the first layer has written its keys and values, the second has not.
            hook = interrupt_at(count)
            within = hooked(model.model.layers[0].mlp, lambda module, args, out, hook=hook: hook(out))
            with within if place == "module" else contextlib.nullcontext(), pytest.raises(KeyboardInterrupt):
                medusa.generate(row[None], max_new_tokens=20, **interrupted(place, count))
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert transformers_greedy(model, row, 20) == expected
            streamer = Recorder()
            output = medusa.generate(row[None], max_new_tokens=20, streamer=streamer)
            assert new_tokens(output, 6) == [expected]
            assert [value for [value] in streamer.values[1:]] == expected
    # The state was released once: all calls used the same one.
    assert len({id(state) for state in acquired}) == 1
    assert len(acquired) == 6


# Several models


def test_one_base_model_twice(kept_states):
    model = tiny()
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, 20)
    first = MedusaModel(model, heads_for(model), TREE)
    second = MedusaModel(model, heads_for(model, num_heads=2, seed=7), Tree.chain(2))

    def text(medusa, **settings):
        return new_tokens(medusa.generate(row[None], max_new_tokens=20, **settings), 6)[0]

    within = []

    def write(seen):
        if seen in (2, 5, 6):
            within.extend([text(second), transformers_greedy(model, row, 20)])

    assert text(first, streamer=Recorder(write)) == expected
    assert within == [expected] * 6
    # The swap outlives the first owner, also if that owner ends while the other is generating.
    assert text(second, streamer=Recorder(lambda seen: first.undo() if seen == 3 else None)) == expected
    assert text(second) == transformers_greedy(model, row, 20) == expected
    second.undo()
    assert not any(isinstance(module, TreeAttention) for module in model.modules())
    assert transformers_greedy(model, row, 20) == expected


def in_threads(*works):
    """Run each function in its own thread, interleaved as much as possible; re-raise what one of them raises."""
    errors, start = [], threading.Barrier(len(works))

    def run(work):
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for error in errors:
        raise error


@pytest.mark.slow
def test_threads_that_each_have_a_model():
    trees = [TREE, Tree.chain(3), Tree([]), Tree.cartesian([2, 2, 1])]
    models = [tiny(family, seed=seed) for seed, family in enumerate(["llama", "mistral", "qwen2", "qwen3"])]
    medusas = [MedusaModel(model, heads_for(model), tree) for model, tree in zip(models, trees, strict=True)]
    rows = prompts(4, [6, 9, 4, 7])
    ids, mask = padded(rows)
    wanted, got = {}, {index: [] for index in range(4)}
    for index, medusa in enumerate(medusas):
        texts = [transformers_greedy(models[index], row, 12) for row in rows]
        wanted[index] = [
            new_tokens(medusa.generate(ids, mask, max_new_tokens=12, **settings), ids.shape[1])
            for settings in WAYS.values()
        ]
        assert wanted[index][0] == wanted[index][2] == texts

    def write(index):
        # Each thread in its own order, and only some of them within inference mode.
        ways = list(WAYS.values())
        with torch.inference_mode(index % 2 == 0):
            for turn in range(len(ways)):
                settings = ways[(turn + 3 * index) % len(ways)]
                output = medusas[index].generate(ids.clone(), mask.clone(), max_new_tokens=12, **settings)
                got[index].append(new_tokens(output, ids.shape[1]))

    in_threads(*(functools.partial(write, index) for index in range(4)))
    for index in range(4):
        assert got[index] == [wanted[index][(turn + 3 * index) % len(WAYS)] for turn in range(len(WAYS))]


# EOS everywhere, unknown tokens, low precision


@pytest.mark.parametrize("way", [way for way in WAYS if way != "greedy, no end before"])
def test_rows_of_end_tokens_in_a_vocabulary_of_end_tokens(medusa, way):
    """EOS tokens in a prompt do not end it; the first new token ends each row, in the prefill."""
    rows = [torch.full((length,), 4) for length in (3, 1, 6)]
    ids, mask = padded(rows)
    ends = list(range(VOCAB))
    output = medusa.generate(ids, mask, max_new_tokens=9, **WAYS[way], eos_token_id=ends)
    assert output.new_tokens == [1, 1, 1]
    assert output.accept_lengths == [[], [], []]
    if "do_sample" not in WAYS[way] and "processed" not in way:
        texts = [transformers_greedy(medusa.base, row, 9, eos_token_id=ends) for row in rows]
        assert new_tokens(output, ids.shape[1]) == texts
    # One such row next to others that continue.
    others = prompts(2, [5, 8])
    ids, mask = padded([rows[0], *others])
    texts = [transformers_greedy(medusa.base, row, 9, eos_token_id=4) for row in (rows[0], *others)]
    assert new_tokens(medusa.generate(ids, mask, max_new_tokens=9, eos_token_id=4), ids.shape[1]) == texts


@pytest.fixture(scope="module")
def large_vocabulary():
    """A model of 320 tokens with a tokenizer of 256, and a prompt whose text has tokens of either kind."""
    model, tokenizer = tiny(vocab_size=320, max_position_embeddings=256), byte_tokenizer()
    assert len(tokenizer) == 256
    for seed in range(100):
        [row] = prompts(1, [6], seed=seed, vocab=320)
        text = transformers_greedy(model, row, 30)
        unknown = [place for place, token in enumerate(text) if token >= 256]
        # A character that follows a token unknown to the tokenizer, and did not occur before.
        following = [
            place
            for place in range(unknown[0] + 1 if unknown else 30, 30)
            if text.index(text[place]) == place and text[place] < 256 and tokenizer.decode(text[place]).isascii()
        ]
        if len(unknown) > 3 and following and (row >= 256).any():
            return model, tokenizer, row, text, following[0]
    raise AssertionError("no prompt serves")


def test_stop_strings_with_tokens_that_the_tokenizer_does_not_know(large_vocabulary):
    model, tokenizer, row, text, place = large_vocabulary
    stop = tokenizer.decode(text[place])
    expected = transformers_greedy(model, row, 30, stop_strings=[stop], tokenizer=tokenizer)
    assert len(expected) == place + 1 < 30
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        for tree in (TREE, Tree([]), Tree.chain(4)):
            output = medusa.generate(row[None], max_new_tokens=30, stop_strings=stop, tokenizer=tokenizer, tree=tree)
            assert new_tokens(output, 6) == [expected]


@every_way
def test_fp16_runs_on_a_cpu(way):
    """bfloat16: test_greedy. Here every token selection; the greedy text is transformers' except at near-ties."""
    model = tiny(dtype=torch.float16)
    rows = prompts(2, [6, 9])
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=20, **WAYS[way])
    assert output.new_tokens == [20, 20]
    if "do_sample" in WAYS[way] or "typical" in way or "processed" in way:
        return
    for row, got in zip(rows, new_tokens(output, ids.shape[1]), strict=True):
        with torch.no_grad():
            logits = model(torch.cat([row, torch.tensor(got)])[None]).logits[0, len(row) - 1 : -1].float()
        # Each of the two computations may round once.
        step = 2.0 ** (math.floor(math.log2(logits.abs().max())) - 10)
        assert (logits.amax(-1) - logits[range(20), got] <= 2 * step).all()


# Memory after a generation


def graphs():
    """Tensors that hold a graph for gradients."""
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.grad_fn is not None]


@pytest.mark.slow
def test_no_gradients_are_kept(medusa, kept_states):
    assert all(parameter.requires_grad for parameter in medusa.base.parameters())
    [row] = prompts(1, [6])
    kept, before = [], len(graphs())

    def look(input_ids, scores):
        kept.extend(scores or ())
        return False

    for settings in WAYS.values():
        with torch.enable_grad():
            output = medusa.generate(row[None], max_new_tokens=9, stopping_criteria=[look], **settings)
            assert torch.is_grad_enabled()
        kept += [output.sequences, *(output.scores or ())]
    assert len(kept) > len(WAYS)
    assert not any(tensor.requires_grad for tensor in kept)
    assert len(graphs()) == before
    # The model can still be trained, and generation uses what it has learned.
    loss = medusa.base(row[None], labels=row[None]).loss
    loss.backward()
    with torch.no_grad():
        for parameter in medusa.base.parameters():
            parameter.sub_(0.1 * parameter.grad)
    right_again(medusa, row)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda medusa: pickle.loads(pickle.dumps(medusa))])
def test_a_copy_of_a_swapped_medusa_model_is_independent(medusa, way):
    [row] = prompts(1, [6])
    right_again(medusa, row)
    other = way(medusa)
    assert other.base is not medusa.base
    assert (other.tree, other.backend) == (medusa.tree, medusa.backend)
    with torch.no_grad():
        medusa.base.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    texts = []
    for one in (medusa, other):
        right_again(one, row)
        texts.append(one.generate(row[None], max_new_tokens=12).sequences.tolist())
    assert texts[0] != texts[1]
    shallow = copy.copy(medusa)
    medusa.undo()
    for one in (shallow, other):
        right_again(one, row)
        one.undo()
    assert not any(isinstance(module, TreeAttention) for module in medusa.base.modules())
    assert not any(isinstance(module, TreeAttention) for module in other.base.modules())


def held():
    """Pages of this process, Python's allocated blocks, and live tensors."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages, sys.getallocatedblocks(), sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def kinds_prepare(model):
    """Settings and the errors that they raise, in turn, with all prompt lengths and trees."""
    stops = {"stopping_criteria": [lambda ids, scores: ids.shape[1] > 9]}
    kinds = [
        (None, lambda: {}),
        (None, lambda: {"do_sample": True}),
        (None, lambda: {"do_sample": True, "top_k": 3, "temperature": 0.7}),
        (None, lambda: {"repetition_penalty": 1.2}),
        (None, lambda: {"repetition_penalty": 1.2, "do_sample": True}),
        (None, lambda: {"acceptance": "typical"}),
        (None, lambda: {"output_scores": True, "output_logits": True}),
        (None, lambda: {"eos_token_id": [3, 4], "min_new_tokens": 2, "max_new_tokens": 2}),
        (None, lambda: {"metrics": True, "session": Session()}),
        (None, lambda: {"streamer": Recorder()}),
        (None, lambda: stops),
        (ValueError, lambda: {"max_new_tokens": 0}),
        (KeyboardInterrupt, lambda: {"streamer": Recorder(interrupt_at(2))}),
        (ZeroDivisionError, lambda: {"logits_processor": [failing]}),
        (FloatingPointError, lambda: {"broken": True}),
    ]
    trees = [Tree([]), Tree.chain(1), Tree.chain(2), Tree.cartesian([2, 2]), Tree([], 2), Tree([[0]], 3), "auto"]
    for number in itertools.count():
        error, settings = kinds[number % len(kinds)]
        settings = {"max_new_tokens": 1 + number // len(kinds) % 2, "tree": trees[number % len(trees)]} | settings()
        settings["input_ids"] = torch.randint(0, VOCAB, (1 + number % 7 // 6, 1 + number % 23))
        if "streamer" in settings:
            settings["input_ids"] = settings["input_ids"][:1]
        settings["attention_mask"] = torch.ones_like(settings["input_ids"])
        with torch.no_grad():
            model.model.norm.weight[0] = math.nan if settings.pop("broken", False) else 1.0
        yield error, settings


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads a process's size where Linux tells it")
def test_three_thousand_generations_in_constant_memory():
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model = tiny(**sizes, num_key_value_heads=1)
    before = None
    gc.collect()
    gc.freeze()  # objects of other tests and libraries are not scanned again and again
    with MedusaModel(model, heads_for(model, num_heads=2)) as medusa:
        for number, (error, settings) in zip(range(3_000), kinds_prepare(model), strict=False):
            if number == 1000:
                before = held()
            with pytest.raises(error) if error else contextlib.nullcontext():
                medusa.generate(**settings)
    pages, blocks, tensors = (now - was for now, was in zip(held(), before, strict=True))
    gc.unfreeze()
    assert tensors <= 0
    # 1,000 objects of Python and 1 MiB in 2,000 generations: one object or 600 bytes in each would be more.
    assert blocks < 1000
    assert pages * mmap.PAGESIZE < 2**20
