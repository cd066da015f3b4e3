"""PackedLinear: a linear layer over a weight in 4 or 8 bits, by this project's op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kernels import Projection, decode_linear, quantised


class PackedLinear(nn.Linear):
    """A linear layer that `decode_linear` computes for any number of rows; peft adapts it as it does a plain one.

    Args:
        projection: its weight [N, K] in 4 or 8 bits, its bias, and how they are stored.
        order: int64 [K], the place in x of each column of the weight; None if the columns are in the order of x.
        original: the module that it replaces for a while.
        taken: what the original lacks meanwhile, to give back, see `TakenNumbers`.
    """

    weight: Tensor
    bias: Any
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    original: nn.Module | None
    taken: TakenNumbers | None

    def __init__(
        self,
        projection: Projection,
        order: Tensor | None = None,
        original: nn.Module | None = None,
        taken: TakenNumbers | None = None,
    ) -> None:
        nn.Module.__init__(self)
        *tensors, self.codes = projection
        for name, tensor in zip(("weight", "bias", "scale", "zero", "order"), [*tensors, order], strict=True):
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.in_features, self.out_features = quantised.columns(self.weight), len(self.weight)
        self.__dict__.update(original=original, taken=taken)  # not registered as a submodule

    @property
    def projection(self) -> Projection:
        """What the ops read; its columns are in the order of x only if `order` is None."""
        return Projection(self.weight, self.bias, self.scale, self.zero, self.codes)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x W^T + b`, [..., N], from x [..., K]."""
        if self.order is not None:
            x = x[..., self.order]
        if torch.is_grad_enabled() and x.requires_grad:  # the op has no gradient
            weight = quantised.dequantised(self.weight, self.scale, self.zero, self.codes).to(x.dtype)
            x = x + (quantised.rounded(x, self.codes, self.weight) - x).detach()  # rounding passes gradients on
            return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))
        bias = None if self.bias is None else [self.bias.to(x.dtype)]
        zeros = None if self.zero is None else [self.zero]
        return decode_linear(x, [self.weight], bias, scales=[self.scale], zeros=zeros, codes=self.codes)

    def given_back(self) -> nn.Module:
        """Return the module that this one replaces, with all its tensors."""
        assert self.original is not None
        if self.taken is not None:
            self.taken.give_back(self.weight)
        return self.original

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the original: a copy of a held model is not held."""
        if self.original is None:
            return super().__reduce_ex__(protocol)
        return _whole, (self.original, None if self.taken is None else self.taken.whole(self.weight))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # Names and tensors stay those of the original.
        if self.original is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        self.original._save_to_state_dict(destination, prefix, keep_vars)
        if self.taken is not None:
            destination[prefix + "weight"] = self.taken.whole(self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.original is None:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            return
        *_, error_msgs = rest
        error_msgs.append(f"{prefix}weight: expected a model whose layers MedusaModel does not hold; call undo() first")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        # A model's dtype is that of its activations; scales stay in fp32.
        scale = self.scale
        probe = fn(scale.new_empty(0))
        if self.original is not None and (probe.dtype, probe.device) != (scale.dtype, scale.device):
            raise ValueError(
                f"model: expected no move or cast while MedusaModel holds its quantised layers, got one to "
                f"{probe.dtype} on {probe.device}; call undo() before it"
            )
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self


@dataclass
class TakenNumbers:
    """The numbers of a torchao weight of 4 bits, one per byte, that are held in half the memory for a while."""

    weight: Any

    def whole(self, packed: Tensor) -> Any:
        """Return the weight as it was."""
        held, numbers = self.weight, (quantised.values(packed, "int4") - quantised.MIDDLE).to(torch.int8)
        return type(held)(
            numbers, held.scale, held.zero_point, held.target_dtype, held.block_size, held.dtype,
            held.activation_quantization,
        )  # fmt: skip

    def free(self) -> None:
        """Put one number in place of all."""
        self.weight.qdata = self.weight.qdata.new_zeros(1, 1).expand(self.weight.qdata.shape)

    def give_back(self, packed: Tensor) -> None:
        """Fill in the original weight's numbers."""
        self.weight.qdata = self.whole(packed).qdata


def _whole(original: nn.Module, weight: Tensor | None) -> nn.Module:
    if weight is not None:
        original.weight = nn.Parameter(weight, requires_grad=False)
    return original
