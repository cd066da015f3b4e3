"""Projections from states to logits, and back: a plain matrix, or a module that is called.

Rounding: with 16-bit weights the operands of the three products (logits, gradient of the states, gradient of the
weights) are 16-bit, their sums fp32. The gradient of the logits is rounded to 16 bits before its products while it
still lies in [-1, 1]; weights and means are factors applied afterwards, in fp32, or on a GPU before the states are
rounded to bfloat16 for the gradient of the weights. A CPU has no such products, but with AMX those of logits. With
other instructions for bfloat16 the results of products are rounded to it, as those of autocast are; those of logits
only in steps, in measurements they are fp32 products. Without such instructions all are.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medusa_decoding.heads import MedusaHeads
from medusa_decoding.linears.reading import plain_weight
from medusa_decoding.provenance import cpu_name

SLABS = 8
"""The gradient of a weight is computed in this many parts of the vocabulary, to keep products small."""

_HALF = (torch.float16, torch.bfloat16)


class Projection(Protocol):
    """How a chunk's logits come from its states, and how their gradient goes back.

    A term that depends on more than the state is a projection around another one, as `Parents` is: `logits` adds the
    term (`head` and `rows` say for which positions), and its own weights take their gradient in `backward`.

    Attributes:
        size: V', the number of logits per position.
        width: the number that are computed for a moment, V of a module that is called for fewer tokens.
        parameters: the tensors that `gradients` returns the gradients of, in its order.
        dtype: what `backward` rounds the gradient of the last `logits` to.
    """

    size: int
    width: int
    parameters: tuple[Tensor, ...]
    dtype: torch.dtype

    def logits(self, head: int, rows: slice, states: Tensor, wants_gradient: bool) -> Tensor:
        """Return the logits of one head: states [C, H] -> fp32 [C, V'], which the caller overwrites."""

    def backward(self, head: int, rows: slice, gradient: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient of the states from that of the last `logits`: [C, V'] -> [C, H], times `scale`.

        `gradient` is fp32, or in `dtype`.

        Adds to the gradient of the parameters, at the latest in `end_head`. Until then it may keep `gradient`, which
        the caller must not change.
        """

    def end_head(self, head: int) -> None:
        """Note that all chunks of this head are done."""

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of `parameters`, in their dtypes."""


def lm_head_projection(
    lm_head: nn.Module | Tensor,
    hidden: Tensor,
    *,
    trains: bool,
    heads: MedusaHeads | None = None,
) -> Matrix | Called:
    """Return the projection by a model's lm_head (module or weight [V, H]), or by that of heads that share it.

    Its parameters get a gradient if it `trains`.
    """
    token_map = None if heads is None else heads.token_map
    weight = lm_head if isinstance(lm_head, Tensor) else plain_weight(lm_head)
    if weight is not None:
        return Matrix(weight if trains else weight.detach(), compute_type(hidden), token_map)
    assert isinstance(lm_head, nn.Module)
    size: Any = lm_head.out_features if heads is None else heads.num_candidates
    return Called(lm_head, size, token_map, trains)


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over values of a type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute_type(states: Tensor) -> torch.dtype:
    """Return the type of the products' operands: autocast's if it is on, else that of the states."""
    kind = states.device.type
    if torch.is_autocast_enabled(kind) and states.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return states.dtype


def _operand_types(dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return the types of the operands of logits, and of gradients, for products in `dtype`."""
    if device.type == "cuda" or dtype not in _HALF:
        return dtype, dtype
    return torch.float32, dtype if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported() else torch.float32


def _adds(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a product is added to a sum at once: on a GPU, from PyTorch 2.11 on; fp16 takes factors later."""
    return device.type == "cuda" and dtype != torch.float16 and torch.__version__ >= "2.11"


def _product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype in _HALF:
            return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a, b).float()
        if a.dtype == torch.float32 and a.device.type == "cpu" and _mkl_is_slow():
            return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
        return torch.mm(a, b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == total.dtype:
            total.addmm_(a, b)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _rounded_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply on a CPU, and let oneDNN round the operands to bfloat16 if that is faster: a setting of all threads."""
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        with torch.autocast("cpu", enabled=False):
            return torch.mm(a, b)
    finally:
        settings.fp32_precision = before


@functools.cache
def _amx() -> bool:
    """Whether oneDNN multiplies fp32 that is rounded to bfloat16 faster than fp32; with AVX-512 alone it does not."""
    return torch.cpu._is_amx_tile_supported()


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether oneDNN multiplies fp32 faster than MKL, which `torch.mm` calls: on AMD's CPUs with AVX-512."""
    backends, wide = torch.backends, torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and "AMD" in cpu_name() and backends.mkl.is_available() and backends.mkldnn.is_available()


class Matrix:
    """A projection by a plain matrix.

    Args:
        weight: [K, V', H], one matrix per head, or [V, H], one for all heads.
        dtype: of the products' operands.
        token_map: int64 [V'], with one matrix for all: its rows that are the vocabulary.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, token_map: Tensor | None = None) -> None:
        self.size = self.width = weight.shape[-2] if token_map is None else len(token_map)
        self.parameters: tuple[Tensor, ...] = (weight,)
        self._weight, self._dtype, self._map = weight.detach(), dtype, token_map
        self._types = _operand_types(dtype, weight.device)
        self.dtype = self._types[1]
        self._at_once = _adds(dtype, weight.device)
        self._trains, self._per_head = weight.requires_grad, weight.ndim == 3
        self._operands: tuple[int, dict[torch.dtype, Tensor]] = -1, {}
        self._gradient: Tensor | None = None
        self._sum: Tensor | None = None
        self._states = weight.new_empty(0)
        self._pending: list[tuple[Tensor, Tensor]] = []  # gradients of logits, states

    def _matrix(self, head: int, dtype: torch.dtype) -> Tensor:
        key = head if self._per_head else 0
        if self._operands[0] != key:
            self._operands = key, {}
        made = self._operands[1]
        if dtype not in made:
            weight = self._weight[head] if self._per_head else self._weight
            made[dtype] = (weight if self._map is None else weight.index_select(0, self._map)).to(dtype)
        return made[dtype]

    def logits(self, head: int, rows: slice, states: Tensor, wants_gradient: bool) -> Tensor:
        """Multiply by the matrix; see `Projection`."""
        kind, of_gradients = self._types
        rounded = states.to(of_gradients)
        self._states = states if self._at_once else rounded
        if kind == of_gradients or (wants_gradient and not _amx()):
            return _product(rounded, self._matrix(head, of_gradients).t())
        return _rounded_product(states.to(kind), self._matrix(head, kind).t())

    def backward(self, head: int, rows: slice, gradient: Tensor, scale: Tensor) -> Tensor:
        """Multiply by the matrix' transpose, and keep what the gradient of the matrix needs; see `Projection`."""
        gradient = gradient.to(self._types[1])
        if self._trains and self._at_once:
            scaled = torch.mul(self._states, scale, out=torch.empty_like(self._states, dtype=gradient.dtype))
            _add_product(self._total(head), gradient.t(), scaled)
        elif self._trains:
            # With slabs, half of [V', H] keeps the peak below that of one product [V', H] per chunk.
            room = gradient.shape[1] * self._states.shape[1] * sum_type(self._dtype).itemsize // 2
            self._pending.append((gradient, self._states))
            self._pending_scale = scale
            if sum(pending.nbytes for pending, _ in self._pending) + gradient.nbytes > room:
                self._add_pending(head)
        return _product(gradient, self._matrix(head, self._types[1])).mul_(scale)

    def _add_pending(self, head: int) -> None:
        """Add the matrix' gradient of the pending chunks, in one product per slab of the vocabulary.

        Reading and writing [V', H] in fp32 takes longer than one chunk's product, so several chunks share it.
        """
        if not self._pending:
            return
        gradients, states = zip(*self._pending, strict=True)
        self._pending = []
        total, all_states = self._total(head), _join(states)
        slab = 16 * -(-len(total) // (16 * SLABS))  # aligned for tensor cores
        for start in range(0, len(total), slab):
            part = slice(start, start + slab)
            gradient = _join([pending[:, part] for pending in gradients])
            total[part].addcmul_(_product(gradient.t(), all_states), self._pending_scale)

    def _total(self, head: int) -> Tensor:
        """Return the tensor that sums a head's gradient: the gradient itself if it has the type of sums."""
        kind = sum_type(self._dtype)
        if self._per_head and self._weight.dtype == kind:
            return self._whole_gradient()[head]
        if self._sum is None:
            self._sum = torch.zeros_like(self._matrix(head, self._types[1]), dtype=kind)
        return self._sum

    def _whole_gradient(self) -> Tensor:
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._weight)
        return self._gradient

    def end_head(self, head: int) -> None:
        """Add the pending chunks, and round the head's gradient to the weight's type; see `Projection`."""
        self._add_pending(head)
        if self._per_head and self._sum is not None:
            self._whole_gradient()[head] = self._sum
            self._sum.zero_()

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of the weight; see `Projection`."""
        if not self._trains:
            return [None]
        shared = None if self._per_head else self._sum
        self._sum, self._operands = None, (-1, {})
        if shared is None:
            return [self._whole_gradient()]
        shared = shared.to(self._weight.dtype)
        return [shared if self._map is None else self._whole_gradient().index_copy_(0, self._map, shared)]


def _join(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Called:
    """A projection by calling a module: LoRA around lm_head, quantised layers, layers with hooks.

    Args:
        module: maps [C, H] to [C, V].
        size: V', the size of the vocabulary.
        token_map: int64 [V'], the columns of its result that are the vocabulary, or None for all.
        trains: whether its parameters get a gradient (those that require one).
    """

    def __init__(self, module: nn.Module, size: int, token_map: Tensor | None = None, trains: bool = True) -> None:
        self.size, self.width = size, int(getattr(module, "out_features", size))
        self.parameters: tuple[Tensor, ...] = tuple(p for p in module.parameters() if p.requires_grad and trains)
        self._module, self._map = module, token_map
        # The first type that is not of packed integers: with LoRA, that of the base layer.
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        self._sums: list[Tensor] = []
        self._graph: tuple[Tensor, Tensor] | None = None

    def logits(self, head: int, rows: slice, states: Tensor, wants_gradient: bool) -> Tensor:
        """Call the module; see `Projection`."""
        if self._dtype is not None and not torch.is_autocast_enabled(states.device.type):
            states = states.to(self._dtype)
        with torch.set_grad_enabled(wants_gradient):
            states = states.detach().requires_grad_(wants_gradient)
            output = self._module(states)
            output = output if self._map is None else output.index_select(-1, self._map)
        if not wants_gradient:
            # PyTorch 2.10 and earlier would give the casts made here, which have no history, to a call with gradients.
            torch.clear_autocast_cache()
        self.dtype = output.dtype
        self._graph = (states, output) if wants_gradient else None
        return output.detach().to(sum_type(output.dtype), copy=True)

    def backward(self, head: int, rows: slice, gradient: Tensor, scale: Tensor) -> Tensor:
        """Take the gradient through the module by autograd; see `Projection`."""
        assert self._graph is not None
        (states, output), self._graph = self._graph, None
        inputs = (states, *self.parameters)
        found = torch.autograd.grad(output, inputs, gradient.to(output.dtype), allow_unused=True)
        if not self._sums:
            self._sums = [torch.zeros_like(p, dtype=sum_type(p.dtype)) for p in self.parameters]
        for total, part in zip(self._sums, found[1:], strict=True):
            if part is not None:
                total.addcmul_(part.to(total.dtype), scale.to(total.dtype))
        assert found[0] is not None
        return found[0].to(sum_type(found[0].dtype)) * scale

    def end_head(self, head: int) -> None:
        """Nothing to do; see `Projection`."""

    def gradients(self) -> list[Tensor | None]:
        """Return the parameters' gradients; see `Projection`."""
        sums = self._sums or [torch.zeros_like(p) for p in self.parameters]
        return [total.to(p.dtype) for total, p in zip(sums, self.parameters, strict=True)]


class Parents:
    """Another projection's logits plus the parents' term, A[parent] M_k C[candidate].

    For heads with a `parent_rank`; decoding adds the same score to log-probabilities (`MedusaHeads.propose_children`).
    Like there, the term is computed in the type of the logits; its low rank makes that cheap.

    Args:
        inner: the projection of the states.
        heads: with a parent_rank.
        parents: int64 [K, R], the parent of each head's target in each row.
    """

    def __init__(self, inner: Projection, heads: MedusaHeads, parents: Tensor) -> None:
        self._inner, self._parents, self._own = inner, heads.parent_rows(parents), heads.parent_term
        self.size, self.width = inner.size, inner.width
        self.parameters: tuple[Tensor, ...] = (*inner.parameters, *self._own)
        self._wide: list[Tensor] = []
        self._sums: list[Tensor] = []

    def logits(self, head: int, rows: slice, states: Tensor, wants_gradient: bool) -> Tensor:
        """Add the term; see `Projection`."""
        logits = self._inner.logits(head, rows, states, wants_gradient)
        self.dtype = logits.dtype
        if not self._wide:
            self._wide = [tensor.detach().to(logits.dtype) for tensor in self._own]
        tokens, mix, candidates = self._wide
        with torch.autocast(logits.device.type, enabled=False):
            return logits.addmm_(tokens[self._parents[head, rows]] @ mix[head], candidates.t())

    def backward(self, head: int, rows: slice, gradient: Tensor, scale: Tensor) -> Tensor:
        """Add to the gradients of A, M and C, then ask the inner projection; see `Projection`."""
        if not self._sums:
            self._sums = [torch.zeros_like(tensor) for tensor in self._wide]
        tokens, mix, candidates = self._wide
        of_tokens, of_mix, of_candidates = self._sums
        chosen = self._parents[head, rows]
        with torch.autocast(gradient.device.type, enabled=False):
            parents, factor = tokens[chosen], scale.to(gradient.dtype)
            of_candidates.addmm_(gradient.t(), (parents @ mix[head]).mul_(factor))
            of_mixed = (gradient @ candidates).mul_(factor)
            of_mix[head] += parents.t() @ of_mixed
            of_tokens.index_add_(0, chosen, of_mixed @ mix[head].t())
        return self._inner.backward(head, rows, gradient, scale)

    def end_head(self, head: int) -> None:
        """Tell the inner projection; see `Projection`."""
        self._inner.end_head(head)

    def gradients(self) -> list[Tensor | None]:
        """Return the inner projection's gradients, then those of A, M and C; see `Projection`."""
        sums = self._sums or [torch.zeros_like(tensor) for tensor in self._own]
        own = [
            total.to(tensor.dtype) if tensor.requires_grad else None
            for total, tensor in zip(sums, self._own, strict=True)
        ]
        return [*self._inner.gradients(), *own]
