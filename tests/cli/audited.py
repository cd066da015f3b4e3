"""Run calls in this process under an audit hook, and record what each of them executed, asked and read.

    python audited.py CALLS.json RESULTS.json FOLDER..

A call is the arguments of `medusa`, or of one of `API`. Reported: code objects, sources and modules of files in the
folders, questions on standard input, lines read from it, programs started by a shell, and names of hosts looked up.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

events = []
folders = []


def inside(path):
    return isinstance(path, (str, bytes)) and any(os.fsdecode(path).startswith(folder) for folder in folders)


def hook(event, args):
    if event == "exec" and inside(args[0].co_filename):
        events.append(["exec", args[0].co_filename])
    source = args[1] if event in ("compile", "import") else args[0] if event == "open" else None
    code = event != "open" or os.fsdecode(source).endswith((".py", ".pyc")) if inside(source) else False
    if code or event in ("builtins.input", "os.system", "socket.getaddrinfo"):
        events.append([event, str(args)[:200]])


class Watched(io.StringIO):
    """Standard input that records its readers."""

    def isatty(self):
        return False

    def read(self, *args):
        events.append(["read", ""])
        return super().read(*args)

    def readline(self, *args):
        line = super().readline(*args)
        events.append(["line", line])
        return line


def generate(model, heads):
    import torch
    from transformers import AutoModelForCausalLM

    from medusa_decoding import medusa_generate

    base = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
    return base.generate(torch.tensor([[3, 4]]), max_new_tokens=2, custom_generate=medusa_generate, heads=heads)


def load(heads, base=None):
    import torch

    from medusa_decoding import MedusaModel

    with MedusaModel.from_pretrained(heads, base) as model:
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=2)


def read(heads):
    from medusa_decoding.checkpoints import find_base_model, read_heads

    find_base_model(heads)
    read_heads(heads)


def train_on(base):
    import torch

    from medusa_decoding.training.config import Config
    from medusa_decoding.training.loop.backbone import TrainingBackbone, load_tokenizer

    model = {"name": base, "dtype": "float32", "quantization": "none"}
    rest = {"data": {"train": [{"path": "none"}]}, "output": {"folder": "none"}}
    config = Config.of({"method": "medusa-1", "model": model, **rest})
    for device in ("meta", "cpu"):
        TrainingBackbone.load(config, torch.device(device))
    load_tokenizer(config.model)


API = {"generate": generate, "load": load, "read": read, "train_on": train_on}


def main():
    calls, results, *given = sys.argv[1:]
    from medusa_decoding.cli import main as medusa

    folders.extend(given)
    sys.addaudithook(hook)
    found = []
    for name, function, *args in json.loads(Path(calls).read_text()):
        events.clear()
        sys.stdin = Watched("y\n" * 5)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                ended = medusa(args) if function == "medusa" else (API[function](*args), 0)[1]
            except SystemExit as error:
                ended = error.code
            except Exception as error:
                ended = f"{type(error).__name__}: {error}"
        found.append(
            {"name": name, "ended": ended, "events": list(events), "out": out.getvalue(), "err": err.getvalue()}
        )
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
