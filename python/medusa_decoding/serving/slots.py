"""Slots: the rows of one decode state, some of which run while others wait for a prompt.

Running rows are neighbours, so that a step runs over a view of the state and costs what they cost. When rows leave,
others change places with them. Keys and values never move: each slot has a place in the cache, and takes it along. A
slot that nobody uses keeps the keys and values of its last text: a prompt that begins with the same tokens need not run
them again. It knows neither requests nor trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from medusa_decoding.backbone.kv_cache import TreeCache
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.generation.session import common_length

SHORTEST_REUSE = 16
"""Tokens in common below which a prompt runs from its beginning: copying them would save next to nothing."""


class Slots:
    """The rows of a decode state.

    Args:
        state: a cleared state, whose rotary tables are the same for all rows.
        track: called with each view, over which graphs may be captured.

    Attributes:
        state: that state.
        temperatures: fp32 [B], the temperature of each row (see `decode.selection.rows`); changes places with it.
        texts: tokens of each row: those whose keys and values are cached, and the root.
        places: of each slot, the sequence of the cache that has its keys and values.
    """

    def __init__(self, state: DecodeState, track: Callable[[DecodeState], None] = lambda state: None) -> None:
        self.state, self._track = state, track
        self.temperatures = torch.zeros(len(state.root), device=state.root.device)
        self.texts: list[list[int]] = [[] for _ in state.root]
        self.places = list(range(len(state.root)))
        # The same on the device, where captured steps read it.
        self._places = torch.arange(len(state.root), dtype=torch.int32, device=state.root.device)
        self._used = [0] * len(state.root)  # when each slot was last given to a prompt
        self._uses = 0
        self._views: dict[tuple[int, int], DecodeState] = {}
        state.finished.fill_(True)

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, first: int, last: int) -> DecodeState:
        """Return the state of slots [first, last) as a view; the same object every time, so that graphs stay valid."""
        view = self._views.get((first, last))
        if view is None:
            state, cache, rows = self.state, self.state.cache, slice(first, last)
            own = {
                field.name: getattr(state, field.name)[rows]
                for field in dataclasses.fields(DecodeState)
                if field.name not in ("cache", "step", "copies", "text", "captured")
            }
            part = TreeCache(cache.kv, cache.lengths[rows], cache.cos, cache.sin, self._places[rows])
            view = self._views[first, last] = DecodeState(cache=part, step=state.step, **own)
            self._track(view)
        view.cache.places = self.places[first:last]
        return view

    def swap(self, one: int, other: int) -> None:
        """Let two rows change places, with all that belongs to them; nothing waits for the device."""
        if one == other:
            return
        for tensor in (*self.state.per_row(), self.temperatures, self._places):
            kept = tensor[one].clone()
            tensor[one].copy_(tensor[other])
            tensor[other].copy_(kept)
        self.texts[one], self.texts[other] = self.texts[other], self.texts[one]
        self.places[one], self.places[other] = self.places[other], self.places[one]
        self._used[one], self._used[other] = self._used[other], self._used[one]

    def reusable(self, prompt: list[int], first: int) -> tuple[int, int]:
        """Return how many tokens of a prompt are cached, and in which slot: of equal ones a free one, from `first` on.

        The last token always runs: its prediction is needed.
        """
        common = [min(common_length(text[:-1], prompt), len(prompt) - 1) for text in self.texts]
        source = max(range(len(self)), key=lambda slot: (common[slot], slot >= first))
        return (common[source] if common[source] >= SHORTEST_REUSE else 0), source

    def place(self, prompt: list[int], first: int, reuse: bool = True) -> int:
        """Let a prompt have slot `first`, the first free one; return how many of its tokens are cached in it.

        A free slot that has them changes places with it, unless the better part of that slot's own text would be lost
        while another one has been free for longer: then that one does, and they are copied. Without `reuse` all tokens
        run.
        """
        reused, source = self.reusable(prompt, first) if reuse else (0, first)
        oldest = min(range(first, len(self)), key=lambda slot: (self._used[slot], -slot))
        slot = source if reused and source >= first and 2 * reused >= len(self.texts[source]) else oldest
        if reused and slot != source:
            to, of = (self.state.cache.kv[:, :, self.places[own], :, :reused] for own in (slot, source))
            to.copy_(of)
        self.texts[slot], self.state.cache.lengths[slot] = prompt[:reused], reused
        self.swap(slot, first)
        self._uses += 1
        self._used[first] = self._uses
        return reused

    def clear(self, slot: int, seed: int, temperature: float) -> None:
        """Prepare a slot for the prefill of another text."""
        state = self.state
        for tensor in state.per_row():
            tensor[slot] = 0
        state.seeds[slot], self.temperatures[slot] = seed, temperature

    def forget(self, first: int, last: int) -> None:
        """Forget the texts of slots [first, last): their keys and values may be wrong."""
        self.texts[first:last] = [[] for _ in range(first, last)]
