"""No code next to a checkpoint runs and nothing asks on standard input, whichever way a command loads it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow  # they share one run of commands on five poisoned checkpoints
HERE = Path(__file__).parent
QUESTION = [{"messages": [{"role": "user", "content": text}]} for text in ("how are you", "hello", "why")]
KINDS = ["llama", "processor", "unknown", "kernels", "adapter"]
"""Commands work on the first; a checkpoint does not choose the attention, so kernels named there are not an error."""


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


def commands(folder, seeds):
    """A command for each way to load: heads and base model, tokenizer, files to copy, and a model to train."""
    base, heads, out = (str(folder / name) for name in ("base", "heads", "out"))
    config = {
        "method": "medusa-1",
        "model": {"name": base, "dtype": "float32", "quantization": "none"},
        "data": {"train": [{"path": str(seeds)}], "length": 64, "held_out_share": 0.3},
        "heads": {"num_heads": 2},
        "optimisation": {"optimizer": "adamw", "batch_size": 1, "micro_batch_size": 1, "max_steps": 1},
        "output": {"folder": f"{out}/run", "trackers": []},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return {
        "generate": ["generate", "--model", heads, "--prompt", "abc", "--max-new-tokens", "2"],
        "chat": ["chat", "--model", heads, "--max-new-tokens", "2", "--json"],
        "export": ["export", "--model", heads, "--format", "embedded", "--out", f"{out}/embedded"],
        "train": ["train", "--config", str(folder / "run.yaml"), "--check"],
    }


@pytest.fixture(scope="module")
def results(make_chat, tmp_path_factory):
    """What each call did, in one process: {"checkpoint: command": report}."""
    place = tmp_path_factory.mktemp("strange")
    seeds, calls = place / "seeds.jsonl", {}
    answer = {"role": "assistant", "content": "i am fine. " * 4}
    seeds.write_text("".join(json.dumps({"messages": q["messages"] + [answer]}) + "\n" for q in QUESTION))
    for kind in KINDS:
        folder = place / kind
        shutil.copytree(make_chat().folder, folder)
        (folder / "out").mkdir()
        poison(folder, kind)
        calls |= {f"{kind}: {name}": argv for name, argv in commands(folder, seeds).items()}
    (place / "calls.json").write_text(json.dumps(calls))
    files = [HERE / "audited.py", place / "calls.json", place / "results.json", place, place / "modules"]
    environment = os.environ | {"HF_MODULES_CACHE": str(place / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, files)],
        input="y\n" * 1000,  # answers questions that bypass sys.stdin
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return place, json.loads((place / "results.json").read_text())


def test_no_code_next_to_a_checkpoint_ran(results):
    place, reports = results
    for name, report in reports.items():
        read = [event for event in report["events"] if event[0] == "line"]
        assert [event for event in report["events"] if event not in read] == [], name
        assert read == [] or name in ("llama: chat", "kernels: chat"), name
    assert sorted(path.name for path in place.glob("*/ran")) == []
    assert not (place / "modules").exists() or not list((place / "modules").rglob("*.py"))


def test_models_of_transformers_own_work_and_others_are_refused_in_one_line(results):
    _, reports = results
    for name, report in reports.items():
        kind, _, command = name.partition(": ")
        copied = command == "export" and kind in ("unknown", "processor")  # neither model nor tokenizer is loaded
        if kind in ("llama", "kernels") or copied:
            assert report["ended"] == 0, name
        else:
            assert report["ended"] == 2, name
            assert report["err"].splitlines()[-1].startswith("medusa: "), name
    assert "tokenizer_class: expected a tokenizer, got AutoProcessor" in reports["processor: generate"]["err"]
