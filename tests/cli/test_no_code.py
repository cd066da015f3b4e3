"""No code next to a checkpoint runs and nothing asks on standard input, with any command or function."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytestmark = pytest.mark.slow  # they share one run of every command on six poisoned checkpoints
HERE = Path(__file__).parent
QUESTION = [{"messages": [{"role": "user", "content": text}]} for text in ("how are you", "hello", "why")]
REAL = ["llama", "processor"]
"""Checkpoints whose model is one of transformers' own; commands work on the first."""


def change(file, **values):
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | values))


def poison(folder, kind):
    """Put code next to a checkpoint, and reference it from every file that can do so."""
    ran = f"open({str(folder / 'ran')!r}, 'w')\n"
    imported = (
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tok"
    )
    for part in (folder / "base", folder / "heads"):
        (part / "evil.py").write_text(f"{ran}{imported}\n")
        (part / "custom_generate").mkdir()
        (part / "custom_generate" / "generate.py").write_text(f"{ran}def generate(*args, **kwargs): return None\n")
        names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoProcessor": "evil.Config"}
        change(part / "config.json", auto_map=names, custom_generate="custom_generate")
    base = folder / "base"
    tokenizers = {"AutoTokenizer": ["evil.Tok", "evil.Tok"], "AutoProcessor": "evil.Config"}
    change(base / "tokenizer_config.json", auto_map=tokenizers)
    for name in ("processor_config.json", "preprocessor_config.json"):
        change(base / name, auto_map={"AutoProcessor": "evil.Config", "AutoFeatureExtractor": "evil.Config"})
    if kind == "unknown":
        change(base / "config.json", model_type="evil", architectures=["Evil"])
        change(base / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    elif kind == "kernels":
        change(base / "config.json", attn_implementation="evil/kernels", _attn_implementation="evil/kernels")
    elif kind == "processor":
        settings = json.loads((base / "tokenizer_config.json").read_text())
        del settings["auto_map"]
        (base / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "AutoProcessor"}))
    elif kind == "pickled":
        (base / "model.safetensors").unlink()

        class Opens:
            def __reduce__(self):
                return open, (str(folder / "ran"), "w")

        torch.save({"lm_head.weight": Opens()}, base / "pytorch_model.bin")
    elif kind == "adapter":
        (base / "model.safetensors").rename(folder / "model.safetensors")
        shutil.copytree(base, folder / "plain")
        (folder / "model.safetensors").rename(folder / "plain" / "model.safetensors")
        settings = {
            "peft_type": "LORA", "base_model_name_or_path": str(folder / "plain"), "r": 1, "lora_alpha": 1,
            "target_modules": ["q_proj"], "auto_mapping": {"parent_library": "evil", "base_model_class": "Model"},
            "megatron_config": {"hidden_size": 1}, "megatron_core": "evil",
        }  # fmt: skip
        (base / "adapter_config.json").write_text(json.dumps(settings))
        (base / "adapter_model.bin").write_bytes(b"\x80\x04c")


