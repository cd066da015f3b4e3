"""Run `medusa doctor`: see `cli.parsers.doctor` for its arguments."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from typing import Any

import torch

from medusa_decoding.backbone import prefill_attention
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel
from medusa_decoding.provenance import versions
from medusa_kernels import _native, selftest

PACKAGES = ("medusa-kernels", "torch", "triton", "transformers", "safetensors", "flash-attn")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if a check failed."""
    report = examine()
    if args.model is not None:
        device_map = "cuda" if torch.cuda.is_available() else None
        with MedusaModel.from_pretrained(args.model, device_map=device_map) as model:
            model.backbone.choose_layers(captured=device_map is not None)
            report["layers"], report["layers_on"] = model.backbone.said, str(model.backbone.device)
    if args.json:
        print(json.dumps(report))
    else:
        print_report(report)
    return 0 if all(op["passed"] for op in report["ops"]) else 1


def examine() -> dict[str, Any]:
    """Collect versions, devices, native libraries and the results of the checks."""
    installed = versions(*PACKAGES)
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return {
        "python": installed["python"],
        "platform": platform.platform(),
        "packages": {name: installed.get(name) for name in PACKAGES},
        "cpu": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "native": {kind: _native.why_missing(kind) or "loaded" for kind in ("cpu", "cuda")},
        "build": _native.build_info(),
        "demo_checkpoint": (CHECKPOINT / "base").is_dir(),
        "prefill": [{"device": device} | prefill(device) for device in devices[1:]],
        "ops": [vars(result) | {"passed": result.passed} for device in devices for result in selftest.run(device)],
    }


def prefill(device: str) -> dict[str, str]:
    """Return what serves the attention of prompts on a GPU, for the usual dtype and head size, and why."""
    served = prefill_attention.served_by(torch.device(device), torch.bfloat16, 128)
    return {"implementation": served.name, "reason": served.reason}


def print_report(report: dict[str, Any]) -> None:
    """Print the report for a person."""
    print(f"Python {report['python']} on {report['platform']}")
    for name, version in report["packages"].items():
        print(f"  {name:16} {version or 'not installed'}")
    cpu = report["cpu"]
    gpus = ", ".join(report["gpus"]) or "none"
    print(f"CPU: {cpu['cores']} cores, {cpu['threads']} threads, {cpu['isa']}; GPUs: {gpus}")
    for kind, state in report["native"].items():
        print(f"  native {kind:5} {state}")
    built = report["build"].get("cpu", {})
    if built.get("isas"):
        print(f"  built for    {', '.join(built['isas'])}")
    for name, why in built.get("left_out", {}).items():
        print(f"  not built    {name}: {why}")
    for row in report["prefill"]:
        print(f"prompts on {row['device']} (bfloat16, heads of 128): {row['implementation']}: {row['reason']}")
    if "layers" in report:
        print(f"{report['layers']}; on {report['layers_on']}")
    print(f"{'op':16}{'device':8}{'served by':12}{'error':>10}  check   why")
    for op in report["ops"]:
        verdict = "ok" if op["passed"] else "FAILED"
        print(f"{op['op']:16}{op['device']:8}{op['implementation']:12}{op['error']:10.1e}  {verdict:8}{op['reason']}")
        if op["detail"]:
            print(f"    {op['detail']}", file=sys.stderr)
