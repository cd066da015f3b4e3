"""Refuse models whose text decoding would not reproduce: whatever transformers' `generate` runs and decoding does not.

Decoding calls the embedding, the decoder layers with their norms, projections and MLPs, the final norm, lm_head and the
rotary embedding as modules: any subclass, patch, hook or adapter there takes effect. It does not call `forward` of the
causal language model, its decoder and the attention modules, the functions that these call, or `METHODS`. `check`
refuses versions of these that are not transformers' own, by name.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from medusa_decoding.linears.reading import is_hooked

PACKAGES = {"torch", "transformers", "peft", "accelerate", "kernels"}
"""Packages whose versions of these functions do what decoding does."""
ATTENTION_FUNCTIONS = {
    "eager_attention_forward", "sdpa_attention_forward", "flash_attention_forward", "flex_attention_forward",
    "eager_paged_attention_forward", "sdpa_attention_paged_forward", "paged_attention_forward",
}  # fmt: skip
"""Functions of transformers that compute plain attention; others are block-sparse, for example."""
METHODS = (
    "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_sample",
    "_has_unfinished_sequences",
)  # fmt: skip
"""Methods of a causal language model that transformers' loop calls and decoding replaces."""
METHODS_BEFORE = (
    "_prepare_generation_config", "_prepare_special_tokens", "_prepare_model_inputs", "_get_stopping_criteria",
)  # fmt: skip
"""Methods that transformers' `generate` calls before its loop, and `MedusaModel.generate` does not."""

_CALLED = "embed_tokens, a decoder layer, an MLP, a norm, lm_head"


def check(base: Any, causal: Any, now: bool = True) -> None:
    """Raise `ValueError` if decoding would not write the same text as a model's own `generate`.

    Call this before each generation: hooks, patches, adapters and modes may change. `base` is the caller's model
    (possibly peft's), `causal` the language model in it. `now` says that decoding follows, so that active adapters,
    training mode and autocast matter.
    """
    decoder = causal.model
    attentions = [getattr(layer.self_attn, "original", layer.self_attn) for layer in decoder.layers]
    not_called = {"base_model": causal, "base_model.model": decoder}
    not_called |= {f"base_model.model.layers.{index}.self_attn": module for index, module in enumerate(attentions)}
    for name, module in not_called.items():
        if is_hooked(module):
            whose = " of accelerate's (accelerate.hooks.remove_hook_from_module)" if hasattr(module, "_hf_hook") else ""
            raise ValueError(
                f"{name}: expected no forward hooks on {type(module).__name__}, which decoding does not call, got some"
                f"{whose}; remove them, or hook a module that decoding calls ({_CALLED})"
            )
        _check_class(name, type(module))
    if type(causal.lm_head) is nn.Linear:  # its weight is read
        _check_class("base_model.lm_head", nn.Linear)
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        raise ValueError(
            "base_model: expected no global forward hooks (torch.nn.modules.module.register_module_..), got some; "
            "decoding does not call all modules. Hook single modules instead"
        )
    check_methods(causal, METHODS)
    for cls in {type(module) for module in not_called.values()}:
        _check_called(cls)
    # Layers usually share one config: check one layer per config, the first.
    for index in {id(attention.config): index for index, attention in reversed([*enumerate(attentions)])}.values():
        _check_attention_function(f"base_model.model.layers.{index}.self_attn", attentions[index])
    count = decoder.config.num_hidden_layers
    if len(decoder.layers) > count:
        raise ValueError(
            f"base_model.model.layers: expected at most config.num_hidden_layers = {count}, as transformers runs no "
            f"more, got {len(decoder.layers)}; set it to the number of layers"
        )
    if not all(getattr(one, "is_causal", True) for one in (decoder.config, *attentions)):
        raise ValueError("base_model: expected causal attention, got is_causal=False in the config or an attention")
    _check_modules(causal, now)
    if now:
        _check_adapters(base, causal)
    if now and torch.is_autocast_enabled(next(causal.parameters()).device.type):
        raise ValueError("autocast: expected off (load the model in the dtype it shall run in), got on")


def foreign_forward(cls: type[nn.Module]) -> str | None:
    """Return the name of a class's `forward` or `__call__` if it is not of `PACKAGES`."""
    return _foreign(cls.forward) or _foreign(cls.__call__)


def without_recording_hooks(layer: Any) -> Any:
    """Return what to call for a layer: its forward if its only hooks are transformers' that record outputs.

    torch.compile cannot trace these hooks, and they do nothing here.
    """
    plain = layer._forward_hooks and layer._compiled_call_impl is None and not is_hooked(layer)
    return layer.forward if plain and _foreign(type(layer).__call__) is None else layer


