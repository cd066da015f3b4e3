"""Random steps of kv_compact, each checked against the reference on the CPU; to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/kernels/sanitize_kv_compact.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/kernels/sanitize_kv_compact.py

Each cache is aligned to its elements and no more, with guard bytes before it and, after it, guard bytes or the end
of its allocation. The sanitizer sees every allocation because PyTorch's caching allocator is switched off.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys

# Read when torch is first imported: with it every tensor is a cudaMalloc of its own, whose ends memcheck guards.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from torch import Tensor

from medusa_kernels import kv_compact, reference, served_by

DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.float32}
GUARD = 16


def random_path(rng: random.Random, steps: int, room: int, accepted: int) -> list[int]:
    """Ascending node indices as far as they are used, then arbitrary ones."""
    path = sorted(rng.sample(range(room), steps))
    return path[: accepted + 1] + [rng.randint(-(2**31), 2**31 - 1) for _ in path[accepted + 1 :]]


def one_step(rng: random.Random, device: str, units: collections.Counter[int]) -> str:
    """Run one random step; return "" or what went wrong."""
    size = rng.choice(sorted(DTYPES))
    layers, batch, kv_heads = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3)
    dim = rng.choice((1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 33, 64, 80, 128))
    steps = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 33))
    room = steps + rng.randint(0, 20)
    rows = room + rng.randint(0, 9)
    lens = [rng.randint(0, rows - room) for _ in range(batch)]
    accepted = [rng.randint(-1, steps - 1) for _ in range(batch)]
    paths = [random_path(rng, steps, room, accept) for accept in accepted]
    for b, accept in enumerate(accepted):
        if accept == -1 and rng.random() < 0.5:
            lens[b] = rng.randint(-(2**31), 2**31 - 1)  # a finished row, whose length may be anything

    sequences = batch + rng.randint(0, 2)
    slots = rng.sample(range(sequences), batch) if sequences > batch or rng.random() < 0.5 else None
    shape = (layers, 2, sequences, kv_heads, rows, dim)
    count = layers * 2 * sequences * kv_heads * rows * dim * size
    # Element-aligned, but not necessarily more. At the very end of its allocation if no guard follows.
    offset = GUARD + size * rng.randrange(0, 16 // size)
    trailing = rng.choice((0, GUARD))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    host = torch.randint(0, 256, (offset + count + trailing,), dtype=torch.uint8, generator=generator)
    memory = host.to(device, copy=True)

    def cache(of: Tensor) -> Tensor:
        return of[offset : offset + count].view(DTYPES[size]).view(shape)

    arguments = [torch.tensor(values, dtype=torch.int32) for values in (lens, paths, accepted)]
    own = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    reference.kv_compact(cache(host), *arguments, slots=own)
    units[min(16, ((cache(memory).data_ptr() | dim * size) & -(cache(memory).data_ptr() | dim * size)))] += 1
    own = None if own is None else own.to(device)
    kv_compact(cache(memory), *(argument.to(device) for argument in arguments), slots=own)
    if torch.equal(memory.cpu(), host):
        return ""
    return f"{shape=} {size=} {offset=} {lens=} {paths=} {accepted=} {slots=}"


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="how many steps (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is random (default: 0)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu checks this script's own logic")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    served = served_by("kv_compact", options.device)
    expected = "cuda" if options.device == "cuda" else "cpp"
    if served.name != expected:
        print(f"kv_compact is served by {served.name}, not by the native library: {served.reason}", file=sys.stderr)
        return 2
    rng = random.Random(options.seed)
    units: collections.Counter[int] = collections.Counter()
    wrong = 0
    for step in range(options.steps):
        mismatch = one_step(rng, options.device, units)
        if mismatch:
            wrong += 1
            print(f"step {step}: differs from the reference: {mismatch}", flush=True)
        elif (step + 1) % 200 == 0:
            print(f"{step + 1} steps", flush=True)
    by_unit = ", ".join(f"{units[unit]} of {unit}-byte units" for unit in sorted(units))
    print(f"{options.steps} steps of kv_compact on {options.device} (seed {options.seed}): {by_unit}; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
