"""What a step runs before it is captured, with CUDA graphs and streams replaced by ones that only record calls."""

import contextlib

import pytest
import torch
from models import heads_for, prompts, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as lp

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.runtime.cuda_graph import CapturedStep
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_decoding.decode.selection.processors import LogitsProcessors
from medusa_decoding.decode.selection.sampling import Sampling
from medusa_decoding.decode.selection.typical import TypicalAcceptance


class Stream:
    """A stream that runs nothing: PyTorch keeps workspaces per stream, so the tests compare which one is current."""

    current = None

    def wait_stream(self, other):
        pass


class Graph:
    """A graph that records when it is open. Launches in between run at once, as the CPU has no capture."""

    open_now = None

    def capture_begin(self, **_):
        assert Graph.open_now is None
        Graph.open_now = self

    def capture_end(self):
        assert Graph.open_now is self
        Graph.open_now = None

    def replay(self):
        assert Graph.open_now is None


@contextlib.contextmanager
def current(stream):
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


@contextlib.contextmanager
def capture(graph, pool, stream, capture_error_mode):
    with current(stream):
        graph.capture_begin()
        yield
        graph.capture_end()


class Operations(TorchDispatchMode):
    """Records every operation with its shapes and stream, separately before a capture and within one."""

    def __init__(self):
        super().__init__()
        self.before, self.captured = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        shapes = tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else None for arg in args)
        (self.before if Graph.open_now is None else self.captured).add((str(function), shapes, Stream.current))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def fake_cuda(monkeypatch):
    for name, value in {
        "Stream": Stream, "CUDAGraph": Graph, "graph": capture, "stream": current,
        "current_stream": Stream, "graph_pool_handle": object, "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def penalised(prompt, sample=False):
    return LogitsProcessors([prompt], [[lp.RepetitionPenaltyLogitsProcessor(1.3)]], [20], [], sample)


SELECTORS = {
    "greedy": lambda prompt: Greedy(),
    "sampled": lambda prompt: Sampling([lp.TopKLogitsWarper(4), lp.TopPLogitsWarper(0.9)]),
    "sampled at a temperature": lambda prompt: Sampling([lp.TemperatureLogitsWarper(0.8)]),
    "typical": lambda prompt: TypicalAcceptance(),
    "processors": penalised,
    "processors, sampled": lambda prompt: penalised(prompt, sample=True),
}


@pytest.mark.parametrize("make", SELECTORS.values(), ids=SELECTORS)
def test_everything_captured_has_run_before_on_the_same_stream(fake_cuda, make):
    """A library's first call makes handles and workspaces and loads code, which must not happen in a capture."""
    model, [prompt] = tiny(), prompts(1, [7])
    tree = Tree.cartesian([3, 2])
    with MedusaModel(model, heads_for(model), tree) as medusa, torch.no_grad():
        eager = medusa._steps.get(tree, "eager")
        selector, limits = make(prompt), Limits([20], [0], [99])
        state = medusa._steps.pool.acquire(Sizes([7], 20), 60)
        prefill(medusa.backbone, [prompt], state, selector, limits)
        step = CapturedStep(eager, tree.num_nodes)
        assert not step.is_made(state, selector, limits)
        with Operations() as operations:
            assert step(state, selector, limits)
        assert step.is_made(state, selector, limits)
        assert not step.is_made(medusa._steps.pool.acquire(Sizes([7], 20), 60), selector, limits)
    lm_head = [name for name, shapes, _ in operations.captured if (32, 11) in shapes or (11, 32) in shapes]
    assert lm_head, "the projection to the vocabulary is captured"
    assert operations.captured - operations.before == set()
