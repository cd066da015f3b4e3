"""Swap the attention modules of a loaded model for tree attention, and back.

The swapped module shares the original's submodule table, so quantised and LoRA-wrapped layers keep working and
`state_dict` does not change. With a `DecodeContext` it appends to a `TreeCache` and attends through the project's ops;
without one (the model's own forward or `generate`) it calls the original module.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from medusa_decoding.backbone.families import FAMILIES, Family, family_of
from medusa_decoding.backbone.kv_cache import TreeCache
from medusa_decoding.backbone.prefill_attention import prefill_attention
from medusa_kernels import rope_append, tree_attention


@dataclass
class DecodeContext:
    """What the swapped attention modules need to know of the current pass.

    Attributes:
        cache: keys and values are appended to it, after `cache.lengths` rows.
        depths: int32 [N] or [B, N], each token's position relative to `cache.lengths`.
        ancestors: int64 [N, W] or [B, N, W] bit words of a tree pass; None for a prefill (causal).
        offset: of a prefill, the number of cache rows before it, on the host; equals `cache.lengths` in every row.
        hold_last: of a prefill, whether the last layer only appends its keys and values; see `Backbone.forward`.
        features: the states [B, N, H] after feature layers, which the pass appends.
    """

    cache: TreeCache
    depths: torch.Tensor
    ancestors: torch.Tensor | None
    offset: int = 0
    hold_last: bool = False
    features: list[torch.Tensor] = field(default_factory=list)


class TreeAttention(nn.Module):
    """Replaces one attention module and shares its parameters, submodules and attributes.

    Attributes:
        original: the module.
        family: what its family does otherwise than Llama.
        users: how many swaps have it.
        settings: the next three, as they were when it was swapped.
        window: its sliding window in positions, or None.
        table: which of the cache's rotary tables it has, None if there is one for all.
        softcap: what its scores are capped by, or None.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        # The tables themselves are shared: whatever is set on one module (an adapter, a quantised layer) is set on
        # both, and names in state_dict stay the same. nn.Module must not register the original as a submodule.
        self._parameters = original._parameters
        self._buffers = original._buffers
        self._modules = original._modules
        self.__dict__["original"] = original
        self.training = original.training
        self.users = 0
        family = family_of(original)
        assert family is not None, "check_layers comes before"
        self.family: Family = family
        self.settings = family.settings_of(original)
        self.window, self.table, self.softcap = self.settings.values()

    def __getattr__(self, name: str) -> Any:
        """Get attributes that this class does not define (layer_type, is_causal, ..) from the original."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the original: a copy of a swapped model is not swapped."""
        return _identity, (self.original,)

    def train(self, mode: bool = True) -> TreeAttention:
        """Set the mode of both modules."""
        self.__dict__["original"].train(mode)
        return super().train(mode)

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, medusa_context: DecodeContext | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within a decode pass from and to [B, N, H], or as the original module without a context.

        The second result is None in a decode pass, which never materialises attention weights.
        """
        if medusa_context is None:
            return self.original(hidden_states, *args, **kwargs)
        projected = [getattr(self, name)(hidden_states) for name in self.family.qkv]
        return self.o_proj(self.attend(*self.normed(*self.split(*projected)), medusa_context)), None

    def append(self, hidden_states: torch.Tensor, context: DecodeContext) -> None:
        """Append the keys and values of normed hidden states [B, N, H] to the cache, without queries."""
        if len(self.family.qkv) == 3:
            k, v = (self.heads(getattr(self, name)(hidden_states)) for name in self.family.qkv[1:])
        else:
            _, k, v = self.split(getattr(self, self.family.qkv[0])(hidden_states))
        _, k, v = self.normed(None, k, v)
        cache = context.cache
        unused = k[:, :, :1]  # the op also rotates queries
        layer = cache.layer(self.original.layer_idx)
        tables = cache.tables_of(self.table)
        rope_append(unused, k, v, *tables, *layer, cache.lengths, context.depths, slots=cache.slots)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """View a projection's output [.., heads * D] as [.., heads, D]."""
        return x.view(*x.shape[:-1], -1, self.original.head_dim)

    def split(self, *projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """View the three projections' outputs, or their joint one, as q, k and v, each [.., B, N, heads, D].

        The joint output, [.., B, N, (Hq + 2 Hkv) D], decides the number of heads: in a tensor parallel model it is
        smaller than the config's.
        """
        if len(projected) == 3:
            q, k, v = map(self.heads, projected)
            return q, k, v
        heads = self.heads(projected[0])
        groups = self.original.num_key_value_groups
        kv_heads = heads.shape[-2] // (groups + 2)
        q, k, v = heads.split([groups * kv_heads, kv_heads, kv_heads], dim=-2)
        return q, k, v

    def normed(
        self, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm q and k [B, N, heads, D] if the family does that; without q, k takes its place in the result."""
        if self.family.normed is None:
            return k if q is None else q, k, v
        joint = self.family.normed == "projections"
        norms = [(k if q is None else q, self.q_norm), (k, self.k_norm)]
        done = [norm(x.flatten(-2)).view_as(x) if joint else norm(x) for x, norm in norms[q is None :]]
        return done[0], done[-1], v

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: DecodeContext, *, norm_heads: bool = False
    ) -> torch.Tensor:
        """Rotate q and k, append k and v to the cache and attend.

        Takes q [B, N, Hq, D], k and v [B, N, Hkv, D], or fp32 parts of them (see `rope_append`), not yet rotated, and
        normed if the family does that, unless `norm_heads` leaves it to this method. Returns [B, N, Hq * D], the input
        of the output projection.
        """
        cache = context.cache
        options: dict[str, Any] = {"slots": cache.slots}
        if norm_heads:
            options |= {"q_norm": self.q_norm.weight, "k_norm": self.k_norm.weight}
            options |= {"eps": getattr(self.q_norm, self.family.epsilon), "norm_offset": self.family.norm_offset}
        k_cache, v_cache = cache.layer(self.original.layer_idx)
        tables = cache.tables_of(self.table)
        q = rope_append(q, k, v, *tables, k_cache, v_cache, cache.lengths, context.depths, **options)
        settings: dict[str, Any] = {"scale": self.original.scaling, "window": self.window, "softcap": self.softcap}
        if context.ancestors is None:
            out = prefill_attention(q, k_cache, v_cache, cache.lengths, context.offset, places=cache.places, **settings)
        else:
            settings |= {"slots": cache.slots}
            out = tree_attention(q, k_cache, v_cache, cache.lengths, context.ancestors, **settings)
        return out.reshape(*out.shape[:2], -1)


def _identity(module: nn.Module) -> nn.Module:
    return module


class AttentionSwap(contextlib.AbstractContextManager["AttentionSwap"]):
    """The swap of one model's attention modules; `undo` (or leaving the `with` block) restores them exactly.

    Several swaps of one model share the swapped modules; the last `undo` restores. A garbage-collected swap is undone,
    so that no model stays swapped without an owner. In between, `suspend` gives the model its own modules back, and
    `resume` installs the same swapped modules again, so that captured graphs stay valid.

    Args:
        layers: the model's decoder layers, each with a `self_attn`.

    Attributes:
        layers: the same as a list.

    A layer that cannot be swapped is a `ValueError`; nothing is swapped then.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers: list[Any] = list(layers)
        self._swapped: list[TreeAttention] = []
        self._held: list[Any] = []
        self._restore = weakref.finalize(self, _restore, self._held)
        self._restore.atexit = False
        self._suspended = True
        self.resume()

    @property
    def active(self) -> bool:
        """Whether the swap is in force: neither undone nor suspended."""
        return self._restore.alive and not self._suspended

    def check(self, layers: nn.ModuleList) -> None:
        """Raise `ValueError` for other layers than the swapped ones, or one whose attention was replaced (by peft)."""
        if list(layers) != self.layers:
            raise ValueError("layers: expected the ones that were swapped, got others; undo, then swap again")
        for index, (layer, swapped) in enumerate(zip(self.layers, self._swapped, strict=True)):
            if layer.self_attn is not swapped:
                raise ValueError(
                    f"layer {index}: expected the attention as swapped, got {type(layer.self_attn).__name__} in its "
                    "place; undo, then swap again"
                )
            for name, now in swapped.family.settings_of(swapped.original).items():
                if now != swapped.settings[name]:
                    raise ValueError(
                        f"layer {index}: expected the {name} as swapped, {swapped.settings[name]}, got {now}; undo, "
                        "then swap again"
                    )

    def suspend(self) -> None:
        """Put the original modules back until `resume`; a second call does nothing."""
        self._suspended = True
        _restore(self._held)

    def resume(self) -> None:
        """Swap again, or raise `ValueError` and swap nothing; a layer that has its original gets the same module."""
        if not self._restore.alive:
            raise ValueError("AttentionSwap: expected a swap that was not undone, got one after undo()")
        if not self._suspended:
            return
        check_layers(self.layers)
        try:
            for layer, before in itertools.zip_longest(self.layers, self._swapped):
                with _SWAPPING:
                    self._held.append(_swap(layer, before))
        except BaseException:
            _restore(self._held)
            raise
        self._swapped = [layer.self_attn for layer in self.layers]
        self._suspended = False

    def undo(self) -> None:
        """Put the original modules back; a second call does nothing."""
        self._restore()

    def __exit__(self, *exc: object) -> None:
        self.undo()


def check_layers(layers: Iterable[Any]) -> None:
    """Raise `ValueError` for an attention of an unsupported class, or a layer wrapped in another module."""
    for index, layer in enumerate(layers):
        if "self_attn" not in getattr(layer, "_orig_mod", layer)._modules:  # _orig_mod: torch.compile's
            raise ValueError(f"layer {index}: expected a decoder layer itself, got one within {type(layer).__name__}")
        attention = layer.self_attn
        if not isinstance(attention, TreeAttention) and family_of(attention) is None:
            names = ", ".join(family.prefix for family in FAMILIES)
            raise ValueError(f"layer {index}: expected an attention of {names}, got {type(attention).__name__}")
        original = getattr(attention, "original", attention)
        family = family_of(original)
        other = None if family is None else family.check_window(original)
        if other is not None:
            raise ValueError(
                f"layer {index}: expected a window where its type in config.layer_types is sliding, got {other}"
            )


# Swaps of one model share its swapped modules and count their users. The lock is taken per layer, and is reentrant,
# since a garbage-collected swap may be undone at any point.
_SWAPPING = threading.RLock()


def _swap(layer: Any, before: TreeAttention | None) -> Any:
    """Swap a layer's attention if it is not swapped yet, count one more user, and return the layer."""
    if not isinstance(layer.self_attn, TreeAttention):
        original = layer.self_attn
        if before is None or before.original is not original or before.settings != before.family.settings_of(original):
            before = TreeAttention(original)
        before.training = original.training
        layer.self_attn = before
    layer.self_attn.users += 1
    return layer


def _restore(held: list[Any]) -> None:
    """Release swapped layers and empty the list; a layer without other users gets its own attention back."""
    while held:
        with _SWAPPING:
            # The module may have been wrapped since, and is then not the layer's self_attn; the wrapper stays.
            for parent in list(held.pop().modules()):
                for name, module in list(parent._modules.items()):
                    if isinstance(module, TreeAttention):
                        module.users -= 1
                        if module.users == 0:
                            parent._modules[name] = module.original