def commands(folder, prompts, seeds):
    """Every command that reads a model, short."""
    base, heads, out = (str(folder / name) for name in ("base", "heads", "out"))
    config = {
        "method": "medusa-1",
        "model": {"name": base, "dtype": "float32", "quantization": "none"},
        "data": {"train": [{"path": str(seeds)}], "length": 64, "held_out_share": 0.3},
        "heads": {"num_heads": 2},
        "optimisation": {
            "optimizer": "adamw", "batch_size": 1, "micro_batch_size": 1, "warmup_steps": 0, "max_steps": 1,
        },
        "generation": {"max_new_tokens": 2, "temperature": 0.0, "turns": 1, "batch_size": 2},
        "output": {"folder": f"{out}/run", "tensorboard": False},
    }  # fmt: skip
    file, distilling = folder / "run.yaml", folder / "distil.yaml"
    file.write_text(yaml.safe_dump(config))
    distilling.write_text(yaml.safe_dump(config | {"method": "self-distillation"}))
    few = ["--prompts", str(prompts), "--limit", "1", "--max-new-tokens", "4"]
    return {
        "generate": ["generate", "--model", heads, "--prompt", "abc", "--max-new-tokens", "2"],
        "chat": ["chat", "--model", heads, "--max-new-tokens", "2", "--json"],
        "eval": ["eval", "--model", heads, *few],
        "calibrate": ["calibrate", "--model", heads, "--out", f"{out}/calibration.json", *few],
        "export embedded": ["export", "--model", heads, "--format", "embedded", "--out", f"{out}/embedded"],
        "train --check": ["train", "--config", str(file), "--check"],
        "train": ["train", "--config", str(file)],
        "distill": ["distill", "--config", str(distilling), "--only-data"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(make_chat, tmp_path_factory):
    """What each call did, in one process: {(checkpoint, call): report}."""
    place = tmp_path_factory.mktemp("strange")
    prompts, seeds = place / "prompts.jsonl", place / "seeds.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}) + "\n")
    answer = {"role": "assistant", "content": "i am fine. " * 4}
    seeds.write_text("".join(json.dumps({"messages": q["messages"] + [answer]}) + "\n" for q in QUESTION))
    calls = []
    for kind in (*REAL, "unknown", "kernels", "pickled", "adapter"):
        folder = place / kind
        shutil.copytree(make_chat().folder, folder)
        (folder / "out").mkdir()
        poison(folder, kind)
        base, heads = str(folder / "base"), str(folder / "heads")
        every = commands(folder, prompts, seeds)
        shown = (
            every
            if kind in ("llama", "unknown")
            else {name: every[name] for name in ("generate", "chat", "train --check")}
        )
        calls += [[f"{kind}: {name}", "medusa", *argv] for name, argv in shown.items()]
        calls += [
            [f"{kind}: load", "load", heads],
            [f"{kind}: load of a base", "load", heads, base],
            [f"{kind}: read", "read", heads],
            [f"{kind}: medusa_generate", "generate", str(make_chat().folder / "base"), heads],
            [f"{kind}: train on", "train_on", base],
        ]
    (place / "calls.json").write_text(json.dumps(calls))
    command = [
        sys.executable,
        HERE / "audited.py",
        place / "calls.json",
        place / "results.json",
        place,
        place / "modules",
    ]
    environment = os.environ | {"HF_MODULES_CACHE": str(place / "modules"), "OMP_NUM_THREADS": "1"}
    # Questions that bypass sys.stdin are answered here.
    done = subprocess.run(
        list(map(str, command)), input="y\n" * 1000, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((place / "results.json").read_text())
    return place, {report["name"]: report for report in found}


def test_no_code_next_to_a_checkpoint_ran(results):
    place, reports = results
    chats = {f"{kind}: chat" for kind in (*REAL, "kernels")}
    for name, report in reports.items():
        read = [event for event in report["events"] if event[0] == "line"]
        assert [event for event in report["events"] if event not in read] == [], name
        assert read == [] or name in chats, name
    assert sorted(path.name for path in place.glob("*/ran")) == []
    assert not (place / "modules").exists() or not list((place / "modules").rglob("*.py"))


def test_models_of_transformers_own_work(results):
    _, reports = results
    own = {name: report["ended"] for name, report in reports.items() if name.startswith("llama:")}
    assert {name: ended for name, ended in own.items() if ended not in (0, None)} == {}
    # A checkpoint does not choose the attention, so kernels named there are not an error.
    assert {reports[f"kernels: {name}"]["ended"] for name in ("generate", "load", "train on", "chat")} == {0}


@pytest.mark.parametrize("kind", ["unknown", "pickled", "adapter"])
def test_checkpoints_that_need_code_are_refused_in_one_line(results, kind):
    _, reports = results
    refused = {name: report for name, report in reports.items() if name.startswith(f"{kind}: ")}
    # These read heads, or a config and a tokenizer, which have none.
    fine = ["read", "medusa_generate", "export embedded"]
    for name, report in refused.items():
        if name.removeprefix(f"{kind}: ") in fine:
            assert report["ended"] == 0, name
            continue
        if isinstance(report["ended"], str):
            assert report["ended"].startswith("ValueError: "), name
            assert "\n" not in report["ended"], name
        else:
            assert report["ended"] == 2, name
            assert [line.startswith("medusa: ") for line in report["err"].splitlines()][-1:] == [True], name
    assert len(refused) > 5


def test_a_tokenizer_of_another_kind_is_refused(results):
    _, reports = results
    assert "tokenizer_class: expected a tokenizer, got AutoProcessor" in reports["processor: generate"]["err"]
