"""Write recipes/README.md: the recipes on three machines, with what `medusa train --check --on` predicts for each.

    python -m recipes.machines > recipes/README.md

The models' sizes are those of their published configs, in recipes/shapes: checked against LitGPT's `litgpt/config.py`
(26857050; Vicuna: the commit before 33eab00d, which removed it), untied embeddings against copies of `config.json`.
"""

from __future__ import annotations

import math
from pathlib import Path

from medusa_decoding.checkpoints.exporting import readers
from medusa_decoding.decode.runtime.memory import size
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop import estimate, machines

FOLDER = Path(__file__).parent
RECORDS, TOKENS, LEARNT, HELD_OUT = 60_000, 1_000, 0.8, 0.02
MODELS = {
    "vicuna-7b": "Vicuna-7B v1.5",
    "llama-3-8b": "Llama-3-8B-Instruct",
    "mistral-7b": "Mistral-7B-Instruct v0.3",
    "qwen3-8b": "Qwen3-8B",
}
MACHINES = {
    "4090": "one card of 24 GB (RTX 4090)",
    "A100-80GB": "one A100 of 80 GB",
    "8 x A100-80GB": "a node of eight A100",
}
WHOLE = {"model.quantization": "none"}
SHARED = {"heads.shared_projection": "true"}
SLOWER = {name: machines.parse("4090")[1].rate / machines.parse(name)[1].rate for name in ("3090", "L4")}
SETTINGS = {
    ("llama-3-8b", "4090"): {**SHARED, "data.length": "1024"},
    ("qwen3-8b", "4090"): {**SHARED, "data.length": "2048"},
    ("vicuna-7b", "A100-80GB"): WHOLE,
    ("mistral-7b", "A100-80GB"): WHOLE,
    ("vicuna-7b", "8 x A100-80GB"): WHOLE,
    ("mistral-7b", "8 x A100-80GB"): WHOLE,
}
"""What a machine changes in a recipe; A100s also compute four rows at a time."""
TEXT = f"""# Recipes

Each file is a configuration of `medusa train`, or of `medusa distill` where the model writes the answers itself; its
first lines say why its settings are so. [Training heads](../docs/training.md) explains them.

## Four models on three machines

**Memory and hours are predicted, not measured; none of these runs has been made yet.** Memory is that of the tensors,
without the program itself (about 0.5 GB) and fragmentation. Hours are the operations of the steps at
{estimate.REACHED:.0%} of the card's published peak, for {RECORDS:,} conversations of {TOKENS:,} tokens, {LEARNT:.0%} of
them learnt, without loading, writing, what GPUs send each other, and without the answers that a model writes itself.
By its peak, a 3090 takes {SLOWER["3090"]:.1f} times and an L4 {SLOWER["L4"]:.1f} times as long as the 4090.
`medusa train --config FILE --check --on "8 x A100-80GB"` predicts the same for your settings and data;
before a model has written its answers, `--set data.answers=given` counts the data's. How long the model's own take,
`medusa distill` says after the first ones.

"""


def config_of(model: str, settings: dict[str, str]) -> Config:
    """Return a recipe with settings, and with the model's config from the folder of shapes."""
    values = config_schema.read_yaml(FOLDER / f"{model}.yaml")
    for key, value in settings.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = config_schema.parse_yaml(value)
    values["model"]["name"] = str(FOLDER / "shapes" / model)
    return Config.of(values)


def row(model: str, machine: str) -> tuple[str, int, str, str]:
    """Return the command, the bytes per GPU, the time and the programs that read the heads."""
    settings = dict(SETTINGS.get((model, machine), {}))
    count, gpu = machines.parse(machine)
    if gpu.memory > 2**36:
        settings["optimisation.micro_batch_size"] = "4"
    config = config_of(model, settings)
    shapes, rows = estimate.shapes_of(config), RECORDS * TOKENS / config.data.length
    pace = estimate.pace_at(gpu.rate, config, shapes, LEARNT)
    seconds = pace.seconds(config, math.ceil(rows * (1 - HELD_OUT)), math.ceil(rows * HELD_OUT), count)
    own = config.data.answers == "own" or config.method == "self-distillation"
    start = f"accelerate launch --multi_gpu --num_processes {count} -m medusa_decoding" if count > 1 else "medusa"
    command = f"{start} {'distill' if own else 'train'} --config recipes/{model}.yaml"
    command += "".join(f" --set {key}={value}" for key, value in settings.items())
    heads = estimate.meta_heads(config, shapes.hidden, shapes.vocabulary)
    others = [reader.program for reader in readers(heads) if reader.options is not None]
    read = ", ".join(["this package", *others, *([] if others else ["vLLM with our plugin"])])
    return command, sum(estimate.memory(config, shapes).values()), estimate.duration(seconds), read


def page() -> str:
    """Return recipes/README.md."""
    lines = [
        "| model | machine | command | memory per GPU | training | who reads the heads |",
        "|---|---|---|---|---|---|",
    ]
    for model, name in MODELS.items():
        for machine, words in MACHINES.items():
            command, memory, time, read = row(model, machine)
            lines.append(f"| {name} | {words} | `{command}` | {size(memory)} | {time} | {read} |")
    return TEXT + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
