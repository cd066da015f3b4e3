"""Arena: lends the tensors a generation runs in, and keeps them for the next generation of the same shape.

Captured steps are bound to the addresses of the tensors they were captured over, so the tensors outlive a generation
wherever steps are captured. The arena knows shapes; it does not know steps.
"""

from __future__ import annotations

from medusa_decoding.cache import TreeCache, bucket
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.trunk import Trunk


class Arena:
    """Lends `DecodeState`s.

    Args:
        trunk: the model that they are for.
        keep: how many states to keep between generations, the most recent ones; 0 allocates each anew.
    """

    def __init__(self, trunk: Trunk, keep: int) -> None:
        self.trunk = trunk
        self.keep = keep
        self._idle: list[DecodeState] = []

    def lend(self, prompt_lengths: list[int], rows: int, budget: int) -> DecodeState:
        """Return a cleared state.

        Args:
            prompt_lengths: tokens of each row's prompt.
            rows: cache rows a sequence needs at least (rounded up to a bucket).
            budget: new tokens a row may get at most.

        Raises:
            MemoryError: the cache does not fit on the device.
        """
        capacity = bucket(rows)
        cos, sin = self.trunk.rope(prompt_lengths, capacity)
        shapes = (self.trunk.kv_shape(len(prompt_lengths), capacity), cos.shape, bucket(budget + 1))
        for index, state in enumerate(self._idle):
            cache = state.cache
            same_kind = (cache.kv.dtype, cache.kv.device) == (cos.dtype, cos.device)
            if same_kind and shapes == (tuple(cache.kv.shape), cache.cos.shape, state.output.shape[1]):
                del self._idle[index]
                state.clear()
                # Dynamic RoPE scaling depends on the prompt.
                cache.cos.copy_(cos)
                cache.sin.copy_(sin)
                return state
        # What is kept makes room before something new is allocated.
        del self._idle[: max(0, len(self._idle) - self.keep + 1)]
        try:
            cache = TreeCache.allocate(shape=shapes[0], rope=(cos, sin))
        except MemoryError:
            if not self._idle:
                raise
            self._idle.clear()
            cache = TreeCache.allocate(shape=shapes[0], rope=(cos, sin))
        return DecodeState.allocate(cache, self.trunk.config.hidden_size, budget)

    def give_back(self, state: DecodeState) -> None:
        """Take a state back that nobody uses any more."""
        self._idle.append(state)
        del self._idle[: max(0, len(self._idle) - self.keep)]

    def forget(self, step: object) -> None:
        """Drop what has been captured of one step."""
        for state in self._idle:
            state.captured = {key: value for key, value in state.captured.items() if key[0] is not step}

    def clear(self) -> None:
        """Free everything kept, captured steps included."""
        self._idle.clear()
