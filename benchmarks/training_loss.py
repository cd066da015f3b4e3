"""Time and peak memory of the heads' loss with its gradients, for one micro-batch.

    python -m benchmarks.training_loss --vocabulary 32000 --hidden 1024 --positions 2048 --heads 2 --chunk 256

On the CPU the time is CPU time, on a GPU that of the device. The peak is what torch holds at once in addition to the
heads and the hidden states.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import provenance
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.training.loss.medusa import medusa_loss

MIB = 2**20


def main() -> None:
    """Measure, and print figures with the conditions they were taken in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 32000), ("hidden", 4096), ("positions", 4096), ("heads", 5), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunk", type=int, help="positions per chunk; 128 MiB of logits without it")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16 (autocast), as training does")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    heads = MedusaHeads(args.hidden, args.vocabulary, args.heads, dtype=torch.float32, device=device)
    hidden = torch.randn(args.positions, args.hidden, device=device)
    labels = torch.randint(0, args.vocabulary, (args.positions,), device=device)

    def step() -> None:
        heads.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=args.bfloat16):
            medusa_loss(hidden, heads, labels, chunk=args.chunk, top=0).loss.backward()

    seconds = []
    for _ in range(args.repeats):
        start = _now(device)
        step()
        seconds.append(_now(device) - start)
    print(provenance())
    each = ", ".join(f"{value:.2f}" for value in seconds)
    print(f"{statistics.median(seconds):.2f} s (of {each}), peak {_peak(step, heads, device) / MIB:.0f} MiB")


def _now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _peak(step: Callable[[], None], heads: MedusaHeads, device: str) -> int:
    heads.zero_grad(set_to_none=True)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    found = trace.profiler.kineto_results.events()
    events = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in events))


if __name__ == "__main__":
    main()
