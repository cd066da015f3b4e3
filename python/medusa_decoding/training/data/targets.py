"""Find the target tokens of each head: labels a few positions later within one conversation.

Head k (0-based) predicts the token k + 2 places after its input position, k + 1 after the model's own next token
(Medusa paper, section 2.2.1). The token before a target is its parent, which a head's prediction may depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

IGNORE = -100
"""The label of a position that has none, as in `torch.nn.functional.cross_entropy`."""


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; neither the CPU nor a GPU waits for the copy."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def number_segments(position_ids: Tensor) -> Tensor:
    """Number the conversations of a packed batch: int64 [B, T] positions that restart at 0 -> int64 [B * T].

    The first position of every row also starts one, so that no two rows share a number.
    """
    starts = position_ids == 0
    starts[:, 0] = True
    return starts.flatten().cumsum(0)


def shifted_labels(
    labels: Tensor, offsets: Sequence[int], *, segments: Tensor | None = None, token_map: Tensor | None = None
) -> Tensor:
    """Return the label `offset` positions later, for each offset: int64 [T] -> int64 [len(offsets), T].

    Args:
        labels: int64 [T], the token id at each position, or IGNORE if it is not learnt.
        offsets: 1 is the language model's own target, k + 2 that of head k.
        segments: int64 [T], the conversation of each position; None if all positions are one conversation.
        token_map: int64 [V'], turns labels into places in it; a label that it lacks becomes -1.

    Returns:
        The labels; IGNORE if the position has none, is beyond the end, or belongs to another conversation.
    """
    if token_map is not None:
        labels = _places(labels, token_map)
    found = torch.full((len(offsets), len(labels)), IGNORE, dtype=torch.int64, device=labels.device)
    for row, offset in zip(found, offsets, strict=True):
        later = labels[offset:]
        if segments is not None:
            later = later.masked_fill(segments[offset:] != segments[:-offset], IGNORE)
        row[: len(later)] = later
    return found


def draft_labels(
    labels: Tensor, num_heads: int, *, segments: Tensor | None = None, token_map: Tensor | None = None
) -> Tensor:
    """Return the labels that heads learn: k + 2 positions later for head k, where the next token is learnt too.

    Heads draft only from positions whose next token, the root, the model has just written. Arguments and result are as
    in `shifted_labels`.
    """
    found = shifted_labels(labels, range(1, num_heads + 2), segments=segments, token_map=token_map)
    return found[1:].masked_fill(found[0] == IGNORE, IGNORE)


def most_frequent_tokens(counts: Mapping[int, int], size: int, always: Iterable[int] = ()) -> Tensor:
    """Return a trimmed vocabulary, the `token_map` of heads: the tokens seen most often, the most frequent first.

    `counts` says how often each token id was seen; of equal counts the lower id comes first. The ids in `always` (such
    as end-of-text), at most `size` of them, are always included.

    Returns:
        int64 [size].
    """
    kept = set(always)

    def place(token: int) -> tuple[int, int]:
        return -counts.get(token, 0), token

    # If fewer tokens were seen than wanted, the lowest ids fill the rest.
    others = sorted((counts.keys() | range(size)) - kept, key=place)
    return torch.tensor(sorted(kept.union(others[: size - len(kept)]), key=place), dtype=torch.int64)


def _places(labels: Tensor, token_map: Tensor) -> Tensor:
    size = int(torch.cat([labels, token_map]).max()) + 1
    places = torch.full((size,), -1, dtype=torch.int64, device=labels.device)
    places[token_map] = torch.arange(len(token_map), device=labels.device)
    return torch.where(labels == IGNORE, IGNORE, places[labels.clamp(min=0)])
