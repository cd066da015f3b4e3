"""tree_accept against a walk over one row at a time, in lists and loops."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import DTYPES
from torch import Tensor

from benchmarks.inspection import TARGETS
from medusa_kernels import tree_accept
from medusa_kernels._registry import interpreted

Case = dict[str, Any]
MUTATED = ("lengths", "root", "state_hidden", "output", "count", "finished", "log", "report")
RETURNED = ("path", "kept", "old_lengths")
NARROW = ("depths", "max_new", "lengths", "count", "log", "report")
"""What is int32; other integers are int64."""


def lineage(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to a node."""
    nodes = [node]
    while parents[nodes[0]] >= 0:
        nodes.insert(0, parents[nodes[0]])
    return nodes


def make(
    parents: list[int],
    tokens: list[list[int]],
    next_tokens: list[list[int]],
    *,
    eos: list[int] | None = None,
    max_new: list[int] | None = None,
    count: list[int] | None = None,
    finished: list[bool] | None = None,
    step: int = 1,
    size: int = 5,
) -> Case:
    """A case in lists. Defaults: no EOS, a budget of 40, 3 tokens emitted, no row has ended."""
    batch, nodes = len(tokens), len(parents)
    lineages = [lineage(parents, node) for node in range(nodes)]
    length = max(len(nodes) for nodes in lineages)
    numbers = iter(range(10**9))
    return {
        "tokens": tokens,
        "next_tokens": next_tokens,
        "hidden": [[[float(next(numbers) % 251) for _ in range(size)] for _ in range(nodes)] for _ in range(batch)],
        "depths": [len(nodes) - 1 for nodes in lineages],
        "paths": [nodes + nodes[-1:] * (length - len(nodes)) for nodes in lineages],
        "eos": eos or [],
        "max_new": max_new or [40] * batch,
        "step": [step],
        "lengths": [10 + 7 * b for b in range(batch)],
        "root": [-1] * batch,
        "state_hidden": [[-1.0] * size for _ in range(batch)],
        "output": [[-2 - column for column in range(50)] for _ in range(batch)],
        "count": count or [3] * batch,
        "finished": finished or [False] * batch,
        "log": [[-3] * 4 for _ in range(batch)],
        "check": [(1.5, float("inf"), float("nan"))[b % 3] for b in range(batch)],
        "report": [[-4] * (3 + nodes + 2) for _ in range(batch)],
    }


