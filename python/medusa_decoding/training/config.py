"""Every setting of a training run, with its default and where that comes from; `medusa train --config FILE.yaml`.

The defaults are those of the papers' appendix B (settings of section 3's experiments; here "B.2", "B.3", "B.4"), so
that a file needs to name a model, data and a folder. What the papers do not say is marked so. The method decides some
of them (`PRESETS`): Medusa-1 trains heads on a frozen backbone (section 2.2.1); Medusa-2 does that first and then
trains heads and a LoRA adapter together (2.2.2, B.3); self-distillation trains both at once towards the model's own
distribution (2.3.2, B.4). `Config.read` takes a file, `Config.of` a mapping; both are strict. This module knows no
libraries of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from medusa_decoding.training import config_schema
from medusa_decoding.training.config_schema import DECAY, ENTRIES, POSITIVE, SEED, SHARE, WORDS, Field, at_least

Method = Literal["medusa-1", "medusa-2", "self-distillation"]
OURS = "ours; the papers do not say"
DEFAULT_HELD_OUT_SHARE = 0.02


@dataclass(frozen=True)
class ModelConfig:
    """The backbone."""

    name: Annotated[str, Field("folder or hub id of the base model", "", WORDS)]
    revision: Annotated[str | None, Field("branch, tag or commit on the hub", OURS)] = None
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], Field("of weights that are not quantised", OURS)] = (
        "bfloat16"
    )
    quantization: Annotated[
        Literal["none", "8bit", "4bit"],
        Field(
            "of the frozen weights, by bitsandbytes; none with self-distillation, whose teacher it would be",
            "B.3; 2.3.2",
        ),
    ] = "4bit"
    attention: Annotated[
        Literal["sdpa", "eager", "flash_attention_2"], Field("implementation in transformers", OURS)
    ] = "sdpa"
    gradient_checkpointing: Annotated[bool, Field("compute activations again instead of keeping them", OURS)] = False


@dataclass(frozen=True)
class HeadsConfig:
    """The heads."""

    num_heads: Annotated[int, Field("K", "B.2; 2.2.3", at_least(1))] = 5
    num_layers: Annotated[int, Field("residual blocks a head", "B.2", at_least(1))] = 1
    bias: Annotated[bool, Field("of the residual blocks", "the authors' checkpoints")] = True
    shared_projection: Annotated[
        bool, Field("project with the model's lm_head instead of own matrices", "2.1.1: own")
    ] = False
    token_map_size: Annotated[
        int | None,
        Field("size of a trimmed vocabulary: the tokens most frequent in the data; null for all", OURS, at_least(1)),
    ] = None
    storage: Annotated[Literal["float", "int8", "fp8"], Field("of own matrices in the checkpoint", OURS)] = "float"
    parent_rank: Annotated[
        int, Field("rank of the term by which a guess depends on its parent token; 0 for none", OURS, at_least(0))
    ] = 0
    initial: Annotated[
        str | None, Field("folder of heads to start from; null: W1 zero, W2 the lm_head", "2.1.1", WORDS)
    ] = None


@dataclass(frozen=True)
class SourceConfig:
    """One place that data comes from."""

    path: Annotated[str, Field("file, folder or hub id", "", WORDS)]
    format: Annotated[
        Literal["auto", "sharegpt", "messages", "text"], Field("of its records; auto: by their keys", OURS)
    ] = "auto"
    split: Annotated[str, Field("of a hub dataset", OURS, WORDS)] = "train"
    subset: Annotated[str | None, Field("configuration of a hub dataset", OURS)] = None
    revision: Annotated[str | None, Field("branch, tag or commit of a hub dataset", OURS)] = None


@dataclass(frozen=True)
class DataConfig:
    """What is learnt from, and how it is laid out."""

    train: Annotated[tuple[SourceConfig, ...], Field("training data (the papers: ShareGPT)", "B.3", ENTRIES)]
    held_out: Annotated[
        tuple[SourceConfig, ...], Field("data to measure on; empty: a share of the training data", OURS)
    ] = ()
    held_out_share: Annotated[
        float | None,
        Field(f"of prompts, by hash; null: {DEFAULT_HELD_OUT_SHARE} unless held_out is given", OURS, SHARE),
    ] = None
    split_seed: Annotated[int, Field("of that hash", OURS)] = 0
    limit: Annotated[int | None, Field("conversations read at most; null for all", OURS, at_least(1))] = None
    template: Annotated[str, Field("auto: the tokenizer's; vicuna; plain; or a Jinja file", OURS, WORDS)] = "auto"
    template_arguments: Annotated[
        dict[str, Any], Field("further variables of the template (enable_thinking)", OURS)
    ] = field(default_factory=dict)
    system: Annotated[str | None, Field("system message of conversations without one", OURS, WORDS)] = None
    turns: Annotated[
        Literal["joint", "each"],
        Field("joint: learn all assistant turns of a conversation at once; each: one copy a turn", OURS),
    ] = "joint"
    length: Annotated[int, Field("tokens a row", "3.1: Vicuna 1.5's own; B.4: 2048", at_least(8))] = 4096
    overlong: Annotated[Literal["truncate", "drop", "split"], Field("conversations beyond a row", OURS)] = "truncate"
    pack: Annotated[bool, Field("several conversations a row, kept apart", OURS)] = True
    max_bad_share: Annotated[float, Field("share of unreadable records from which on it is an error", OURS, SHARE)] = (
        0.01
    )
    cache_hidden: Annotated[str | None, Field("folder that keeps hidden states for further epochs", OURS, WORDS)] = None


@dataclass(frozen=True)
class LoraConfig:
    """The adapter on the backbone."""

    enabled: Annotated[
        bool, Field("train an adapter instead of the backbone's own weights; on for Medusa-2", "B.2")
    ] = False
    rank: Annotated[int, Field("of the adapter", "B.2", at_least(1))] = 32
    alpha: Annotated[float, Field("its scale is alpha / rank", "B.2", POSITIVE)] = 16.0
    dropout: Annotated[float, Field("of its input", "B.2", SHARE)] = 0.05
    target: Annotated[str, Field("modules, in peft's terms", "B.2", WORDS)] = "all-linear"
    lm_head: Annotated[bool, Field("adapt lm_head too", "B.2")] = True


@dataclass(frozen=True)
class LossConfig:
    """Weights in the loss."""

    head_decay: Annotated[float, Field("lambda_k is its k-th power, k from 1", "2.2.1; B.2", DECAY)] = 0.8
    lambda_0: Annotated[
        float | None,
        Field(
            "weight of the heads' loss beside the model's own; Medusa-2: 0.2, self-distillation: 0.01",
            "B.3; B.4",
            POSITIVE,
        ),
    ] = None
    lambda_0_schedule: Annotated[
        Literal["constant", "sine"],
        Field("sine: a quarter wave up to lambda_0 at the end of training", "2.2.2; B.4: sine"),
    ] = "constant"
    chunk: Annotated[
        int | None, Field("positions whose logits are held at a time; null: 128 MiB of them", OURS, at_least(1))
    ] = None


@dataclass(frozen=True)
class OptimisationConfig:
    """Steps and rates."""

    optimizer: Annotated[Literal["adamw_8bit", "adamw"], Field("8-bit AdamW is bitsandbytes'", "B.2")] = "adamw_8bit"
    learning_rate: Annotated[float, Field("peak, of the backbone; self-distillation: 1e-4", "B.3; B.4", POSITIVE)] = (
        5e-4
    )
    heads_factor: Annotated[
        float, Field("the heads' rate over the backbone's (Medusa-1 has the same 2e-3)", "B.2", POSITIVE)
    ] = 4.0
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], Field("after a linear warm-up; the first two down to 0", "B.2: cosine")
    ] = "cosine"
    warmup_steps: Annotated[int, Field("of each stage; self-distillation: 20", "B.3; B.4", at_least(0))] = 40
    epochs: Annotated[float, Field("over the data, of the last or only stage", "3.1", POSITIVE)] = 2.0
    heads_first_epochs: Annotated[
        float, Field("first stage, heads alone; Medusa-2: 2 unless heads.initial is given", "2.2.2; B.3", at_least(0))
    ] = 0.0
    max_steps: Annotated[int | None, Field("stop a stage after so many; null: by epochs", OURS, at_least(1))] = None
    batch_size: Annotated[
        int, Field("rows a step, over all processes; self-distillation: 128", "B.3; 3.2", at_least(1))
    ] = 64
    micro_batch_size: Annotated[int, Field("rows a process computes at a time", OURS, at_least(1))] = 1
    weight_decay: Annotated[float, Field("of matrices", OURS, at_least(0))] = 0.0
    beta_1: Annotated[float, Field("of AdamW", "its usual value", SHARE)] = 0.9
    beta_2: Annotated[float, Field("of AdamW", "its usual value", SHARE)] = 0.999
    epsilon: Annotated[float, Field("of AdamW", "its usual value", POSITIVE)] = 1e-8
    max_gradient_norm: Annotated[float | None, Field("gradients are clipped to it; null: not", OURS, POSITIVE)] = 1.0
    seed: Annotated[int, Field("of initial weights, order and dropout", OURS, SEED)] = 0
    sharding: Annotated[
        Literal["auto", "none", "full"],
        Field("full: weights divided over the processes (FSDP); auto: as accelerate launch --use_fsdp says", OURS),
    ] = "auto"


@dataclass(frozen=True)
class OutputConfig:
    """What is written."""

    folder: Annotated[str, Field("checkpoints, logs and the trained heads", "", WORDS)]
    checkpoint_steps: Annotated[int, Field("steps between checkpoints", OURS, at_least(1))] = 200
    keep_checkpoints: Annotated[int, Field("the last so many", OURS, at_least(1))] = 2
    log_steps: Annotated[int, Field("steps between log lines", OURS, at_least(1))] = 10
    evaluate_steps: Annotated[
        int | None, Field("steps between measurements; null: at each epoch's end", OURS, at_least(1))
    ] = None
    tensorboard: Annotated[bool, Field("write its event files", OURS)] = True
    merge: Annotated[
        bool,
        Field("write the model with its adapter merged in, not the adapter; quantised or divided weights: never", OURS),
    ] = True


@dataclass(frozen=True)
class GenerationConfig:
    """How `medusa distill` has the model itself write the data (2.3.2); data.train are the seeds then."""

    heads: Annotated[
        str | None, Field("folder or hub id of heads to generate with; null: plainly, or heads.initial", OURS, WORDS)
    ] = None
    max_new_tokens: Annotated[int, Field("of an answer", OURS, at_least(1))] = 512
    temperature: Annotated[float, Field("of sampling; 0: greedy", "3.2", at_least(0))] = 0.3
    top_p: Annotated[float, Field("nucleus of sampling; 1: all", OURS, POSITIVE)] = 1.0
    turns: Annotated[int, Field("user turns of a seed that are answered, one after the other", OURS, at_least(1))] = 4
    prompt_tokens: Annotated[int, Field("of a text, so many tokens at its start are the prompt", OURS, at_least(1))] = (
        128
    )
    batch_size: Annotated[int, Field("answers generated at once", OURS, at_least(1))] = 8
    seed: Annotated[int, Field("of sampling", OURS, SEED)] = 0


PRESETS: dict[str, dict[str, Any]] = {
    "medusa-1": {},
    "medusa-2": {
        "lora": {"enabled": True},
        "loss": {"lambda_0": 0.2},
        "optimisation": {"heads_first_epochs": 2.0},
    },
    "self-distillation": {
        "model": {"quantization": "none"},
        "data": {"length": 2048},
        "lora": {"enabled": True},
        "loss": {"lambda_0": 0.01, "lambda_0_schedule": "sine"},
        "optimisation": {"learning_rate": 1e-4, "warmup_steps": 20, "batch_size": 128},
    },
}
"""What a method changes in the defaults (B.3 for Medusa-2, B.4 and 2.3.2 for self-distillation)."""


@dataclass(frozen=True)
class Config:
    """All settings of a run.

    Raises:
        ValueError: a wrong type, a value out of range, or settings that exclude each other; names the key's path.
    """

    model: Annotated[ModelConfig, Field("the backbone")]
    data: Annotated[DataConfig, Field("the data")]
    output: Annotated[OutputConfig, Field("what is written")]
    method: Annotated[Method, Field("which of the papers' recipes", "2.2.1; 2.2.2; 2.3.2")] = "medusa-1"
    heads: Annotated[HeadsConfig, Field("the heads")] = field(default_factory=HeadsConfig)
    lora: Annotated[LoraConfig, Field("the adapter")] = field(default_factory=LoraConfig)
    loss: Annotated[LossConfig, Field("weights in the loss")] = field(default_factory=LossConfig)
    optimisation: Annotated[OptimisationConfig, Field("steps and rates")] = field(default_factory=OptimisationConfig)
    generation: Annotated[GenerationConfig, Field("the model's own data")] = field(default_factory=GenerationConfig)

    def __post_init__(self) -> None:
        config_schema.check(self)
        for broken, message in self._exclusions():
            if broken:
                raise ValueError(message)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Make a configuration of a mapping as YAML gives it, over the defaults of its method.

        Raises:
            ValueError: as the class, and for unknown and missing keys.
        """
        merged = dict(values) if isinstance(values, Mapping) else values
        for name, defaults in _preset(values).items():
            given = merged.get(name, {})
            if isinstance(given, Mapping):
                merged[name] = defaults | dict(given)
        return config_schema.build(cls, merged)

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

    def warnings(self, distills: bool = False) -> list[str]:
        """Return what works but is easily overlooked: a quantised model is not the one that is served without it.

        Args:
            distills: whether the model also writes the data (`medusa distill`).
        """
        quantised = self.model.quantization
        if quantised == "none":
            return []
        found = []
        if distills:
            found.append(
                f"model.quantization: {quantised} makes the quantised model write the answers; set none unless the "
                "model is served quantised in the same way"
            )
        if self.method == "self-distillation":
            found.append(
                f"model.quantization: {quantised} makes the quantised model the teacher "
                "(the paper advises against it, section 2.3.2)"
            )
        else:
            found.append(
                f"model.quantization: {quantised} makes heads learn from the quantised model's states (the paper's "
                "setting, B.3); they guess best for a model that is served quantised in the same way, or set none"
            )
        return found

    def _exclusions(self) -> list[tuple[bool, str]]:
        model, data, heads, lora, loss, rates = (
            self.model,
            self.data,
            self.heads,
            self.lora,
            self.loss,
            self.optimisation,
        )
        frozen, quantised = self.method == "medusa-1", model.quantization != "none"
        micro, limit = rates.micro_batch_size, rates.max_steps
        return [
            (frozen and lora.enabled, "lora.enabled: expected false with method medusa-1 (frozen backbone), got true"),
            (
                frozen and loss.lambda_0 is not None,
                "loss.lambda_0: expected null with method medusa-1 (the heads' loss stands alone), "
                f"got {loss.lambda_0}",
            ),
            (
                frozen and rates.heads_first_epochs > 0,
                "optimisation.heads_first_epochs: expected 0 with method medusa-1 (heads alone in its only stage), "
                f"got {rates.heads_first_epochs:g}",
            ),
            (
                not frozen and loss.lambda_0 is None,
                f"loss.lambda_0: expected a number with method {self.method}, got null",
            ),
            (
                not frozen and not lora.enabled and quantised,
                f"lora.enabled: expected true with model.quantization {model.quantization} (quantised weights "
                "cannot be trained), got false",
            ),
            (
                self.method == "self-distillation" and not lora.enabled,
                "lora.enabled: expected true with method self-distillation (its teacher is the model without the "
                "adapter), got false",
            ),
            (
                not frozen and data.cache_hidden is not None,
                f"data.cache_hidden: expected null with method {self.method} (the states change while it trains), "
                f"got {data.cache_hidden!r}",
            ),
            (
                heads.shared_projection and heads.storage != "float",
                "heads.storage: expected float with heads.shared_projection (there are no own matrices), "
                f"got {heads.storage!r}",
            ),
            (
                rates.sharding == "full" and quantised,
                "optimisation.sharding: expected none or auto with quantised weights, which cannot be divided, "
                f"got full with model.quantization {model.quantization}",
            ),
            (
                model.attention.startswith("flash") and model.dtype == "float32",
                f"model.dtype: expected bfloat16 or float16 with model.attention {model.attention}, got float32",
            ),
            (
                bool(data.held_out) and bool(data.held_out_share),
                "data.held_out_share: expected null or 0 with data.held_out (one of them decides), "
                f"got {data.held_out_share}",
            ),
            (
                heads.num_heads + 2 > data.length,
                f"heads.num_heads: expected at most {data.length - 2} with data.length {data.length} (the last one has "
                f"nothing to guess in such a row), got {heads.num_heads}",
            ),
            (
                rates.batch_size % micro != 0,
                f"optimisation.batch_size: expected a multiple of optimisation.micro_batch_size {micro}, "
                f"got {rates.batch_size}",
            ),
            (
                limit is not None and rates.warmup_steps >= limit,
                f"optimisation.warmup_steps: expected fewer than optimisation.max_steps {limit}, "
                f"got {rates.warmup_steps}",
            ),
        ]


def _preset(values: Any) -> dict[str, dict[str, Any]]:
    # Whatever is wrong with the values is found where they are read.
    sections = values if isinstance(values, Mapping) else {}
    method, heads = sections.get("method"), sections.get("heads")
    preset = dict(PRESETS[method]) if isinstance(method, str) and method in PRESETS else {}
    if isinstance(heads, Mapping) and heads.get("initial") is not None:
        # Heads that have been trained need no stage of their own.
        preset["optimisation"] = preset.get("optimisation", {}) | {"heads_first_epochs": 0.0}
    return preset


def table() -> str:
    """Return every setting as a Markdown table: key, type, default, meaning, source."""
    rows = [("setting", "type", "default", "meaning", "source"), ("---",) * 5, *config_schema.describe(Config)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"
