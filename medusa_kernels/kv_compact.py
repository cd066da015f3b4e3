"""Moves the accepted rows of the KV cache to the end of the prefix, in place, in every layer at once.

The native libraries of `csrc/` move the rows; this file checks arguments, calls the libraries and words their errors.
It knows only the shape of a cache and the size of its elements, not how a path was chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medusa_kernels import _checks, _native, reference
from medusa_kernels._registry import Implementation, register


def kv_compact(
    kv: Tensor, cache_lens: Tensor, path: Tensor, accept_lens: Tensor, *, slots: Tensor | None = None
) -> None:
    """Move row `cache_lens[b] + path[b, i]` to row `cache_lens[b] + i` for `i < accept_lens[b] + 1`, in every layer.

    The accepted path of a step (root included, hence the + 1) is scattered over the tree's rows; afterwards it is the
    end of the prefix. The result is as if all rows were read before any is written, although the rows overlap.

    Args:
        kv: the cache `[L, 2, B, Hkv, S, D]` of any dtype, contiguous, or neighbouring sequences of a contiguous one,
            such as `cache[:, :, 2:5]`. With `slots`, of any number of sequences. Mutated.
        cache_lens: int32 `[B]`, rows before the tree's rows; not changed.
        path: int32 `[B, P]`, node indices of the accepted path, strictly ascending from 0 or more. Entries beyond the
            accepted ones are not used.
        accept_lens: int32 `[B]`, accepted nodes below the root, -1 to P - 1. -1 moves nothing in that row.
        slots: int32 `[B]`, which sequence of the cache belongs to each batch row, each at most once. None: sequence b
            to row b.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or strides, or (on the CPU; on a GPU values are not
            read) a row or slot would be outside the cache or a path does not ascend. Nothing has been moved then.
    """
    _checks.shape("kv", kv, ("L", 2, "B", "Hkv", "S", "D"))
    _checks.cache_slots("kv", kv)
    _checks.axes("cache_lens", cache_lens, "B")
    batch = kv.shape[2] if slots is None else cache_lens.shape[0]
    _checks.slots_axis("kv", kv, batch, slots)
    _checks.typed("cache_lens", cache_lens, (batch,), torch.int32, "kv", kv)
    _checks.typed("path", path, (batch, "P"), torch.int32, "kv", kv)
    _checks.require(path.shape[1] >= 1, "path", "at least 1 step", path.shape[1])
    _checks.typed("accept_lens", accept_lens, (batch,), torch.int32, "kv", kv)
    torch.ops.medusa_kernels.kv_compact.default(kv, cache_lens, path, accept_lens, slots=slots)


def _check_values(kv: Tensor, cache_lens: Tensor, path: Tensor, accept_lens: Tensor, slots: Tensor | None) -> None:
    """Raise the error for the first bad value of tensors on the host."""
    _checks.slots_fit(slots, kv.shape[2])
    rows, steps = kv.shape[4], path.shape[1]
    values = zip(cache_lens.tolist(), path.tolist(), accept_lens.tolist(), strict=True)
    for b, (length, nodes, accepted) in enumerate(values):
        of_row = f"in batch row {b}"
        _checks.require(-1 <= accepted < steps, "accept_lens", f"-1 to {steps - 1} (P - 1)", f"{accepted} {of_row}")
        used = nodes[: accepted + 1]
        ascends = all(before < node for before, node in zip([-1, *used], used, strict=False))
        _checks.require(ascends, "path", "strictly ascending node indices from 0", f"{nodes} {of_row}")
        last = max(used, default=0)
        inside = not used or (length >= 0 and length + last < rows)
        expected = f"cache_lens + path within the {rows} cache rows"
        _checks.require(inside, "cache_lens", expected, f"{length} + {last} {of_row}")


def _reference_on_host(
    kv: Tensor, cache_lens: Tensor, path: Tensor, accept_lens: Tensor, *, slots: Tensor | None = None
) -> None:
    _check_values(kv, cache_lens, path, accept_lens, slots)
    reference.kv_compact(kv, cache_lens, path, accept_lens, slots=slots)


def _call(
    function: Callable[..., int], kv: Tensor, *indices: Tensor, slots: Tensor | None, stream: tuple[int, ...] = ()
) -> int:
    """Call a C function, return its status."""
    layers, two, sequences, kv_heads, rows, head_dim = kv.shape
    # Named, so that a copy made here lives until the call has returned.
    lens, path, accepted = (tensor.contiguous() for tensor in indices)
    own = None if slots is None else slots.contiguous()
    stored = _checks.cache_slots("kv", kv)
    sizes = layers * two, stored, sequences, len(lens), kv_heads, rows, head_dim * kv.element_size()
    pointers = (
        lens.data_ptr(),
        path.data_ptr(),
        path.shape[1],
        accepted.data_ptr(),
        0 if own is None else own.data_ptr(),
    )
    return function(kv.data_ptr(), *sizes, *pointers, *stream)


def _choose_cpu(device: torch.device) -> Implementation:
    library = _native.cpu_library()
    if library is None:
        return Implementation("reference", _reference_on_host, _native.why_missing("cpu"))

    def move(kv: Tensor, cache_lens: Tensor, path: Tensor, accept_lens: Tensor, *, slots: Tensor | None = None) -> None:
        status = _call(library.medusa_kv_compact_cpu, kv, cache_lens, path, accept_lens, slots=slots)
        if status:
            _check_values(kv, cache_lens, path, accept_lens, slots)
            raise RuntimeError(f"medusa_kv_compact_cpu refused valid arguments with status {status}")

    return Implementation("cpp", move, "C++ library of csrc/")


def _choose_cuda(device: torch.device) -> Implementation:
    library = _native.cuda_library()
    if library is None:
        return Implementation("reference", reference.kv_compact, _native.why_missing("cuda"))

    def move(kv: Tensor, cache_lens: Tensor, path: Tensor, accept_lens: Tensor, *, slots: Tensor | None = None) -> None:
        with torch.cuda.device(kv.device):
            stream = torch.cuda.current_stream(kv.device).cuda_stream
            arguments = kv, cache_lens, path, accept_lens
            status = _call(library.medusa_kv_compact_cuda, *arguments, slots=slots, stream=(stream,))
        if status:
            what = library.medusa_cuda_error_string(status).decode()
            raise RuntimeError(f"medusa_kv_compact_cuda failed with CUDA error {status}: {what}")

    return Implementation("cuda", move, "CUDA library of csrc/")


register(kv_compact, lambda a: None, cpu=_choose_cpu, cuda=_choose_cuda, mutates=["kv"])
