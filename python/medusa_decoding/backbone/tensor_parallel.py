"""Tensor parallel: the processes that share one model's weights, and how they stay in sync.

transformers shards a model over the processes that `torchrun` started (`tp_plan="auto"`); hidden states and logits are
complete in every process. Each runs the same decode loop over the keys and values of its own attention heads. Decisions
that depend on anything but the model are shared through `Peers`: random numbers and durations are process 0's, and free
memory is that of the process with the least.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

# Styles of transformers' plans under which modules take and return whole tensors, except for the attention's own
# projections, which work on the heads of one process.
_STYLES = {
    "colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "replicate", "packed_colwise",
    "moe_tp_experts",
}  # fmt: skip
_BY_HEADS = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
# Of attention whose projections are shared, and their results whole in every process (OLMo, Phi-3).
_WHOLE = {"replicate", "colwise_gather_output", "colwise_rep", "rowwise_split_input"}

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, eq=False)
class Peers:
    """The processes that run one model together; only one if the model is not sharded, and then this costs nothing.

    Attributes:
        size: the number of processes; 1 for a model that is not sharded.
        rank: this process's number among them, from 0.
        group: their process group; None for a model that is not sharded.
        device: the device of the group's tensors.
    """

    size: int = 1
    rank: int = 0
    group: Any = None
    device: torch.device | None = None

    @classmethod
    def from_model(cls, model: nn.Module) -> Peers:
        """Return the processes that a loaded model is sharded over; FSDP's and other shards are a `ValueError`."""
        size = getattr(model, "tp_size", None) or 1
        shards: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
        meshes = {shard.device_mesh for shard in shards}
        sizes = {mesh.size() for mesh in meshes if mesh.ndim == 1}
        if len(meshes) != (size > 1) or (meshes and sizes != {size}):
            raise ValueError(
                "base_model: expected whole weights, or weights sharded by transformers' tensor parallel plan alone, "
                f"got {len(shards)} sharded parameters and a tensor parallel size of {size}"
            )
        if size == 1:
            return cls()
        mesh = meshes.pop()
        return cls(size, mesh.get_local_rank(), mesh.get_group(), shards[0].device)

    def agree(self, value: Number) -> Number:
        """Return process 0's number (float, int or bool) in every process. Every process must call this.

        With several processes the host waits for the device, so do not use this inside a step.
        """
        if self.group is None:
            return value
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        shared = torch.tensor(value, dtype=dtype, device=self.device)  # NCCL takes no host tensors
        torch.distributed.broadcast(shared, group=self.group, group_src=0)
        return type(value)(shared.item())

    def least(self, number: int) -> int:
        """Return the smallest of all processes' numbers. Every process must call this; the host waits."""
        if self.group is None:
            return number
        shared = torch.tensor(number, dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN, group=self.group)
        return int(shared)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise in every process what one of them raises in a `with` block, so that none waits for it later.

        The block must run no collective: the others would wait in it.

        With several processes a `MemoryError`, or for any other error a `RuntimeError`, names the first such process.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            if self.group is None:
                raise
            error = caught
        first = self.least(self.size if error is None else self.rank)
        if first == self.size:
            return
        said: list[Any] = [isinstance(error, (MemoryError, torch.OutOfMemoryError)), str(error)]
        source = torch.distributed.get_global_rank(self.group, first)
        torch.distributed.broadcast_object_list(said, source, self.group, self.device)
        memory, text = said
        raise (MemoryError if memory else RuntimeError)(f"process {first} of {self.size}: {text}") from error


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether several processes hold a part of a parameter each."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def local_kv_heads(causal: Any, size: int) -> int:
    """Return how many KV heads per layer this process holds of a model that is sharded over `size` processes."""
    config = causal.config
    if size == 1:
        return config.num_key_value_heads
    plan: dict[str, str] = causal.tp_plan
    unknown = sorted(set(plan.values()) - _STYLES)
    if unknown:
        raise ValueError(f"tp_plan: expected styles out of {', '.join(sorted(_STYLES))}, got {', '.join(unknown)}")
    of_attention = "model.layers.*.self_attn."
    styles = {name.removeprefix(of_attention): style for name, style in plan.items() if name.startswith(of_attention)}
    styles = {name: style for name, style in styles.items() if not name.endswith("_norm")}
    if set(styles.values()) <= _WHOLE:
        return config.num_key_value_heads
    if styles != _BY_HEADS:
        raise ValueError(f"tp_plan: expected attention sharded as {_BY_HEADS}, or whole in all processes, got {styles}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name)
        if count % size:
            raise ValueError(f"base_model: expected {name} divisible by {size} processes, got {count}")
    return config.num_key_value_heads // size


@contextlib.contextmanager
def joined(device: str) -> Iterator[int]:
    """Join the processes that `torchrun` started for a `with` block; yields this process's rank.

    The device is "cpu" (gloo) or "cuda" (NCCL, one GPU per process).
    """
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ValueError(
            "tensor parallel: expected a start by torchrun (torchrun --nproc-per-node 2 -m medusa_decoding ..), got no "
            f"{', '.join(missing)} in the environment"
        )
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise ValueError("tensor parallel: expected at least 2 processes (torchrun --nproc-per-node 2), got 1")
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    own = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=own)
    try:
        yield torch.distributed.get_rank()
    finally:
        leave()


def leave() -> None:
    """End the default process group, and wait until none of its threads is at work (2 seconds at most).

    A gloo thread releases the tensors of its last collective after the caller has gone on. Once Python has begun to
    shut down, that aborts the process, though its work is done. Destroying the group ends its threads only if nothing
    else holds it, such as the device mesh of a sharded model.
    """
    torch.distributed.destroy_process_group()
    deadline, idle = time.monotonic() + 2, 0
    # Twice: a thread that waited for Python's lock at the first look gets it in between.
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        idle = 0 if _others_run() else idle + 1


def _others_run() -> bool:
    """Return whether another thread of this process runs or waits for a core; on Linux only, elsewhere False."""
    own, busy = threading.get_native_id(), False
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state = (task / "stat").read_text().rpartition(") ")[2][:1]
            busy = busy or (state == "R" and int(task.name) != own)
    return busy
