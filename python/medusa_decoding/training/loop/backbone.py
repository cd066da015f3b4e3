"""The model that heads are trained on: loads it, freezes or adapts it, and returns its hidden states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from medusa_decoding.backbone.families import family_of
from medusa_decoding.backbone.layer_states import layer_states
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.training.config import Config, ModelConfig
from medusa_decoding.training.data.packing import model_inputs
from medusa_decoding.training.loss.language import without_adapter

NAME = "model.name"
"""The setting that names the model, for messages."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TrainingBackbone:
    """A causal language model as transformers loads it, with or without peft's wrapper (`lora`) around it.

    Its heads read states after `feature_layers` besides the last ones, see `MedusaHeads`.
    """

    def __init__(self, causal: Any, lora: Any = None, feature_layers: Sequence[int] = ()) -> None:
        self.causal = causal
        self.lora = lora
        self.feature_layers = tuple(feature_layers)

    @classmethod
    def load(cls, config: Config, device: torch.device, frozen: bool = False) -> TrainingBackbone:
        """Load the model of a configuration, with the adapter or the weights that the run trains unless it is `frozen`.

        On the device "meta" it has shapes only, and its weights are not read.
        """
        settings = config.model
        check_adaptable(config, None)
        dtype = DTYPES[settings.dtype]
        if config.trains_backbone and not config.lora.enabled and not frozen:
            dtype = torch.float32  # the optimiser's steps are smaller than 16 bits can add
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": settings.attention}
        if settings.quantization != "none":
            options |= {"quantization_config": _quantised(settings, dtype), "device_map": {"": device}}
        causal: Any
        shapes = pretrained.load_config(settings.name, settings.revision, argument=NAME)
        if settings.attention == "sdpa" and getattr(shapes, "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # PyTorch's function cannot cap scores
        if device.type == "meta":
            causal = pretrained.build_model(shapes, device, argument=NAME, **options)
        else:
            options |= pretrained.at(settings.revision)
            causal = pretrained.load_model(settings.name, argument=NAME, **options)
        for module in causal.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # On such CPUs a pass without gradients would repack 4-bit weights for a product that has no gradient.
                module.support_avx512bf16_for_cpu = False
        causal.requires_grad_(False)
        causal.eval()
        if settings.quantization == "none" and device.type != "meta":
            torch.nn.Module.to(causal, device)
        found = cls(causal, feature_layers=config.heads.feature_layers)
        if frozen:
            return found
        if config.lora.enabled:
            found.adapt(config)
        elif config.trains_backbone:
            causal.requires_grad_(True)
        if settings.gradient_checkpointing:
            causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return found

    def adapt(self, config: Config) -> None:
        """Add a LoRA adapter to the linear layers (B.2), including lm_head."""
        from peft import LoraConfig, get_peft_model

        lora = config.lora
        check_adaptable(config, self.causal.config)
        linear = (name for name, module in self.decoder.named_modules() if isinstance(module, nn.Linear))
        targets = {name.rpartition(".")[2] for name in linear}
        if lora.lm_head:
            targets |= {name for name, module in self.causal.named_modules() if module is self.lm_head}
        settings = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float in all but name
            lora_dropout=lora.dropout,
            target_modules=sorted(targets),
            bias="none",
            task_type="CAUSAL_LM",
        )
        self.lora = get_peft_model(self.causal, settings)

    @property
    def module(self) -> nn.Module:
        """The module with all weights, including the adapter's."""
        return self.causal if self.lora is None else self.lora

    @property
    def decoder(self) -> Any:
        """The model without its lm_head."""
        return self.causal.get_decoder()

    @property
    def lm_head(self) -> nn.Module:
        """The model's lm_head, with its adapter."""
        return self.causal.get_output_embeddings()

    def to_logits(self, adapted: bool = True) -> nn.Module:
        """Return what makes logits of states: lm_head, with or without its adapter, and what the family adds to it."""
        lm_head = self.lm_head if adapted else without_adapter(self.lm_head)
        family = family_of(self.causal, "ForCausalLM")
        return lm_head if family is None else family.logits(lm_head, self.causal.config)

    def hidden(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return what heads read of a batch from `packing.collate`, [B, T, (1 + F) H], see `layer_states`."""
        return layer_states(self.decoder, self.feature_layers, **model_inputs(batch))

    @contextlib.contextmanager
    def original(self) -> Iterator[None]:
        """Be the original model inside the block: without the adapter, without dropout.

        Leaves the adapter's weights alone. peft's own context also turns off `requires_grad`, which DDP must not see.
        """
        layers: list[Any] = [module for module in self.module.modules() if hasattr(module, "_disable_adapters")]
        before = [layer._disable_adapters for layer in layers]
        training = self.module.training
        self.module.eval()
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, value in zip(layers, before, strict=True):
                layer._disable_adapters = value
            self.module.train(training)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the weights that a run trains by name: the adapter's, all, or none."""
        return {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}


def check_adaptable(config: Config, model: Any) -> None:
    """Raise `ValueError` if a model of this transformers config cannot take the adapter, or cannot be trained."""
    if config.lora.enabled and config.lora.lm_head and getattr(model, "tie_word_embeddings", False):
        raise ValueError(
            "lora.lm_head: expected false for a model whose lm_head is tied to its embeddings (they would be "
            "adapted unseen), got true"
        )
    if config.model.dtype not in DTYPES:
        raise ValueError(f"model.dtype: expected one of {', '.join(DTYPES)} in training, got {config.model.dtype}")


def _quantised(settings: ModelConfig, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if settings.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def load_tokenizer(settings: ModelConfig) -> Any:
    """Return the model's tokenizer."""
    return pretrained.load_tokenizer(settings.name, settings.revision, argument=NAME)
