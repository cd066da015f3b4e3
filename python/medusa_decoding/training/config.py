"""All settings of a training run, with their defaults and sources; `medusa train --config FILE.yaml`.

The defaults are those of the paper's appendix B ("B.2", "B.3", "B.4"), except that nothing is quantised and answers are
sampled as the model is deployed. Settings that the paper does not mention are marked. The method decides some of the
defaults (`PRESETS`). This module knows no training libraries.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from medusa_decoding.training import config_schema
from medusa_decoding.training.config_schema import REQUIRED, STRICT, setting

Method = Literal["medusa-1", "medusa-2", "self-distillation"]
OURS = "ours; the papers do not say"
DEFAULT_HELD_OUT_SHARE = 0.02
POSITIVE = {"gt": 0, "allow_inf_nan": False}
NOT_NEGATIVE = {"ge": 0, "allow_inf_nan": False}
SHARE = {"ge": 0, "lt": 1}
SEED = {"ge": 0, "lt": 2**32}
WORDS = {"pattern": r"\S"}


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The backbone."""

    name: str = setting(REQUIRED, "folder or hub id of the base model", "", **WORDS)
    revision: str | None = setting(None, "branch, tag or commit on the hub", OURS)
    dtype: Literal["bfloat16", "float16", "float32"] = setting(
        "bfloat16", "dtype of weights that are not quantised", OURS
    )
    quantization: Literal["none", "8bit", "4bit"] = setting(
        "none",
        "of the frozen weights, with bitsandbytes; heads fit the model that they learn from",
        "ours; B.3: 4bit",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = setting(
        "sdpa", "implementation in transformers", OURS
    )
    gradient_checkpointing: bool = setting(False, "recompute activations instead of storing them", OURS)


@dataclass(frozen=True, config=STRICT)
class HeadsConfig:
    """The heads."""

    num_heads: int = setting(5, "K", "B.2; 2.2.3", ge=1)
    num_layers: int = setting(1, "residual blocks per head", "B.2", ge=1)
    bias: bool = setting(True, "of the residual blocks", "the authors' checkpoints")
    shared_projection: bool = setting(False, "project with the model's lm_head instead of own matrices", "2.1.1: own")
    token_map_size: int | None = setting(
        None, "size of a trimmed vocabulary: the tokens most frequent in the data; null for all", OURS, ge=1
    )
    parent_rank: int = setting(
        0, "rank of the term that adds the parent token to a head's prediction; 0 for none", OURS, ge=0
    )
    root_rank: int = setting(
        0, "rank of the term that adds the root token's embedding to every head's input; 0 for none", OURS, ge=0
    )
    feature_layers: tuple[int, ...] = setting(
        (), "after how many layers heads read states besides the last one, ascending", OURS
    )
    initial: str | None = setting(
        None, "folder of heads to start from; null: W1 zero, W2 the lm_head", "2.1.1", **WORDS
    )


@dataclass(frozen=True, config=STRICT)
class SourceConfig:
    """One place that data comes from."""

    path: str = setting(REQUIRED, "file, folder or hub id", "", **WORDS)
    format: Literal["auto", "sharegpt", "messages", "turns", "prompt", "text"] = setting(
        "auto", "of its records; auto: by their keys", OURS
    )
    split: str = setting("train", "of a hub dataset", OURS, **WORDS)
    subset: str | None = setting(None, "configuration of a hub dataset", OURS)
    revision: str | None = setting(None, "branch, tag or commit of a hub dataset", OURS)


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """What the heads learn from, and how it is put in rows."""

    train: tuple[SourceConfig, ...] = setting(REQUIRED, "training data (the papers: ShareGPT)", "B.3", min_length=1)
    held_out: tuple[SourceConfig, ...] = setting((), "data to measure on; empty: a share of the training data", OURS)
    held_out_share: float | None = setting(
        None,
        f"share of prompts held out, by hash; null: {DEFAULT_HELD_OUT_SHARE} unless held_out is given",
        OURS,
        **SHARE,
    )
    split_seed: int = setting(0, "seed of that hash", OURS)
    answers: Literal["own", "given"] | None = setting(
        None,
        "to learn: own, the model's (medusa distill); given, the data's (medusa train); null: by the command",
        OURS,
    )
    limit: int | None = setting(None, "how many conversations to read; null for all", OURS, ge=1)
    template: str = setting("auto", "auto: the tokenizer's; vicuna; plain; or a Jinja file", OURS, **WORDS)
    template_arguments: dict[str, Any] = setting(dict, "further variables of the template (enable_thinking)", OURS)
    system: str | None = setting(None, "system message of conversations without one", OURS, **WORDS)
    turns: Literal["joint", "each"] = setting(
        "joint", "joint: learn all assistant turns of a conversation at once; each: one copy per turn", OURS
    )
    length: int = setting(4096, "tokens per row", "3.1: Vicuna 1.5's own; B.4: 2048", ge=8)
    overlong: Literal["truncate", "drop", "split"] = setting(
        "truncate", "what becomes of conversations longer than a row", OURS
    )
    pack: bool = setting(True, "several conversations per row; none sees another", OURS)
    max_bad_share: float = setting(0.01, "largest share of unreadable records that is not an error", OURS, **SHARE)
    cache_hidden: str | None = setting(None, "folder that stores hidden states for later epochs", OURS, **WORDS)

    def __post_init__(self) -> None:
        if self.cache_hidden is not None:
            object.__setattr__(self, "cache_hidden", os.path.expanduser(self.cache_hidden))


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """The adapter on the backbone."""

    enabled: bool = setting(False, "train an adapter instead of the backbone's own weights; on for Medusa-2", "B.2")
    rank: int = setting(32, "of the adapter", "B.2", ge=1)
    alpha: float = setting(16.0, "its scale is alpha / rank", "B.2", **POSITIVE)
    dropout: float = setting(0.05, "of its input", "B.2", **SHARE)
    lm_head: bool = setting(True, "adapt lm_head too", "B.2")


@dataclass(frozen=True, config=STRICT)
class LossConfig:
    """Targets and weights in the loss."""

    targets: Literal["hard", "kl"] = setting(
        "hard",
        "what heads learn: hard, the text's tokens; kl, the model's own distributions",
        "2.2.1: hard",
    )
    head_decay: float = setting(0.8, "lambda_k is its k-th power, k from 1", "2.2.1; B.2", gt=0, le=1)
    lambda_0: float | None = setting(
        None,
        "weight of the heads' loss next to the model's own; Medusa-2: 0.2, self-distillation: 0.01",
        "B.3; B.4",
        **POSITIVE,
    )
    lambda_0_schedule: Literal["constant", "sine"] = setting(
        "constant", "sine: a quarter wave up to lambda_0 at the end of training", "2.2.2; B.4: sine"
    )


@dataclass(frozen=True, config=STRICT)
class OptimisationConfig:
    """Steps and rates."""

    optimizer: Literal["adamw_8bit", "adamw"] = setting("adamw_8bit", "adamw_8bit is that of bitsandbytes", "B.2")
    learning_rate: float = setting(5e-4, "peak rate of the backbone; self-distillation: 1e-4", "B.3; B.4", **POSITIVE)
    heads_factor: float = setting(
        4.0, "the heads' rate over the backbone's (Medusa-1 has the same 2e-3)", "B.2", **POSITIVE
    )
    schedule: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "after a linear warm-up; cosine and linear end at 0", "B.2: cosine"
    )
    warmup_steps: int | None = setting(
        None, "of each stage; null: 40 (self-distillation: 20), at most a quarter of its steps", "B.3; B.4", ge=0
    )
    warmup_share: float | None = setting(
        None,
        "of each stage's steps, instead of warmup_steps; 0.3 with cosine is one cycle",
        "arXiv 1708.07120",
        **SHARE,
    )
    epochs: float = setting(2.0, "over the data, of the last or only stage", "3.1", **POSITIVE)
    heads_first_epochs: float = setting(
        0.0, "first stage, heads alone; Medusa-2: 2 unless heads.initial is given", "2.2.2; B.3", **NOT_NEGATIVE
    )
    max_steps: int | None = setting(None, "most steps per stage; null: by epochs", OURS, ge=1)
    patience: int | None = setting(
        None,
        "end after so many evaluations that are worse than the best; null: never (the best heads are kept anyway)",
        OURS,
        ge=1,
    )
    batch_size: int = setting(64, "rows per step, over all processes; self-distillation: 128", "B.3; 3.2", ge=1)
    micro_batch_size: int = setting(1, "rows that a process computes at a time", OURS, ge=1)
    weight_decay: float = setting(0.0, "of matrices", OURS, **NOT_NEGATIVE)
    beta_1: float = setting(0.9, "of AdamW", "its usual value", **SHARE)
    beta_2: float = setting(0.999, "of AdamW", "its usual value", **SHARE)
    epsilon: float = setting(1e-8, "of AdamW", "its usual value", **POSITIVE)
    max_gradient_norm: float | None = setting(
        1.0, "gradients are clipped to this norm; null: no clipping", OURS, **POSITIVE
    )
    seed: int = setting(0, "of initial weights, data order and dropout", OURS, **SEED)
    sharding: Literal["auto", "none", "full"] = setting(
        "auto", "full: weights sharded over the processes (FSDP); auto: as accelerate launch --use_fsdp says", OURS
    )


