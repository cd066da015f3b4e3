"""A loss over a vocabulary, and its gradient, a chunk of positions at a time, without the logits of all positions.

The gradient of a chunk's logits is known as soon as the logits are, so it is taken to the states and to the weights in
the forward pass. Backward only scales what is already there. For the weights, the gradients of several chunks' logits
are kept and multiplied at once: at most half the memory of one head's gradient [V', H]. Three parts
meet here: a `Projection` (states to logits, and back), a criterion (logits to loss and its gradient), and the autograd
function that walks over heads and chunks. This module does not know what a target is, nor how losses are weighted.

Rounding: with 16-bit weights the operands of the three products (logits, gradient to the states, gradient to the
weights) are 16-bit, their sums fp32; the softmax, the loss and the sum over chunks are fp32 (fp64 for fp64 inputs). The
gradient of the logits is rounded to 16 bits before its products while it still lies in [-1, 1]; weights and means are
factors applied afterwards, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medusa_decoding.training.data.targets import IGNORE

CHUNK_ELEMENTS = 2**25
"""Logits of a chunk where the caller names no chunk: 128 MiB of fp32."""
SLABS = 8
"""Parts of a vocabulary of which the gradient of a weight is computed one by one, so that their products stay small."""

_HALF = (torch.float16, torch.bfloat16)


class Projection(Protocol):
    """How a chunk's logits come from its states, and how their gradient goes back.

    What depends on more than the state is a projection around another. A score of a node's parent token and a
    candidate, for example, is added in `logits` (`head` and `rows` say which parents are asked for), and its own
    weights take their gradient from what `backward` receives.

    Attributes:
        parameters: the tensors that `gradients` answers for, in its order.
    """

    parameters: tuple[Tensor, ...]

    def logits(self, head: int, rows: slice, states: Tensor, wants_gradient: bool) -> Tensor:
        """Return the logits of one head: states [C, H] -> fp32 [C, V'], which the caller overwrites."""

    def backward(self, head: int, rows: slice, gradient: Tensor, scale: Tensor) -> Tensor:
        """Take the gradient of the last `logits` further: fp32 [C, V'] -> [C, H] for the states, both times `scale`.

        Adds to the gradient of the parameters, at the latest in `end_head`. Until then it may keep `gradient`, which
        the caller must not change.
        """

    def end_head(self, head: int) -> None:
        """Note that no more chunks of this head will come."""

    def gradients(self) -> list[Tensor | None]:
        """Hand over the gradients of `parameters`, in their dtypes."""


class Criterion(Protocol):
    """What a chunk's logits are measured by."""

    def __call__(self, head: int, rows: slice, logits: Tensor, wants_gradient: bool) -> Tensor:
        """Return the summed loss of a chunk and, where wanted, overwrite the logits with its gradient in them."""


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums over values of a type are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute_type(states: Tensor) -> torch.dtype:
    """Return the type of the products' operands: autocast's where it is on, else that of the states."""
    kind = states.device.type
    if torch.is_autocast_enabled(kind) and states.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return states.dtype


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Only CUDA multiplies 16-bit matrices into fp32; elsewhere the rounded values are widened first.
    rounded = tensor.to(dtype)
    return rounded if dtype not in _HALF or rounded.is_cuda else rounded.float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b, out_dtype=torch.float32) if a.dtype in _HALF else torch.mm(a, b)


