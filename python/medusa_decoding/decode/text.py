"""A text that grows on the host, token by token."""

from __future__ import annotations

import torch


def append_tokens(text: torch.Tensor, length: int, new: torch.Tensor) -> torch.Tensor:
    """Return a text whose first `length` tokens are followed by new ones.

    If there is no room for them, the text's storage is doubled: few texts reach their maximum length.

    Args:
        text: int64 [at least length]; changed in place if it has room for the new tokens.
        length: tokens so far.
        new: int64 [n].
    """
    end = length + len(new)
    if end > len(text):
        text = torch.cat([text, text.new_zeros(max(end, 2 * len(text)) - len(text))])
    text[length:end] = new
    return text
