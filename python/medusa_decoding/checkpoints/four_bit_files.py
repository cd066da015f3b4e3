"""Load GPTQ and AWQ checkpoints of 4 bits into `PackedLinear`, without the library that made them.

transformers loads them through gptqmodel, which needs a compiler. Here transformers reads the files' tensors into
placeholders; each is then repacked, one after the other, so that the weights are never held twice.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from medusa_decoding.checkpoints.tensor_files import open_tensors
from medusa_decoding.linears.packed import PackedLinear
from medusa_kernels import Projection, quantised

METHOD = "medusa-packed"
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word of eight AWQ codes each column is."""


def for_reading(config: PretrainedConfig) -> PretrainedConfig:
    """Return a model's config, with this module's quantisation in place of GPTQ's or AWQ's of 4 bits."""
    stated = getattr(config, "quantization_config", None)
    if not isinstance(stated, dict):
        return config
    bits, method = stated.get("bits", stated.get("w_bit")), stated.get("quant_method")
    form = str(stated.get("checkpoint_format") or stated.get("version") or stated.get("format") or "").lower()
    forms = {"gptq": ("", "gptq", "gptq_v2"), "awq": ("", "gemm")}.get(str(method), ())
    if bits != 4 or form not in forms or stated.get("dynamic") or stated.get("pack_dtype", "int32") != "int32":
        return config
    found, group = copy.deepcopy(config), stated.get("group_size", stated.get("q_group_size", 128))
    found.quantization_config = {"quant_method": METHOD, "form": form or method, "group": group, "stated": stated}
    return found


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """How the files' weights are stored: "gptq", "gptq_v2", or AWQ's "gemm" or "awq"; what config.json stated."""

    def __init__(self, form: str, group: int, stated: dict[str, Any], **_: Any) -> None:
        self.quant_method: Any = METHOD
        self.form, self.group, self.stated = form, group, stated

    @property
    def awq(self) -> bool:
        """Whether the files are AWQ's."""
        return self.form in ("awq", "gemm")


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """Reads the weights of a model's files."""

    requires_calibration = True
    quantization_config: PackedConfig

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = (), **_: Any) -> None:
        prefix = f"{model.base_model_prefix}."
        linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        for file in checkpoint_files:
            tensors = open_tensors(Path(file))
            for key in tensors:
                name = key.removesuffix(".qweight")
                name = name if name in linears else prefix + name
                if key.endswith(".qweight") and name in linears:
                    beside = {one for one in ("g_idx", "bias") if key.removesuffix("qweight") + one in tensors}
                    scales = tensors.get(key.removesuffix("qweight") + "scales")
                    dtype = scales.dtype if scales is not None and isinstance(scales.dtype, torch.dtype) else torch.half
                    model.set_submodule(name, _Stored(linears[name], self.quantization_config, dtype, beside))
        if not any(isinstance(module, _Stored) for module in model.modules()):
            raise ValueError("expected quantised weights (qweight) as config.json says, got none")

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        model.config.quantization_config = self.quantization_config.stated
        for name, module in list(model.named_modules()):
            if isinstance(module, _Stored):
                model.set_submodule(name, module.packed(name))
        return model

    def is_serializable(self) -> bool:
        """No: the files themselves are the saved model."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No."""
        return False


class _Stored(nn.Module):
    """The tensors of a linear layer as GPTQ or AWQ store them."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, config: PackedConfig, dtype: torch.dtype, beside: set[str]) -> None:
        super().__init__()
        self.form, self.awq = config.form, config.awq
        self.columns, rows = linear.in_features, linear.out_features
        self.group = self.columns if config.group == -1 else config.group
        fits = isinstance(self.group, int) and self.group > 0 and self.group % quantised.GROUP_MULTIPLE == 0
        if not fits or self.columns % self.group or rows % 8:
            raise ValueError(
                f"group_size: expected a multiple of {quantised.GROUP_MULTIPLE} that divides the {self.columns} "
                f"columns of a weight, and a multiple of 8 rows, got {config.group!r} and {rows}"
            )
        groups = self.columns // self.group
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "qweight": ((self.columns, rows // 8) if self.awq else (self.columns // 8, rows), torch.int32),
            "qzeros": ((groups, rows // 8), torch.int32),
            "scales": ((groups, rows), dtype),
        }
        if "g_idx" in beside:
            shapes["g_idx"] = (self.columns,), torch.int32
        if "bias" in beside:  # some files have one of zeros where the model has none
            shapes["bias"] = (rows,), linear.weight.dtype
        for name, (shape, kind) in shapes.items():
            empty = torch.empty(shape, dtype=kind, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        if "bias" not in beside:
            self.register_parameter("bias", linear.bias)

    def packed(self, name: str) -> PackedLinear:
        """Return the layer; `name` is for messages."""
        order = None
        if self.awq:
            weight = quantised.pack(_columns(self.qweight, _AWQ_PLACES).T.contiguous())
            zero = _columns(self.qzeros, _AWQ_PLACES).T
        else:  # a word has eight columns, in the order of `quantised`
            weight = self.qweight.detach().T.contiguous().view(torch.uint8)
            # Except in gptq_v2, zero points are stored less 1.
            zero = _columns(self.qzeros, list(range(8))).T + (self.form != "gptq_v2")
        groups = self._parameters.get("g_idx")
        expected = (torch.arange(self.columns) // self.group).to(weight.device, torch.int32)
        if groups is not None and not torch.equal(groups, expected):
            order = groups.detach().argsort(stable=True)
            if not torch.equal(groups[order], expected):
                raise ValueError(f"{name}.g_idx: expected each group {self.group} times, got another number")
            weight = quantised.pack(quantised.values(weight, "int4")[:, order])
        needs_zero = bool((zero != quantised.MIDDLE).any())
        scale = self.scales.detach().T.float().contiguous()
        bias = self.bias if self.bias is not None and bool(self.bias.any()) else None
        return PackedLinear(Projection(weight, bias, scale, zero.contiguous() if needs_zero else None), order)


def _columns(words: Tensor, places: list[int]) -> Tensor:
    """Return the codes of int32 words [.., n / 8] as uint8 [.., n]; `places` says where in a word each one is."""
    held = words.detach().contiguous().view(torch.uint8)
    return torch.stack((held & 15, held >> 4), -1).flatten(-2).unflatten(-1, (-1, 8))[..., places].flatten(-2)
