"""A small model with a tokenizer on disk, data for it, and configurations of short runs."""

import json

import torch
import toy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from medusa_decoding.training.config import Config
from medusa_decoding.training.loop.log import SPEED, read_log

WORDS = ["Paris", "is", "the", "capital", "of", "France", "one", "two", "three", "Hello", "thank", "you"]
BASE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "initializer_range": 0.2,
}  # fmt: skip
FAMILIES = {
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "gemma2": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "ministral": {}, "phi3": {}, "olmo2": {}, "olmo3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}  # fmt: skip
# What chat templates of families do: turns of other names, a system's turn of their own or none, part of a user's turn.
_TURNS = (
    "{% for m in messages %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n"
)
_TURNS += "{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}"
_STRICT = "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
_STRICT += "{{ raise_exception('expected turns of user and assistant') }}{% endif %}{% endfor %}"
_SYSTEM = "{% if messages[0].role != 'system' %}<start>system\nYou are a model.<end>\n{% endif %}"
_INSTRUCT = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
_INSTRUCT += "{{ eos_token }}{% endif %}{% endfor %}"
TEMPLATES = {
    "gemma2": _STRICT + _TURNS, "gemma3_text": _TURNS, "granite": _SYSTEM + _TURNS, "qwen3_moe": _SYSTEM + _TURNS,
    "ministral": _INSTRUCT, "mixtral": _STRICT + _INSTRUCT,
}  # fmt: skip


def make_base(folder, seed=0, family="llama", **sizes):
    """Write a random model of a family and its tokenizer."""
    tokenizer = toy.tokenizer("bytes", TEMPLATES.get(family, toy.marked(toy.SPACED)))
    torch.manual_seed(seed)
    names = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    names |= {} if family == "llama" else {"pad_token_id": tokenizer.pad_token_id}
    values = dict(vocab_size=len(tokenizer), **names, **BASE | FAMILIES.get(family, {}) | sizes)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def greedy(folder, prompt, count):
    """The text that transformers writes after a prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def make_data(file, count=22):
    """Write conversations of different lengths, most of which repeat words."""
    generator = torch.Generator().manual_seed(5)
    records = []
    for number in range(count):
        words = [WORDS[int(i)] for i in torch.randint(0, len(WORDS), (3 + number % 5,), generator=generator)]
        records.append(toy.sharegpt(f"Question {number}?", " ".join(words * 2)))
    toy.write_lines(file, *records)
    return file


def config(folder, base, file, method="medusa-1", /, **sections):
    """The configuration of a run of a few steps: four rows per step, two epochs."""
    values = {
        "method": method,
        "model": {"name": str(base), "dtype": "float32", "quantization": "none"},
        "data": {"train": [{"path": str(file)}], "length": 48, "held_out_share": 0.2},
        "heads": {"num_heads": 3},
        "optimisation": {
            "optimizer": "adamw", "batch_size": 4, "micro_batch_size": 2, "warmup_steps": 1, "epochs": 2.0,
            "learning_rate": 2e-3,
        },
        "output": {"folder": str(folder), "checkpoint_steps": 2, "log_steps": 1, "trackers": []},
    }  # fmt: skip
    if method == "medusa-2":
        values["optimisation"]["heads_first_epochs"] = 1.0
    if method != "medusa-1":
        values["lora"] = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return Config.of(values)


def curve(folder):
    """The log without times and memory."""
    dropped = {"seconds", *SPEED}
    return [{name: value for name, value in line.items() if name not in dropped} for line in read_log(folder)]


def losses(folder):
    """The logged losses, step by step."""
    return [line["loss"] for line in read_log(folder) if "loss" in line]


def heads_tensors(folder):
    """The tensors of the heads that a run wrote."""
    from safetensors.torch import load_file

    return load_file(folder / "heads" / "medusa_lm_head.safetensors")


def settings_of(folder):
    """The heads' config.json."""
    return json.loads((folder / "heads" / "config.json").read_text())