class Matrix:
    """A projection by a plain matrix.

    Args:
        weight: [K, V', H], a matrix a head, or [V, H], one for all.
        dtype: of the products' operands.
        token_map: int64 [V'], with a matrix for all: the rows of it that are the vocabulary.
        scale: fp32 [K, V'], the factor of each row of a weight in 8 bits, which takes no gradient.
    """

    def __init__(
        self, weight: Tensor, dtype: torch.dtype, token_map: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        self.parameters: tuple[Tensor, ...] = (weight,)
        self._weight, self._dtype, self._map, self._scale = weight.detach(), dtype, token_map, scale
        self._trains = weight.requires_grad
        self._operands: tuple[int, Tensor] | None = None
        self._gradient: Tensor | None = None
        self._sum: Tensor | None = None
        self._states = weight.new_empty(0)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def _matrix(self, head: int) -> Tensor:
        key = head if self._weight.ndim == 3 else 0
        if self._operands is None or self._operands[0] != key:
            self._operands = None
            weight = self._weight[head] if self._weight.ndim == 3 else self._weight
            rows = weight if self._map is None else weight.index_select(0, self._map)
            rows = rows if self._scale is None else rows.float() * self._scale[head, :, None]
            self._operands = key, _operand(rows, self._dtype)
        return self._operands[1]

    def logits(self, head: int, rows: slice, states: Tensor, wants_gradient: bool) -> Tensor:
        """Multiply by the matrix; see `Projection`."""
        self._states = _operand(states, self._dtype)
        return _product(self._states, self._matrix(head).t())

    def backward(self, head: int, rows: slice, gradient: Tensor, scale: Tensor) -> Tensor:
        """Multiply by the matrix' transpose, and keep what the matrix' own gradient needs; see `Projection`."""
        gradient = _operand(gradient, self._dtype)
        if self._trains:
            # With slabs, half of [V', H] keeps the peak below that of one product [V', H] per chunk.
            room = gradient.shape[1] * self._states.shape[1] * sum_type(self._dtype).itemsize // 2
            self._kept.append((gradient, self._states, scale))
            if sum(kept[0].nbytes for kept in self._kept) + gradient.nbytes > room:
                self._add_kept(head)
        return _product(gradient, self._matrix(head)).mul_(scale)

    def _add_kept(self, head: int) -> None:
        """Add the gradient of all kept positions, in one product per slab of the vocabulary.

        To read and write [V', H] in fp32 takes longer than one chunk's product, so several chunks share it.
        """
        if not self._kept:
            return
        gradients, states, scales = zip(*self._kept, strict=True)
        self._kept = []
        total, states_of_all = self._total(head), _join(states)
        slab = 16 * -(-len(total) // (16 * SLABS))  # aligned as tensor cores want it
        for start in range(0, len(total), slab):
            part = slice(start, start + slab)
            gradient = _join([kept[:, part] for kept in gradients])
            total[part].addcmul_(_product(gradient.t(), states_of_all), scales[0])

    def _total(self, head: int) -> Tensor:
        """Return what a head's gradient is summed in: the gradient itself if it has the type of sums."""
        kind = sum_type(self._dtype)
        if self._weight.ndim == 3 and self._weight.dtype == kind:
            return self._whole_gradient()[head]
        if self._sum is None:
            self._sum = torch.zeros_like(self._matrix(head), dtype=kind)
        return self._sum

    def _whole_gradient(self) -> Tensor:
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._weight)
        return self._gradient

    def end_head(self, head: int) -> None:
        """Add what is kept, and round a head's own gradient to its type; see `Projection`."""
        self._add_kept(head)
        if self._weight.ndim == 3 and self._sum is not None:
            self._whole_gradient()[head] = self._sum
            self._sum.zero_()

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of the weight; see `Projection`."""
        if not self._trains:
            return [None]
        shared = self._sum if self._weight.ndim == 2 else None
        self._sum = self._operands = None
        if shared is None:
            return [self._whole_gradient()]
        shared = shared.to(self._weight.dtype)
        return [shared if self._map is None else self._whole_gradient().index_copy_(0, self._map, shared)]


def _join(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Called:
    """A projection by a module that is called as it is: LoRA around lm_head, quantised layers, layers with hooks.

    Args:
        module: maps [C, H] to [C, V].
        token_map: int64 [V'], the columns of its result that are the vocabulary, or None for all.
        trains: whether its parameters get a gradient (those that require one).
    """

    def __init__(self, module: nn.Module, token_map: Tensor | None = None, trains: bool = True) -> None:
        trained = [p for p in module.parameters() if p.requires_grad] if trains else []
        self.parameters: tuple[Tensor, ...] = tuple(trained)
        self._module, self._map = module, token_map
        # The first one that is not packed integers: with LoRA, that of the layer underneath.
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
        self._graph = (states, output) if wants_gradient else None
        return output.detach().to(sum_type(output.dtype), copy=True)

    def backward(self, head: int, rows: slice, gradient: Tensor, scale: Tensor) -> Tensor:
        """Go back through the module by autograd; see `Projection`."""
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


class CrossEntropy:
    """Cross-entropy with target rows, and how often a target is among the n likeliest candidates.

    Args:
        targets: int64 [K, T], IGNORE where there is none.
        top: counts are kept for n from 1 to this; 0 for none.
        dtype: of the sums.

    Attributes:
        sums: [K] the summed losses.
        hits: int64 [K, top], how many targets were among the n likeliest. Among equal logits the lower row goes first.
    """

    def __init__(self, targets: Tensor, top: int, dtype: torch.dtype) -> None:
        self.sums = torch.zeros(len(targets), dtype=dtype, device=targets.device)
        self.hits = torch.zeros(len(targets), top, dtype=torch.int64, device=targets.device)
        self._targets, self._top = targets, top
        self._ranks = torch.arange(top, device=targets.device)

    def __call__(self, head: int, rows: slice, logits: Tensor, wants_gradient: bool) -> Tensor:
        """See `Criterion`."""
        targets = self._targets[head, rows]
        valid = targets != IGNORE
        index = targets.clamp(min=0)[:, None]
        chosen = logits.gather(1, index)
        if self._top:
            rank = _rank(logits, chosen, index)
            self.hits[head] += ((rank[:, None] <= self._ranks) & valid[:, None]).sum(0)
        normaliser = logits.logsumexp(1, keepdim=True)
        loss = (normaliser - chosen).squeeze(1).masked_fill(~valid, 0.0).sum()
        self.sums[head] += loss
        if wants_gradient:
            logits.sub_(normaliser).exp_()
            logits.scatter_(1, index, (chosen - normaliser).exp() - 1)
            logits.masked_fill_(~valid[:, None], 0.0)
        return loss


def _rank(logits: Tensor, chosen: Tensor, index: Tensor) -> Tensor:
    # Counted from the other end, so that a NaN is never better than anything.
    columns = torch.arange(logits.shape[1], device=logits.device)
    below = (logits < chosen).sum(1) + ((logits == chosen) & (columns >= index)).sum(1)
    return logits.shape[1] - below


class Divergence:
    """KL(teacher || student) between two projections' distributions at the same positions.

    Args:
        teacher: how the teacher's logits come from its states; takes no gradient.
        states: [T, H] of the teacher.
        dtype: of the sums.

    Attributes:
        sums: [1] the summed divergence in nats.
    """

    def __init__(self, teacher: Projection, states: Tensor, dtype: torch.dtype) -> None:
        self.sums = torch.zeros(1, dtype=dtype, device=states.device)
        self._teacher, self._states = teacher, states.detach()

    def __call__(self, head: int, rows: slice, logits: Tensor, wants_gradient: bool) -> Tensor:
        """See `Criterion`."""
        teacher = self._teacher.logits(head, rows, self._states[rows], wants_gradient=False)
        teacher.sub_(teacher.logsumexp(1, keepdim=True))
        logits.sub_(logits.logsumexp(1, keepdim=True))
        weights = teacher.exp()
        # A token that the teacher rules out (probability 0, logarithm -inf) adds nothing.
        apart = teacher.sub_(logits).masked_fill_(weights == 0, 0.0)
        loss = (weights * apart).sum()
        self.sums += loss
        if wants_gradient:
            logits.exp_().sub_(weights)
        return loss


@dataclass
class Walk:
    """One pass over all heads and chunks.

    Attributes:
        projection, criterion: see their protocols.
        scales: [K], the factor of each head's summed loss in the result.
        chunk: positions at a time.
        repeatable: keep the gradients after a backward pass, so that another may follow; costs a copy of them.
    """

    projection: Projection
    criterion: Criterion
    scales: Tensor
    chunk: int
    repeatable: bool = False

    def total(self, states: Tensor) -> Tensor:
        """Return the sum over heads of scale times summed loss, differentiable: states [K, T, H] -> scalar."""
        wants_gradient = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (states, *self.projection.parameters)
        )
        result: Tensor = _Chunked.apply(self, wants_gradient, states, *self.projection.parameters)
        return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, wants_gradient: bool, states: Tensor, *parameters: Tensor) -> Tensor:
        heads, positions, _ = states.shape
        total = states.new_zeros((), dtype=walk.scales.dtype)
        # fp16 would lose small gradients before a loss scaler has multiplied them.
        kept = torch.float32 if states.dtype == torch.float16 else states.dtype
        gradient = torch.zeros_like(states, dtype=kept) if wants_gradient else None
        for head in range(heads):
            for start in range(0, positions, walk.chunk):
                rows = slice(start, start + walk.chunk)
                logits = walk.projection.logits(head, rows, states[head, rows], wants_gradient)
                total += walk.criterion(head, rows, logits, wants_gradient) * walk.scales[head]
                if gradient is not None:
                    gradient[head, rows] = walk.projection.backward(head, rows, logits, walk.scales[head])
                del logits
            walk.projection.end_head(head)
        if gradient is not None:
            ctx.dtypes = (states.dtype, *(p.dtype for p in parameters))
            ctx.gradients = [gradient, *walk.projection.gradients()]
            ctx.repeatable = walk.repeatable
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.gradients
        if found is None:
            raise RuntimeError(
                "backward: expected one pass over this loss, got a second (the first handed its gradients on); "
                "repeatable=True keeps them"
            )
        if ctx.repeatable:
            found = [None if tensor is None else tensor.clone() for tensor in found]
        else:
            ctx.gradients = None
        scaled = [None if g is None else g.mul_(upstream).to(kind) for g, kind in zip(found, ctx.dtypes, strict=True)]
        return None, None, *scaled