@dataclass(frozen=True, config=STRICT)
class OutputConfig:
    """What is written."""

    folder: str = setting(REQUIRED, "checkpoints, logs and the trained heads", "", **WORDS)
    checkpoint_steps: int = setting(200, "steps between checkpoints", OURS, ge=1)
    keep_checkpoints: int = setting(2, "how many of the last checkpoints to keep", OURS, ge=1)
    log_steps: int = setting(10, "steps between log lines", OURS, ge=1)
    evaluate_steps: int | None = setting(None, "steps between evaluations; null: at the end of each epoch", OURS, ge=1)
    trackers: tuple[str, ...] = setting(
        ("tensorboard",), "of accelerate that get the log too: tensorboard, wandb, mlflow, ...; []: none", OURS
    )
    merge: bool = setting(
        True,
        "write the model with the adapter merged in, not the adapter; never if weights are quantised or sharded",
        OURS,
    )
    push_to_hub: str | None = setting(
        None, "repository, OWNER/NAME, that the heads are uploaded to after the run, with their card", OURS, **WORDS
    )
    push_private: bool = setting(True, "create it as a private one, and upload to no public one", OURS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", os.path.expanduser(self.folder))


@dataclass(frozen=True, config=STRICT)
class GenerationConfig:
    """How the model writes its own training data in `medusa distill` (2.3.2). The seeds are in data.train."""

    heads: str | None = setting(
        None, "folder or hub id of heads to generate with; null: heads.initial, or plain decoding", OURS, **WORDS
    )
    max_new_tokens: int = setting(512, "most tokens per answer", OURS, ge=1)
    temperature: float | None = setting(
        None,
        "of sampling; 0: greedy; null: as the model's generation_config says, greedy without do_sample",
        "ours; 3.2: 0.3",
        **NOT_NEGATIVE,
    )
    top_p: float | None = setting(None, "nucleus of sampling; 1: all tokens; null: the model's own", OURS, **POSITIVE)
    top_k: int | None = setting(None, "tokens to sample from; 0: all; null: the model's own", OURS, ge=0)
    min_p: float | None = setting(
        None, "least probability of a token, relative to the most likely; null: the model's own", OURS, **SHARE
    )
    quantized: bool = setting(
        False, "let a model that is quantised (model.quantization) answer: it is deployed that way", OURS
    )
    endpoint: str | tuple[str, ...] | None = setting(
        None, "base URL of a server that answers, such as http://host:8000/v1, or several; null: this process", OURS
    )
    endpoint_model: str | None = setting(None, "the model's name there; null: the first of its /models", OURS, **WORDS)
    turns: int = setting(4, "most user turns of a seed that are answered", OURS, ge=1)
    prompt_tokens: int = setting(128, "tokens at the start of a text that are its prompt", OURS, ge=1)
    batch_size: int = setting(8, "answers generated at once; with an endpoint, requests at once", OURS, ge=1)
    seed: int = setting(0, "of sampling", OURS, **SEED)


PRESETS: dict[str, dict[str, Any]] = {
    "medusa-1": {},
    "medusa-2": {
        "lora": {"enabled": True},
        "loss": {"lambda_0": 0.2},
        "optimisation": {"heads_first_epochs": 2.0},
    },
    "self-distillation": {
        "data": {"length": 2048},
        "lora": {"enabled": True},
        "loss": {"lambda_0": 0.01, "lambda_0_schedule": "sine"},
        "optimisation": {"learning_rate": 1e-4, "batch_size": 128},
    },
}
"""What a method changes in the defaults (B.3 for Medusa-2, B.4 and 2.3.2 for self-distillation)."""


REMOVED = (
    ("heads", "storage", "float", "leave it out, and run `medusa export --storage` after training"),
    ("lora", "target", "all-linear", "leave it out: the adapter is on all linear layers"),
    ("loss", "chunk", None, "leave it out: 128 MiB of logits are in memory at a time, 256 MiB on a GPU"),
)
"""Settings of versions up to 0.3 (section, name), the value that is still read, and what to do with another."""


@dataclass(frozen=True, config=STRICT)
class Config:
    """All settings of a run.

    Raises:
        ValueError: a wrong type, a value out of range, or settings that exclude each other; names the key's path.
    """

    model: ModelConfig = setting(REQUIRED, "the backbone")
    data: DataConfig = setting(REQUIRED, "the data")
    output: OutputConfig = setting(REQUIRED, "what is written")
    method: Method = setting("medusa-1", "which of the papers' recipes", "2.2.1; 2.2.2; 2.3.2")
    heads: HeadsConfig = setting(HeadsConfig, "the heads")
    lora: LoraConfig = setting(LoraConfig, "the adapter")
    loss: LossConfig = setting(LossConfig, "targets and weights in the loss")
    optimisation: OptimisationConfig = setting(OptimisationConfig, "steps and rates")
    generation: GenerationConfig = setting(GenerationConfig, "the model's own data")

    def __post_init__(self) -> None:
        for key, expected in self._exclusions():
            value = operator.attrgetter(key)(self)
            raise ValueError(f"{key}: expected {expected}, got {config_schema.value_text(value)}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Make a configuration from a mapping, as YAML gives it, and the defaults of its method.

        Raises:
            ValueError: as the class, and for unknown and missing keys.
        """
        if isinstance(values, Mapping):
            method, heads = values.get("method"), values.get("heads")
            preset = PRESETS.get(method, {}) if isinstance(method, str) else {}
            output = values.get("output")
            if isinstance(output, Mapping) and isinstance(output.get("tensorboard"), bool) and "trackers" not in output:
                # The only tracker of versions up to 0.3.
                output = {**output, "trackers": ["tensorboard"] if output["tensorboard"] else []}
                values = {**values, "output": {name: output[name] for name in output.keys() - {"tensorboard"}}}
            for section, name, value, instead in REMOVED:
                part = values.get(section)
                if isinstance(part, Mapping) and name in part:
                    if part[name] != value:
                        raise ValueError(f"{section}.{name}: {instead}")
                    values = {**values, section: {key: part[key] for key in part if key != name}}
            if isinstance(heads, Mapping) and heads.get("initial") is not None:  # trained heads need no first stage
                preset = preset | {"optimisation": preset.get("optimisation", {}) | {"heads_first_epochs": 0.0}}
            given = {name: values.get(name, {}) for name in preset}
            sections = {name: {**preset[name], **part} for name, part in given.items() if isinstance(part, Mapping)}
            values = {**values, **sections}
        return config_schema.build(cls, values)

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """Read a YAML file; see `of`."""
        return cls.of(config_schema.read_yaml(path))

    def to_yaml(self) -> str:
        """Return all settings as YAML; reading it gives an equal configuration."""
        return config_schema.write_yaml(self)

    @property
    def trains_backbone(self) -> bool:
        """Whether the backbone (or its adapter) is trained in the last stage."""
        return self.method != "medusa-1"

    @property
    def held_out_share(self) -> float:
        """Share of the training prompts that is held out."""
        if self.data.held_out_share is not None:
            return self.data.held_out_share
        return 0.0 if self.data.held_out else DEFAULT_HELD_OUT_SHARE

    def warmup_steps(self, steps: int) -> int:
        """Return the warm-up steps of a stage of so many steps."""
        rates = self.optimisation
        if rates.warmup_share is not None:
            return int(rates.warmup_share * steps)
        usual = min(20 if self.method == "self-distillation" else 40, steps // 4)
        return usual if rates.warmup_steps is None else rates.warmup_steps

    def warnings(self) -> list[str]:
        """Return warnings about settings that work but are easily overlooked: a quantised model is another model."""
        if self.model.quantization == "none" or self.generation.quantized:
            return []
        words = (
            "model's states the input of the heads (the paper's setting, B.3); they predict best for a model that "
            "is served quantised in the same way, or set none"
        )
        if self.method == "self-distillation":
            words = "model the teacher (the paper advises against it, section 2.3.2)"
        return [f"model.quantization: {self.model.quantization} makes the quantised {words}"]

    def _exclusions(self) -> Iterator[tuple[str, str]]:
        model, data, heads, lora, loss = self.model, self.data, self.heads, self.lora, self.loss
        rates, method, quantised = self.optimisation, self.method, self.model.quantization != "none"
        if method == "medusa-1":
            if lora.enabled:
                yield "lora.enabled", "false with method medusa-1 (frozen backbone)"
            if loss.lambda_0 is not None:
                yield "loss.lambda_0", "null with method medusa-1 (it has only the heads' loss)"
            if rates.heads_first_epochs > 0:
                yield "optimisation.heads_first_epochs", "0 with method medusa-1 (its only stage trains heads alone)"
        else:
            if loss.lambda_0 is None:
                yield "loss.lambda_0", f"a number with method {method}"
            if quantised and not lora.enabled:
                quantization = f"model.quantization {model.quantization}"
                yield "lora.enabled", f"true with {quantization} (quantised weights cannot be trained)"
            if data.cache_hidden is not None:
                yield "data.cache_hidden", f"null with method {method} (hidden states change during training)"
            if rates.patience is not None:
                yield "optimisation.patience", f"null with method {method} (only medusa-1 keeps its best heads)"
            if self.output.push_to_hub is not None:
                yield "output.push_to_hub", f"null with method {method} (heads need the trained model, which is local)"
        if method == "self-distillation" and not lora.enabled:
            yield "lora.enabled", f"true with method {method} (its teacher is the model without the adapter)"
        if self.generation.endpoint is not None and self.generation.heads is not None:
            yield "generation.heads", "null with generation.endpoint (the server drafts as it was started)"
        if model.attention.startswith("flash") and model.dtype == "float32":
            yield "model.dtype", f"bfloat16 or float16 with model.attention {model.attention}"
        if rates.warmup_steps is not None and rates.warmup_share is not None:
            yield "optimisation.warmup_share", "null with optimisation.warmup_steps (one of them decides)"
        if data.held_out and data.held_out_share:
            yield "data.held_out_share", "null or 0 with data.held_out (one of them decides)"
        if heads.num_heads + 2 > data.length:
            reason = "the last one has nothing to predict in such a row"
            yield "heads.num_heads", f"at most {data.length - 2} with data.length {data.length} ({reason})"
        if rates.batch_size % rates.micro_batch_size:
            yield "optimisation.batch_size", f"a multiple of optimisation.micro_batch_size {rates.micro_batch_size}"


def table() -> str:
    """Return every setting as a Markdown table: key, type, default, meaning, source."""
    rows = [("setting", "type", "default", "meaning", "source"), ("---",) * 5, *config_schema.describe(Config)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"
