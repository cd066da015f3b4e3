"""The step after verification: accept a path, and update everything that a row carries to its next step.

It does not know how the model chose its tokens, nor caches: it returns which of their rows `kv_compact` keeps.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from medusa_kernels import _checks, _cpu, reference
from medusa_kernels._registry import register, triton_or


def tree_accept(
    tokens: Tensor,
    next_tokens: Tensor,
    hidden: Tensor,
    depths: Tensor,
    paths: Tensor,
    eos: Tensor,
    max_new: Tensor,
    step: Tensor,
    *,
    lengths: Tensor,
    root: Tensor,
    state_hidden: Tensor,
    output: Tensor,
    count: Tensor,
    finished: Tensor,
    log: Tensor,
    check: Tensor | None = None,
    report: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the longest path that the model agrees with (the paper's section 2.3.1, greedy), and commit it.

    A node is right if its token is the model's next token at its parent; the root always is. The accepted path is the
    longest path of right nodes, of equal ones that with the lowest last node. The step emits the model's next tokens at
    its nodes, cut after the first EOS token and at the budget; either ends the row. A row that had ended before the
    step emits nothing.

    Args:
        tokens: int64 `[B, N]`, the token of each node.
        next_tokens: int64 `[B, N]`, the model's next token at each node.
        hidden: `[B, N, H]`, of any dtype.
        depths: int32 `[N]`, or `[B, N]` if each row has its own tree; 0 for the root.
        paths: int64 `[N, P]` or `[B, N, P]`, the nodes from the root to each node, padded with the last; P is at least
            the greatest depth + 1.
        eos: int64 `[E]`, tokens that end a row.
        max_new: int32 `[B]`, tokens that a row may emit.
        step: int64 `[1]`, the column of `log` that the step writes.
        lengths: int32 `[B]`, cached rows. Mutated: grows by the nodes of the accepted path, in rows that had not ended.
        root: int64 `[B]`. Mutated: the model's next token at the last accepted node.
        state_hidden: `[B, H]`, dtype of hidden. Mutated: the hidden state of the last accepted node.
        output: int64 `[B, W]`. Mutated: emitted tokens are written from column `count` on; nothing else changes.
        count: int32 `[B]`. Mutated: grows by the tokens emitted.
        finished: bool `[B]`. Mutated: set in rows that end.
        log: int32 `[B, W2]`. Mutated: column `step` gets the tokens emitted.
        check: fp32 `[B]`, any numbers; only with `report`.
        report: int32 `[B, R]`, R at least 3 + P: what a host needs to know of the step, in one piece. Mutated: each row
            gets `count`, `finished`, the bits of `check` and the next tokens at the P nodes of the path, of which the
            first ones are those emitted. Tokens are below 2^31. None: no report.

    Returns:
        What `kv_compact` takes: the path int32 `[B, P]`, padded with its last node; int32 `[B]`, the accepted nodes
        below the root, -1 in a row that had ended before; int32 `[B]`, lengths as they were.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or strides.
        IndexError: on a CPU, an index is outside its tensor; on a GPU values are not checked.
    """
    _checks.axes("tokens", tokens, "B", "N")
    _checks.axes("hidden", hidden, "B", "N", "H")
    _checks.axes("paths", paths, *(("N", "P") if paths.dim() == 2 else ("B", "N", "P")))
    _checks.require(tokens.shape[1] >= 1, "tokens", "at least 1 node", tokens.shape[1])
    _checks.require(paths.shape[-1] >= 1, "paths", "at least 1 step", paths.shape[-1])
    (batch, nodes), size, places = tokens.shape, hidden.shape[2], paths.shape[-1]
    expected: dict[str, tuple[Tensor, tuple[int | str, ...], torch.dtype]] = {
        "tokens": (tokens, (batch, nodes), torch.int64),
        "next_tokens": (next_tokens, (batch, nodes), torch.int64),
        "hidden": (hidden, (batch, nodes, size), hidden.dtype),
        "depths": (depths, (nodes,) if depths.dim() == 1 else (batch, nodes), torch.int32),
        "paths": (paths, (nodes, places) if paths.dim() == 2 else (batch, nodes, places), torch.int64),
        "eos": (eos, ("E",), torch.int64),
        "max_new": (max_new, (batch,), torch.int32),
        "step": (step, (1,), torch.int64),
    }
    mutated: dict[str, tuple[Tensor, tuple[int | str, ...], torch.dtype]] = {
        "lengths": (lengths, (batch,), torch.int32),
        "root": (root, (batch,), torch.int64),
        "state_hidden": (state_hidden, (batch, size), hidden.dtype),
        "output": (output, (batch, "W"), torch.int64),
        "count": (count, (batch,), torch.int32),
        "finished": (finished, (batch,), torch.bool),
        "log": (log, (batch, "W2"), torch.int32),
    }
    _checks.require((check is None) == (report is None), "report", "given together with check, or neither", report)
    if check is not None and report is not None:
        mutated["report"] = report, (batch, "R"), torch.int32
        expected["check"] = check, (batch,), torch.float32
    for name, (tensor, shape, dtype) in (expected | mutated).items():
        _checks.typed(name, tensor, shape, dtype, "tokens", tokens)
    for name, (tensor, _, _) in mutated.items():
        _checks.contiguous(name, tensor)
    if report is not None:
        _checks.require(report.shape[1] >= 3 + places, "report", f"at least {3 + places} columns", report.shape[1])
    return torch.ops.medusa_kernels.tree_accept.default(
        tokens, next_tokens, hidden, depths, paths, eos, max_new, step,
        lengths=lengths, root=root, state_hidden=state_hidden, output=output, count=count, finished=finished, log=log,
        check=check, report=report,
    )  # fmt: skip


def _native(
    tokens, next_tokens, hidden, depths, paths, eos, max_new, step,
    *, lengths, root, state_hidden, output, count, finished, log, check=None, report=None,
):  # fmt: skip
    """Run the op by the C++ library, on a CPU."""
    (batch, nodes), places = tokens.shape, paths.shape[-1]
    path, accept_lens, old_lengths = (depths.new_empty(batch, *size) for size in ((places,), (), ()))
    # Held until the call has returned.
    read = [tensor.contiguous() for tensor in (tokens, next_tokens, hidden, depths, paths, eos, max_new, step)]
    tokens, next_tokens, hidden, depths, paths, eos, max_new, step = read
    check = None if check is None else check.contiguous()
    try:
        _cpu.call(
            "tree_accept",
            batch, nodes, places, len(eos), hidden.shape[2] * hidden.element_size(), output.shape[1], log.shape[1],
            tokens, next_tokens, hidden,
            depths, 0 if depths.dim() == 1 else nodes, paths, 0 if paths.dim() == 2 else nodes * places,
            eos, max_new, step,
            lengths, root, state_hidden, output, count, finished, log, path, accept_lens, old_lengths,
            check, report, 0 if report is None else report.shape[1],
        )  # fmt: skip
    except _cpu.OutsideError as error:
        raise IndexError(str(error)) from None
    return path, accept_lens, old_lengths


_or_reference = triton_or("tree_accept", "reference", reference.tree_accept, "PyTorch, operation by operation")
register(
    tree_accept,
    lambda a: tuple(a.depths.new_empty(a.tokens.shape[0], *size) for size in ((a.paths.shape[-1],), (), ())),
    mutates=["lengths", "root", "state_hidden", "output", "count", "finished", "log", "report"],
    cpu=_cpu.native_or("tree_accept", _native, _or_reference),
    cuda=_or_reference,
)