def on(case: Case, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    def tensor(name: str, value: Any) -> Tensor:
        kind = {"finished": torch.bool, "hidden": dtype, "state_hidden": dtype, "check": torch.float32}.get(name)
        return torch.tensor(value, dtype=kind or (torch.int32 if name in NARROW else torch.int64)).to(device)

    return {name: tensor(name, value) for name, value in case.items()}


def walked(case: Case, parents: list[int]) -> Case:
    """The results and the updated state that are expected of the op, row by row."""
    after: Case = {name: [list(v) if isinstance(v, list) else v for v in case[name]] for name in MUTATED}
    after |= {name: [] for name in RETURNED}
    for b, (tokens, wanted) in enumerate(zip(case["tokens"], case["next_tokens"], strict=True)):
        best = [0]
        for node in range(len(parents)):
            nodes = lineage(parents, node)
            if len(nodes) > len(best) and all(tokens[n] == wanted[parents[n]] for n in nodes[1:]):
                best = nodes
        ended = case["finished"][b]
        after["path"].append(best + best[-1:] * (len(case["paths"][0]) - len(best)))
        after["kept"].append(-1 if ended else len(best) - 1)
        after["old_lengths"].append(case["lengths"][b])
        after["lengths"][b] += 0 if ended else len(best)
        after["root"][b] = wanted[best[-1]]
        after["state_hidden"][b] = case["hidden"][b][best[-1]]
        emitted = 0
        for node in best:
            if after["finished"][b]:
                break
            after["output"][b][after["count"][b]] = wanted[node]
            after["count"][b] += 1
            emitted += 1
            after["finished"][b] = wanted[node] in case["eos"] or after["count"][b] == case["max_new"][b]
        after["log"][b][case["step"][0]] = emitted
        told = [after["count"][b], int(after["finished"][b]), *struct.unpack("i", struct.pack("f", case["check"][b]))]
        told += [wanted[node] for node in after["path"][b]]
        after["report"][b][: len(told)] = told
    return after


def run(tensors: dict[str, Tensor], function: Any = tree_accept) -> dict[str, Tensor]:
    given_tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    returned = function(**given_tensors)
    for name, tensor in tensors.items():
        if name not in MUTATED:
            torch.testing.assert_close(given_tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
    return {name: given_tensors[name] for name in MUTATED if name in tensors} | dict(
        zip(RETURNED, returned, strict=True)
    )


def check(case: Case, parents: list[int], device: str, dtype: torch.dtype = torch.float32) -> None:
    wanted = walked(case, parents)
    got = run(on(case, device, dtype))
    for name, tensor in got.items():
        assert tensor.tolist() == wanted[name], name
    assert all(got[name].dtype == torch.int32 and got[name].is_contiguous() for name in RETURNED)


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of up to 40 nodes, each after its parent."""
    nodes = draw(st.integers(1, 40))
    far = draw(st.sampled_from([1, 3, 40]))
    return [-1, *(draw(st.integers(max(0, node - far), node - 1)) for node in range(1, nodes))]


@given(data=st.data())
@settings(max_examples=25 if interpreted() else 100)
def test_matches_a_walk(device: str, data: st.DataObject) -> None:
    """Few token ids, so that many nodes are right, siblings may be the same token, and EOS tokens occur."""
    parents = data.draw(trees(), label="parents")
    batch, nodes = data.draw(st.integers(1, 4), label="batch"), len(parents)
    ids = st.integers(0, data.draw(st.sampled_from([0, 1, 3]), label="largest id"))
    rows = st.lists(st.lists(ids, min_size=nodes, max_size=nodes), min_size=batch, max_size=batch)
    counts = data.draw(st.lists(st.integers(1, 8), min_size=batch, max_size=batch), label="count")
    left = data.draw(st.lists(st.integers(1, 38), min_size=batch, max_size=batch), label="left")
    case = make(
        parents,
        data.draw(rows, label="tokens"),
        data.draw(rows, label="next_tokens"),
        eos=data.draw(st.lists(st.integers(1, 50), max_size=33), label="eos"),
        max_new=[c + room for c, room in zip(counts, left, strict=True)],
        count=counts,
        finished=data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch), label="finished"),
        step=data.draw(st.integers(0, 3), label="step"),
        size=data.draw(st.sampled_from([1, 5, 33]), label="size"),
    )
    check(case, parents, device)


TREE = [-1, 0, 0, 1, 1, 2, 5]


@pytest.mark.parametrize(
    ("eos", "room", "emitted", "ended"),
    [
        ([], 4, 4, True),
        ([], 2, 2, True),
        ([60], 9, 4, True),
        ([7, 40, 60], 9, 2, True),
        ([40], 1, 1, True),
        ([30], 9, 1, True),
        ([99], 9, 4, False),
        ([*range(100, 132), 50], 9, 3, True),
    ],
)
def test_a_row_ends_at_eos_or_its_budget(device: str, eos: list[int], room: int, emitted: int, ended: bool) -> None:
    """The step emits 30, 40, 50, 60. A token of a node not accepted (9), or padding, never ends it."""
    case = make(TREE, [[1, 20, 30, 0, 0, 40, 50]], [[30, 9, 40, 9, 9, 50, 60]], eos=eos, max_new=[3 + room])
    got = run(on(case, device))
    assert got["output"][0, 3 : 3 + emitted].tolist() == [30, 40, 50, 60][:emitted]
    assert got["output"][0, 3 + emitted :].tolist() == case["output"][0][3 + emitted :]
    assert got["log"][0, 1].item() == emitted
    assert got["finished"].item() is ended
    # The cache keeps the whole path, however much of it is emitted.
    assert got["lengths"].item() == 14


def test_ties_go_to_the_earliest_node(device: str) -> None:
    """Siblings with one token, and two paths of one length; a longer path still beats an earlier one."""
    parents = [-1, 0, 0, 0, 1, 2, 3, 5]
    short = make(parents, [[1, 5, 5, 5, 6, 6, 6, 9]], [[5, 6, 6, 6, 0, 0, 0, 0]])
    assert run(on(short, device))["path"].tolist() == [[0, 1, 4, 4]]
    long = make(parents, [[1, 5, 5, 5, 6, 6, 6, 0]], [[5, 6, 6, 6, 0, 0, 0, 0]])
    assert run(on(long, device))["path"].tolist() == [[0, 2, 5, 7]]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 5000])
def test_hidden_states_are_copied_completely(device: str, size: int, dtype: torch.dtype) -> None:
    case = make([-1, 0], [[1, 5], [1, 5], [1, 5]], [[5, 0], [4, 0], [5, 1]], size=size)
    check(case, [-1, 0], device, dtype)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("right", [0, 100, 255])
def test_a_chain_of_256_nodes(device: str, right: int) -> None:
    """A path as long as the tree; the token after `right` nodes is wrong."""
    parents = list(range(-1, 255))
    tokens = [[*range(1000, 1256)], [*range(1000, 1256)]]
    wanted = [[*range(1001, 1257)] for _ in tokens]
    wanted[0][right] = 7
    case = make(parents, tokens, wanted, eos=[1040], max_new=[300, 20], step=0)
    case["output"] = [[-2 - column for column in range(310)] for _ in tokens]
    check(case, parents, device)


def test_plain_decoding_and_many_rows(device: str) -> None:
    """The tree is only a root, whose token is not read: it may be the same memory that the op writes."""
    batch = 67 if not interpreted() else 9
    case = make([-1], [[-1]] * batch, [[b] for b in range(batch)], eos=[3], finished=[b % 4 == 0 for b in range(batch)])
    tensors = on(case, device)
    tensors["tokens"] = tensors["root"][:, None]
    returned = tree_accept(**tensors)
    wanted = walked(case, [-1])
    for name, tensor in [*zip(RETURNED, returned, strict=True), *((name, tensors[name]) for name in MUTATED)]:
        assert tensor.tolist() == wanted[name], name


def per_row(cases: list[Case]) -> Case:
    """One case whose rows have trees of their own, of one size."""
    length = max(len(case["paths"][0]) for case in cases)
    whole = {name: [row for case in cases for row in case[name]] for name in cases[0]}
    whole["depths"] = [case["depths"] for case in cases]
    whole["paths"] = [[path + path[-1:] * (length - len(path)) for path in case["paths"]] for case in cases]
    return whole | {name: cases[0][name] for name in ("eos", "step")}


@given(data=st.data())
@settings(max_examples=15 if interpreted() else 60)
def test_rows_with_trees_of_their_own(device: str, data: st.DataObject) -> None:
    nodes, batch = data.draw(st.integers(1, 20), label="nodes"), data.draw(st.integers(1, 4), label="batch")
    parents = [[-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(batch)]
    ids = st.lists(st.integers(0, 1), min_size=nodes, max_size=nodes)
    cases = [make(own, [data.draw(ids)], [data.draw(ids)], eos=[7], size=3) for own in parents]
    got = run(on(per_row(cases), device))
    length = got["path"].shape[1]
    for row, (case, own) in enumerate(zip(cases, parents, strict=True)):
        wanted = walked(case, own)
        (path,), (report,) = wanted["path"], wanted["report"]
        more = length - len(path)
        wanted["path"] = [path + path[-1:] * more]
        wanted["report"] = [
            report[: 3 + len(path)] + report[2 + len(path) : 3 + len(path)] * more + [-4] * (nodes + 2 - length)
        ]
        for name, tensor in got.items():
            assert tensor[row].tolist() == wanted[name][0], name


def tree_case(device: str) -> dict[str, Tensor]:
    tokens = [[1, 20, 30, 0, 0, 40, 50], [1, 20, 30, 40, 50, 60, 70]]
    wanted = [[30, 9, 40, 9, 9, 50, 60], [80, 40, 60, 9, 9, 70, 9]]
    return on(make(TREE, tokens, wanted, eos=[50]), device)


def test_views_and_empty_inputs(device: str) -> None:
    tensors = tree_case(device)
    wanted = run(tensors)
    spread = {**tensors, "hidden": tensors["hidden"].mT.contiguous().mT, "paths": tensors["paths"].T.contiguous().T}
    spread["tokens"] = torch.stack([tensors["tokens"], tensors["tokens"] + 1], -1)[..., 0]
    for name, tensor in run(spread).items():
        assert torch.equal(tensor, wanted[name])
    shared = ("depths", "paths", "eos", "step")
    silent = run({name: tensor for name, tensor in tensors.items() if name not in ("check", "report")})
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in silent.items())
    none = run({name: tensor if name in shared else tensor[:0] for name, tensor in tensors.items()})
    assert none["path"].shape == (0, 4)


@pytest.mark.skipif(interpreted(), reason="nothing is compiled in Triton's interpreter")
def test_all_threads_of_a_program_read_before_any_writes() -> None:
    """A row's numbers are read by all threads and replaced by one: a barrier is in between, for every tile."""
    inspection = pytest.importorskip("benchmarks.inspection")
    forms = pytest.importorskip("benchmarks.kernel_forms")
    spec = next(iter(forms.forms("tree_accept", TARGETS["90"])))
    kernel = inspection.compiled(spec, "90")
    barrier = re.search(r"bar\.sync|barrier\.sync", kernel.asm["ptx"])
    assert barrier
    before, after = kernel.asm["ptx"][: barrier.start()], kernel.asm["ptx"][barrier.end() :]
    assert len(re.findall(r"\bld\.global", before)) == 5
    assert "st.global" not in before
    assert "st.global" in after


GOOD = tree_case("cpu")
BAD = {
    "tokens-dtype": ({"tokens": torch.zeros(2, 7)}, "tokens: expected dtype int64"),
    "no-nodes": ({"tokens": torch.zeros(2, 0).long()}, "tokens: expected at least 1 node"),
    "next_tokens": ({"next_tokens": torch.zeros(2, 6).long()}, r"next_tokens: expected shape \[2, 7\], got \[2, 6\]"),
    "hidden": ({"hidden": torch.zeros(2, 6, 5)}, r"hidden: expected shape \[2, 7, 5\]"),
    "own-depths": ({"depths": torch.zeros(3, 7).int()}, r"depths: expected shape \[2, 7\], got \[3, 7\]"),
    "own-paths": ({"paths": torch.zeros(2, 6, 4).long()}, r"paths: expected shape \[2, 7, 4\]"),
    "max_new": ({"max_new": torch.zeros(3).int()}, r"max_new: expected shape \[2\]"),
    "root": ({"root": torch.zeros(2).int()}, "root: expected dtype int64"),
    "finished": ({"finished": torch.zeros(2)}, "finished: expected dtype bool"),
    "strides": ({"count": torch.zeros(4).int()[::2]}, "count: expected a contiguous tensor"),
    "check-alone": ({"report": None}, "report: expected given together with check, or neither, got None"),
    "report-columns": ({"report": torch.zeros(2, 6).int()}, "report: expected at least 7 columns, got 6"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_accept(**(GOOD | change))


def test_passes_opcheck(device: str) -> None:
    tensors = tree_case(device)
    positional = [tensor for name, tensor in tensors.items() if name not in MUTATED and name != "check"]
    named = {name: tensors[name] for name in (*MUTATED, "check")}
    torch.library.opcheck(torch.ops.medusa_kernels.tree_accept.default, tuple(positional), named)