_known: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions known to be of `PACKAGES`."""


def _foreign(function: Any) -> str | None:
    """Return the name of a function, or of one that it wraps, if that is not of `PACKAGES`; else None."""
    if function in _known:
        return None
    found = function
    while found is not None:
        if isinstance(found, functools.partial):
            found = found.func
            continue
        found = getattr(found, "__func__", found)
        # The name of the file: functools.wraps copies __module__ from the wrapped function.
        names = getattr(found, "__globals__", {})
        package = names.get("__name__") or getattr(found, "__module__", None) or type(found).__module__
        if package.partition(".")[0] not in PACKAGES:
            return f"{package}.{getattr(found, '__qualname__', type(found).__qualname__)}"
        found = getattr(found, "__wrapped__", None)
    _known.add(function)
    return None


def _check_class(name: str, cls: type[nn.Module]) -> None:
    other = foreign_forward(cls)
    if other is not None:
        raise ValueError(
            f"{name}: expected the forward of torch or transformers, got {cls.__name__}'s ({other}), which decoding "
            f"does not call; put what it does into a module that decoding calls ({_CALLED}), or use transformers' own "
            "generate"
        )


def check_methods(causal: Any, names: Sequence[str] = METHODS_BEFORE) -> None:
    """Raise `ValueError` if a model overrides one of these methods, by default those before transformers' loop."""
    for name in names:
        function, own = getattr(type(causal), name, None), vars(causal).get(name)
        other = None if function is None else _foreign(function)
        if own is not None and getattr(own, "__func__", None) is not function:
            other = "an attribute of this object"
        if other is not None:
            raise ValueError(
                f"base_model: expected transformers' own {name}, got {type(causal).__name__}'s ({other}), which "
                "decoding does not call; use transformers' own generate"
            )


def _check_called(cls: type[nn.Module]) -> None:
    """Check the functions that a class's `forward` calls from its file: rotation, masks, the cache."""
    forward: Any = inspect.unwrap(cls.forward)
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        other = _foreign(function) if callable(function) else None
        if other is not None:
            raise ValueError(
                f"base_model: expected transformers' own {name} in {forward.__module__}, got {other}, which decoding "
                "does not call; use transformers' own generate"
            )


def _check_attention_function(name: str, attention: Any) -> None:
    implementation = attention.config._attn_implementation
    names: Any = inspect.unwrap(type(attention).forward).__globals__
    function = names["ALL_ATTENTION_FUNCTIONS"].get(implementation, names["eager_attention_forward"])
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    other = _foreign(function) or (_foreign(mask) if mask is not None else None)
    plain = getattr(getattr(function, "func", function), "__name__", None)  # func: of a partial one
    if other is None and plain not in ATTENTION_FUNCTIONS:
        other = plain or repr(function)
    if other is not None:
        raise ValueError(
            f"{name}: expected transformers' own plain attention (sdpa, eager, flash_attention_2, ..), got {other} as "
            f"attention implementation {implementation!r}, which decoding does not call; call "
            "set_attn_implementation('sdpa') on the model, or use transformers' own generate"
        )


def _check_adapters(base: Any, causal: Any) -> None:
    """Refuse active peft adapters that depend on more than the hidden states.

    Activated LoRA applies after its invocation tokens, and X-LoRA runs the model before each forward pass: both happen
    in the forward of peft's own model.
    """
    for name, config in (getattr(base, "peft_config", {}) if base is not causal else {}).items():
        if getattr(config, "peft_type", None) == "XLORA" and not getattr(base.base_model, "disabled", False):
            raise ValueError(f"base_model: expected no X-LoRA, got adapter {name}; use transformers' own generate")
    configs = getattr(causal, "peft_config", {})
    invoked = {name for name, config in configs.items() if getattr(config, "alora_invocation_tokens", None)}
    for module in causal.modules() if invoked else ():
        if isinstance(getattr(module, "lora_variant", None), dict) and not module.disable_adapters:
            active = sorted(invoked.intersection(module.active_adapters))
            if active:
                raise ValueError(f"base_model: expected no activated LoRA (invocation tokens), got adapter {active[0]}")


def _check_modules(causal: nn.Module, now: bool) -> None:
    devices: set[torch.device] = set()
    for module in _modules(causal):
        devices.update([weight.device for weight in module._parameters.values() if weight is not None])
        if now and module.training:
            _check_training(causal, module)
    if len(devices) != 1:
        raise ValueError(f"base_model: expected on one device, got {sorted(map(str, devices))}")


def _modules(*roots: nn.Module) -> Iterator[nn.Module]:
    """Yield modules and all their submodules; nn.Module.modules takes several times as long."""
    pending = list(roots)
    while pending:
        module = pending.pop()
        pending += [child for child in module._modules.values() if child is not None]
        yield module


def _check_training(causal: nn.Module, module: Any) -> None:
    """Refuse a module whose training mode changes the text."""
    what = None
    if "Dropout" in type(module).__name__:
        what = getattr(module, "p", 0.0) and f"dropout, got {module.p}"
    elif getattr(module, "jitter_noise", 0):
        what = f"noise on what experts get, got {module.jitter_noise}"
    elif "self_attn" in module._modules:  # a decoder layer, whose attention drops what it attends to
        if getattr(module, "gradient_checkpointing", False):
            what = "gradient checkpointing (before 5.24, transformers decodes without its cache then), got it"
        elif module.self_attn.training and module.self_attn.attention_dropout:
            module, what = module.self_attn, f"dropout, got {module.self_attn.attention_dropout}"
    if what:
        name = next(name for name, found in causal.named_modules() if found is module)
        raise ValueError(
            f"base_model.{name}: expected no {what} in training mode; call eval() on the model before generate"
        )
