"""Limits: when the rows of a generation end, known to the host and, as tensors, to the steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Limits:
    """When rows end, as transformers' EosTokenCriteria, MaxLengthCriteria and MinNewTokens processor would end them.

    Attributes:
        budgets: new tokens that each row may get.
        min_new: per row, how many new tokens it needs before an EOS token may be selected.
        eos: ids of the tokens that end a row; may be empty.
        pad: fills rows that ended early.
        device: of the tensors.
        budgets_tensor: int32 [B].
        min_new_tensor: int32 [B]; None if no EOS token is ever suppressed.
        eos_tensor: int64 [E].
    """

    budgets: list[int]
    min_new: list[int]
    eos: list[int]
    pad: int = 0
    device: torch.device | str = "cpu"
    budgets_tensor: torch.Tensor = field(init=False, repr=False)
    min_new_tensor: torch.Tensor | None = field(init=False, repr=False)
    eos_tensor: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.budgets_tensor = torch.tensor(self.budgets, dtype=torch.int32, device=self.device)
        suppressed = any(self.min_new) and bool(self.eos)
        self.min_new_tensor = torch.tensor(self.min_new, dtype=torch.int32, device=self.device) if suppressed else None
        self.eos_tensor = torch.tensor(self.eos, dtype=torch.int64, device=self.device)

    @property
    def key(self) -> tuple[int, bool]:
        """Steps with the same key run the same operations; compiled and captured steps are cached by it."""
        return len(self.eos), self.min_new_tensor is None

    def copy_(self, other: Limits) -> None:
        """Copy limits of the same key and batch in place, so that captured steps read them."""
        self.budgets, self.min_new, self.eos, self.pad = other.budgets, other.min_new, other.eos, other.pad
        self.budgets_tensor.copy_(other.budgets_tensor)
        self.eos_tensor.copy_(other.eos_tensor)
        if self.min_new_tensor is not None and other.min_new_tensor is not None:
            self.min_new_tensor.copy_(other.min_new_tensor)
