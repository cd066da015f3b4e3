"""StatePool: lends the states that generations run on, and keeps them for later generations of the same shape.

Captured steps are bound to the addresses of their tensors, so where steps are captured, states outlive a generation.
Memory is checked before it is allocated.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.kv_cache import Tables, TreeCache, bucket, reusable_rows
from medusa_decoding.decode.runtime.memory import UNCHECKED, MemoryUse, Sizes, available, memory_use, size
from medusa_decoding.decode.state import DecodeState

MOST_STATES, SMALL_STATES = 8, 2**29
"""Idle states that are kept at most, and the bytes of their caches up to which more are than was asked for."""

logger = logging.getLogger(__name__)


class StatePool:
    """Lends `DecodeState`s.

    Args:
        backbone: the model that they are for.
        keep: how many recent states to keep between generations, and more if they are small: a step captured again for
            each size of the cache would take as long as many steps. 0 allocates each again.
    """

    def __init__(self, backbone: Backbone, keep: int) -> None:
        self.backbone = backbone
        self.keep = keep
        self._idle: list[DecodeState] = []
        # All live states, lent ones included: graphs captured over them must be dropped with their step.
        self._states: weakref.WeakSet[DecodeState] = weakref.WeakSet()

    def first_capacity(self, sizes: Sizes, headroom: int, held: DecodeState | None = None) -> int:
        """Return with how many cache rows a generation should start, so that it can finish.

        A cache grows by a copy into a larger one, so both exist for a moment. If there is memory for the final cache
        but not for the last copy, the generation starts with the final one.

        Args:
            sizes: of the generation.
            headroom: rows beyond the prompt to start with if the cache can grow.
            held: a state that `enlarge` will be given, whose memory the generation may have.

        If not even the final cache fits, with all idle states freed, the `MemoryError` says how many new tokens would.
        """
        longest, budget, spare = max(sizes.prompt_lengths), sizes.budget, sizes.spare
        start, final = longest + min(budget, headroom) + spare, longest + budget + spare
        use = memory_use(self.backbone, sizes, final)
        if use.total <= UNCHECKED:
            return start
        free = self._available()
        if free is None:
            return start
        room = free + sum(state.cache.nbytes for state in (*self._idle, *filter(None, [held])))
        if use.total > room:
            most = _most(
                lambda new: memory_use(self.backbone, replace(sizes, budget=new), longest + new + spare).total <= room,
                budget,
            )
            raise MemoryError(
                f"{_refusal(use, room, self.backbone)}; of {budget:,} new tokens per row "
                f"{f'{most:,} would fit' if most else 'not one would fit after the prompt'}"
            )
        if bucket(start) == bucket(final):
            return start
        before_last = _most(lambda rows: bucket(rows) < bucket(final), final)
        moved = memory_use(self.backbone, sizes, before_last).lasting
        return start if use.total + moved <= room else final

    def acquire(self, sizes: Sizes, rows: int) -> DecodeState:
        """Return a cleared state, or raise `MemoryError` before anything is allocated, with how many tokens would fit.

        Args:
            sizes: of the generation.
            rows: cache rows that a sequence needs at least (rounded up to a bucket).
        """
        shape = self.backbone.kv_shape(len(sizes.prompt_lengths), bucket(rows))
        fitting = [state for state in self._idle if self._serves(state, shape, bucket(sizes.budget + 1))]
        if fitting:
            tables = self.backbone.rope(sizes.prompt_lengths, shape[4])
            for state in fitting:
                if state.cache.cos.shape == tables[0].shape:
                    self._idle.remove(state)
                    self._prepare(state, tables)
                    return state
        self._free_memory(sizes, rows)
        try:
            return self._new(sizes, shape)
        except MemoryError:
            if not self._idle:
                raise
            self._idle.clear()
            return self._new(sizes, shape)

    def enlarge(self, state: DecodeState, sizes: Sizes, rows: int) -> tuple[DecodeState, int]:
        """Turn a state that was held after its generation into one for another that begins with the same text.

        Returns a cleared state and how many cached rows at the start of every sequence `prefill` may reuse: 0 if
        dynamic scaling needs other frequencies now, if the model has changed device or dtype, or if a larger cache fits
        instead of the old one but not next to it. If it is another state, the given one must neither be used nor
        released any more. If a larger cache does not fit at all, that is a `MemoryError`, and the state is unchanged.
        """
        cache, lengths = state.cache, sizes.prompt_lengths
        width = max(state.output.shape[1], bucket(sizes.budget + 1))
        same_model = self._serves(state, self.backbone.kv_shape(len(lengths), cache.capacity), width=None)
        cached = min(cache.lengths.tolist()) if same_model else 0
        if not same_model or rows > cache.capacity:
            try:
                larger = self.acquire(sizes, rows)
            except MemoryError:
                free = self._available()
                if free is None or memory_use(self.backbone, sizes, rows).total > free + cache.nbytes:
                    raise
                logger.info("memory: no room for a larger cache next to the old one, whose text runs again")
                _free(state)
                return self.acquire(sizes, rows), 0
            if same_model:
                cached = min(cached, reusable_rows(cache.tables, larger.cache.tables))
                larger.cache.kv[..., :cached, :].copy_(cache.kv[..., :cached, :])
            self.release(state)
            if state not in self._idle:
                _free(state)
            return larger, cached
        tables = self.backbone.rope(lengths, cache.capacity)
        cached = min(cached, reusable_rows(cache.tables, tables))
        if width > state.output.shape[1]:
            with self.backbone.peers.together():
                state = self._allocate(cache, sizes.budget)
        self._prepare(state, tables)
        return state, cached

    def release(self, state: DecodeState) -> None:
        """Take back a state that is no longer used; an interrupted caller may do so twice."""
        if state not in self._idle:
            self._idle.append(state)
        self._trim()

    def track(self, state: DecodeState) -> None:
        """Drop graphs captured over a state too that was not made here: a view of a lent one."""
        self._states.add(state)

    def forget(self, step: object) -> None:
        """Drop all captured graphs of one step, also over lent states."""
        for state in list(self._states):
            state.captured = {key: value for key, value in state.captured.items() if key[0] is not step}

    def clear(self) -> None:
        """Free the idle states, and all graphs captured over lent ones."""
        self._idle.clear()
        for state in list(self._states):
            state.captured.clear()

    def _trim(self, more: int = 0, more_bytes: int = 0) -> None:
        """Free the oldest idle states that are too many, next to `more` other states of so many bytes."""
        if self.keep == 0:
            self._idle.clear()
        while len(self._idle) + more > self.keep and self._idle:
            held = more_bytes + sum(state.cache.nbytes for state in self._idle)
            if len(self._idle) + more <= MOST_STATES and held <= SMALL_STATES:
                break
            del self._idle[0]

    def _available(self) -> int | None:
        """Return the bytes left on the device; of several processes, in the one with the least, so that they agree."""
        free = available(self.backbone.device)
        return None if free is None else self.backbone.peers.least(free)

    def _new(self, sizes: Sizes, shape: tuple[int, ...]) -> DecodeState:
        with self.backbone.peers.together():
            tables = self.backbone.rope(sizes.prompt_lengths, shape[4])
            cache = TreeCache.allocate(shape=shape, rope=tables, dtype=self.backbone.kv_dtype)
            return self._allocate(cache, sizes.budget)

    def _allocate(self, cache: TreeCache, budget: int) -> DecodeState:
        state = DecodeState.allocate(cache, self.backbone.states_size, budget)
        self._states.add(state)
        return state

    def _serves(self, state: DecodeState, shape: tuple[int, ...], width: int | None) -> bool:
        kv, backbone = state.cache.kv, self.backbone
        same_kind = (kv.dtype, state.cache.cos.dtype, kv.device) == (backbone.kv_dtype, backbone.dtype, backbone.device)
        return same_kind and tuple(kv.shape) == shape and width in (None, state.output.shape[1])

    def _prepare(self, state: DecodeState, tables: Tables) -> None:
        """Clear a state for another generation; keys and values stay."""
        state.clear()
        # They depend on the prompt if RoPE is scaled dynamically.
        if not state.cache.set_tables(tables):
            state.captured.clear()

    def _free_memory(self, sizes: Sizes, rows: int) -> None:
        """Check that a state fits; free idle ones as far as they are in the way."""
        use = memory_use(self.backbone, sizes, rows)
        self._trim(1, use.lasting)
        logger.info("memory: %s", use)
        if use.total <= UNCHECKED:
            return
        free = self._available()
        if self._idle and free is not None and use.total > free:
            self._idle.clear()
            free = self._available()
        if free is not None and use.total > free:
            room = free
            most = _most(lambda n: memory_use(self.backbone, sizes, n).total <= room, rows)
            raise MemoryError(
                f"{_refusal(use, room, self.backbone)}; of {rows:,} tokens per row (prompt, new ones and tree) "
                f"{most:,} would fit"
            )


def _free(state: DecodeState) -> None:
    """Free a state's memory, even if something still refers to it."""
    state.captured.clear()
    state.cache.release()


def _refusal(use: MemoryUse, room: int, backbone: Backbone) -> str:
    processes = backbone.peers.size
    where = backbone.device if processes == 1 else f"{backbone.device.type} in each of {processes} processes"
    return f"memory: expected at most {size(room)} (free on {where}), got {use}"


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number in [0, limit) that fits, 0 if none does; with a number, all smaller ones fit."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
