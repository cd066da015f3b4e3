"""StatePool: lends the tensors a generation runs in, and keeps them for the next generation of the same shape.

Captured steps are bound to the addresses of the tensors they were captured over, so the tensors outlive a generation
wherever steps are captured. What a generation will take is stated, and compared with what there is, before it is
allocated. The pool knows shapes; it does not know steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.kv_cache import Tables, TreeCache, bucket, reusable_rows
from medusa_decoding.decode.prefill import PREFILL_CHUNK
from medusa_decoding.decode.runtime.memory import UNCHECKED, MemoryUse, available, size, use_of_rows
from medusa_decoding.decode.state import DecodeState

logger = logging.getLogger(__name__)


class StatePool:
    """Lends `DecodeState`s.

    Args:
        backbone: the model that they are for.
        keep: how many states to keep between generations, the most recent ones; 0 allocates each anew.
    """

    def __init__(self, backbone: Backbone, keep: int) -> None:
        self.backbone = backbone
        self.keep = keep
        self._idle: list[DecodeState] = []
        # Every state alive, lent ones included: what is captured over them must be dropped with its step.
        self._states: weakref.WeakSet[DecodeState] = weakref.WeakSet()

    def first_capacity(
        self,
        prompt_lengths: list[int],
        budget: int,
        spare: int,
        headroom: int,
        nodes: int = 1,
        logits: bool = False,
        own_trees: bool = False,
        held: DecodeState | None = None,
    ) -> int:
        """Return with how many cache rows a generation should start, so that it can be finished.

        A cache that grows is moved, and the old block lives beside the new one meanwhile. Where there is room for the
        whole generation's cache but not for the last move, it starts with all of it.

        Args:
            prompt_lengths: tokens of each row's prompt.
            budget: new tokens a row may get at most.
            spare: rows that a step needs behind its last token.
            headroom: rows beyond the prompt to start with where the cache can grow.
            nodes: of the widest tree, for the statement of memory alone.
            logits: whether steps make the logits of all nodes, for that statement too.
            own_trees: whether every row has a tree of its own, for that statement too.
            held: a state that `enlarge` will be given, whose memory the generation may have.

        Raises:
            MemoryError: the whole generation does not fit, also with all that is kept thrown away; says how many new
                tokens would.
        """
        longest = max(prompt_lengths)
        start, final = longest + min(budget, headroom) + spare, longest + budget + spare
        use = self._use(prompt_lengths, final, budget, nodes, logits, own_trees)
        if use.total <= UNCHECKED:
            return start
        there = available(self.backbone.device)
        if there is None:
            return start
        room = there + sum(state.cache.nbytes for state in (*self._idle, *filter(None, [held])))
        if use.total > room:
            most = _most(
                lambda new: (
                    self._use(prompt_lengths, longest + new + spare, new, nodes, logits, own_trees).total <= room
                ),
                budget,
            )
            raise MemoryError(
                f"{_refusal(use, room, self.backbone)}; of {budget:,} new tokens a row "
                f"{f'{most:,} would fit' if most else 'not one would fit behind the prompt'}"
            )
        if bucket(start) == bucket(final):
            return start
        before = _most(lambda rows: bucket(rows) < bucket(final), final)
        moved = self._use(prompt_lengths, before, budget, nodes, logits, own_trees).lasting
        return start if use.total + moved <= room else final

    def acquire(
        self,
        prompt_lengths: list[int],
        rows: int,
        budget: int,
        nodes: int = 1,
        logits: bool = False,
        own_trees: bool = False,
    ) -> DecodeState:
        """Return a cleared state.

        Args:
            prompt_lengths: tokens of each row's prompt.
            rows: cache rows a sequence needs at least (rounded up to a bucket).
            budget: new tokens a row may get at most.
            nodes: as for `first_capacity`.
            logits: as for `first_capacity`.
            own_trees: as for `first_capacity`.

        Raises:
            MemoryError: it does not fit on the device, also with all that is kept thrown away. Says what it needs, what
                there is and how many tokens would fit; raised before anything is allocated.
        """
        shape = self.backbone.kv_shape(len(prompt_lengths), bucket(rows))
        kept = [state for state in self._idle if self._serves(state, shape, bucket(budget + 1))]
        if kept:
            tables = self.backbone.rope(prompt_lengths, shape[4])
            for state in kept:
                if state.cache.cos.shape == tables[0].shape:
                    self._idle.remove(state)
                    self._prepare(state, tables)
                    return state
        self._make_room(lambda n: self._use(prompt_lengths, n, budget, nodes, logits, own_trees), rows)
        tables = self.backbone.rope(prompt_lengths, shape[4])
        try:
            cache = TreeCache.allocate(shape=shape, rope=tables)
        except MemoryError:
            if not self._idle:
                raise
            self._idle.clear()
            cache = TreeCache.allocate(shape=shape, rope=tables)
        return self._allocate(cache, budget)

    def enlarge(
        self,
        state: DecodeState,
        prompt_lengths: list[int],
        rows: int,
        budget: int,
        nodes: int = 1,
        logits: bool = False,
        own_trees: bool = False,
    ) -> tuple[DecodeState, int]:
        """Turn a state that was held after its generation into one for another that begins with the same text.

        Args:
            state: what `acquire` or `enlarge` returned, not given back. Where another one is returned, this one must
                neither be used any more nor be given back.
            prompt_lengths: tokens of each row's new prompt, which is to begin with what the row had.
            rows: cache rows a sequence needs at least.
            budget: new tokens a row may get at most.
            nodes: as for `first_capacity`.
            logits: as for `first_capacity`.
            own_trees: as for `first_capacity`.

        Returns:
            A cleared state with the rotary tables of the new prompts, and how many cached rows at the start of every
            sequence are right for them: what `prefill` may reuse of the tokens that old and new text have in common. 0
            where dynamic scaling asks for other frequencies now, where the model has changed device or dtype, and where
            a larger cache fits in the place of the old one but not beside it.

        Raises:
            ValueError: another number of rows than the state has.
            MemoryError: the larger cache does not fit; the state is as it was.
        """
        cache = state.cache
        if len(prompt_lengths) != len(cache.lengths):
            raise ValueError(f"prompt_lengths: expected {len(cache.lengths)} rows, got {len(prompt_lengths)}")
        width = max(state.output.shape[1], bucket(budget + 1))
        same_model = self._serves(state, self.backbone.kv_shape(len(prompt_lengths), cache.capacity), width=None)
        cached = min(cache.lengths.tolist()) if same_model else 0
        if not same_model or rows > cache.capacity:
            try:
                larger = self.acquire(prompt_lengths, rows, budget, nodes, logits, own_trees)
            except MemoryError:
                there = available(self.backbone.device)
                need = self._use(prompt_lengths, rows, budget, nodes, logits, own_trees).total
                if there is None or need > there + cache.nbytes:
                    raise
                logger.info("memory: no room for a larger cache beside the old one, whose text runs again")
                _release(state)
                return self.acquire(prompt_lengths, rows, budget, nodes, logits, own_trees), 0
            if same_model:
                cached = min(cached, reusable_rows(cache.tables, larger.cache.tables))
                larger.cache.kv[..., :cached, :].copy_(cache.kv[..., :cached, :])
            self.release(state)
            if state not in self._idle:
                _release(state)
            return larger, cached
        tables = self.backbone.rope(prompt_lengths, cache.capacity)
        cached = min(cached, reusable_rows(cache.tables, tables))
        if width > state.output.shape[1]:
            state = self._allocate(cache, budget)
        self._prepare(state, tables)
        return state, cached

    def release(self, state: DecodeState) -> None:
        """Take a state back that nobody uses any more; an interrupted caller may do so twice."""
        if state not in self._idle:
            self._idle.append(state)
        del self._idle[: max(0, len(self._idle) - self.keep)]

    def forget(self, step: object) -> None:
        """Drop every graph that was captured of one step, also over states that are lent."""
        for state in list(self._states):
            state.captured = {key: value for key, value in state.captured.items() if key[0] is not step}

    def clear(self) -> None:
        """Free the idle states, and every graph captured over a lent one."""
        self._idle.clear()
        for state in list(self._states):
            state.captured.clear()

    def _allocate(self, cache: TreeCache, budget: int) -> DecodeState:
        state = DecodeState.allocate(cache, self.backbone.config.hidden_size, budget)
        self._states.add(state)
        return state

    def _serves(self, state: DecodeState, shape: tuple[int, ...], width: int | None) -> bool:
        kv = state.cache.kv
        same_kind = kv.dtype == self.backbone.dtype and kv.device == self.backbone.device
        return same_kind and tuple(kv.shape) == shape and width in (None, state.output.shape[1])

    def _prepare(self, state: DecodeState, tables: Tables) -> None:
        """Clear a state for another generation; keys and values stay."""
        state.clear()
        # Dynamic RoPE scaling depends on the prompt.
        if not state.cache.set_tables(tables):
            state.captured.clear()

    def _use(self, lengths: list[int], rows: int, budget: int, nodes: int, logits: bool, own_trees: bool) -> MemoryUse:
        batch = len(lengths)
        at_once = min(batch * max(lengths), max(PREFILL_CHUNK, batch))
        return use_of_rows(self.backbone, batch, rows, budget, at_once, nodes, logits, own_trees)

    def _make_room(self, needs: Callable[[int], MemoryUse], rows: int) -> None:
        """State what will be allocated; throw away what is kept as far as it is in the way."""
        # What is kept makes room before something new is allocated.
        del self._idle[: max(0, len(self._idle) - self.keep + 1)]
        use = needs(rows)
        logger.info("memory: %s", use)
        if use.total <= UNCHECKED:
            return
        there = available(self.backbone.device)
        if self._idle and there is not None and use.total > there:
            self._idle.clear()
            there = available(self.backbone.device)
        if there is not None and use.total > there:
            room = there
            most = _most(lambda n: needs(n).total <= room, rows)
            raise MemoryError(
                f"{_refusal(use, room, self.backbone)}; of {rows:,} tokens a row (prompt, new ones and tree) {most:,} "
                "would fit"
            )


def _release(state: DecodeState) -> None:
    """Free a state's memory, whoever still holds it."""
    state.captured.clear()
    state.cache.release()


def _refusal(use: MemoryUse, room: int, backbone: Backbone) -> str:
    return f"memory: expected at most {size(room)} (free on {backbone.device}), got {use}"


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number in [0, limit) that fits, 0 if none does; with a number, all smaller ones fit."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
