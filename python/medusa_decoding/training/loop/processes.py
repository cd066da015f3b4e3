"""The processes of a run: ranks, sums and errors over all of them, and replicated (DDP) or divided (FSDP) weights.

`accelerate launch` or torchrun starts several; otherwise there is one. Only the main process reads and writes the
output folder, which the others need not see; they receive what they need.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from medusa_decoding.backbone.tensor_parallel import leave
from medusa_decoding.checks import import_library

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process, its rank from 0, and its relation to the others of the run.

    `sharded` says whether weights are divided over the processes.
    """

    rank: int
    size: int
    device: torch.device
    sharded: bool

    @classmethod
    def join(cls, sharding: Literal["auto", "none", "full"] = "auto") -> Processes:
        """Join the processes that were launched together.

        Raises:
            ModuleNotFoundError: accelerate is missing.
            ValueError: divided weights are requested for one process.
        """
        # The main process alone reads and writes checkpoints, and others wait for it.
        waits = timedelta(hours=6)
        state = import_library("accelerate", "training").PartialState(cpu=not torch.cuda.is_available(), timeout=waits)
        if state.num_processes > 1:
            atexit.register(_leave)
        elif sharding == "full":
            raise ValueError("optimisation.sharding: expected none or auto in one process, got full")
        asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        sharded = state.num_processes > 1 and (sharding == "full" or (sharding == "auto" and asked))
        return cls(state.process_index, state.num_processes, state.device, sharded)

    @property
    def main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor up over all processes; the same result everywhere."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def together(self, error: BaseException | None) -> None:
        """Raise in every process if one of them has an error, so that none waits for it.

        Raises:
            BaseException: the process's own error.
            RuntimeError: another process has one.
        """
        failed = self.total(torch.tensor([error is not None], dtype=torch.int64, device=self.device))
        if error is not None:
            raise error
        if int(failed):
            raise RuntimeError("another process of this run failed; see its message")

    def by_main(self, work: Callable[[], T]) -> T:
        """Do some work in the main process alone, and return its result, a small one, in all.

        Raises:
            Exception: the main process's own error; in the others a `ValueError` with its message.
        """
        found: list[Any] = [None, None]
        error: Exception | None = None
        if self.main:
            try:
                found[0] = work()
            except Exception as caught:
                error, found[1] = caught, str(caught)
        if self.size > 1:
            dist.broadcast_object_list(found, src=0)
        if error is not None:
            raise error
        if found[1] is not None:
            raise ValueError(found[1])
        return found[0]

    def same(self, values: Mapping[str, Any]) -> None:
        """Check that all processes have the same values by name.

        Raises:
            ValueError: in every process; names the first that differs, and the process.
        """
        found: list[Any] = [dict(values)] * self.size
        if self.size > 1:
            dist.all_gather_object(found, dict(values))
        for rank, theirs in enumerate(found):
            for name, value in found[0].items():
                if theirs[name] != value:
                    raise ValueError(
                        f"{name}: expected the same in all processes, got another in process {rank} than in process 0"
                    )

    def in_turn(self, work: Callable[[], None]) -> None:
        """Do some work in every process, one after the other; errors as in `each`."""
        for rank in range(self.size):
            self.each(work if rank == self.rank else lambda: None)

    def each(self, work: Callable[[], T]) -> T:
        """Do some work in every process, and end all of them if it fails in one. It must not wait for other processes.

        Raises:
            Exception: the process's own error.
            RuntimeError: another process has one.
        """
        try:
            found = work()
        except Exception as caught:
            self.together(caught)
            raise
        self.together(None)
        return found

    def agree(self, module: nn.Module) -> None:
        """Check that all processes have weights and buffers of the same names and shapes; take the main one's dtypes.

        They may differ: the main process has read the model's files, the others have made it from its config.

        Raises:
            ValueError: in every process, if one has a weight or buffer of another name or shape.
        """
        held: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.same({"model.name": [(name, list(tensor.shape)) for name, tensor in held.items()]})
        dtypes = self.by_main(lambda: [tensor.dtype for tensor in held.values()])
        for tensor, dtype in zip(held.values(), dtypes, strict=True):
            if tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)

    def shard(self, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Divide a module's weights over the processes in place: each layer is a unit, and the rest is another.

        The values are the main process's. Other processes may give the module on the meta device; they never hold more
        than their shares and one whole weight at a time.

        Raises:
            ValueError: see `agree`.
        """
        self.agree(module)
        held = {name: weight.detach() if self.main else None for name, weight in module.named_parameters()}
        mesh = init_device_mesh(self.device.type, (self.size,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        # The backward pass needs the last weights of a step (lm_head, heads) at once.
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        if not self.main:
            module.to_empty(device=self.device)
        with torch.no_grad():
            for name, values in held.items():
                self.fill(module.get_parameter(name), values)
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def replicated(self, module: nn.Module) -> nn.Module:
        """Return a module whose gradients are averaged over the processes; the module itself if that is sharded."""
        if self.size == 1 or self.sharded:
            return module
        # Views: no second copy of the gradients. Inputs are on the device already.
        return DistributedDataParallel(module, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True)

    def fill(self, weight: torch.Tensor, values: torch.Tensor | None) -> None:
        """Copy the main process's values into a weight; all processes must call, the others without values."""
        weight.copy_(self._received(weight if values is None else values, weight))

    def _received(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the main process's values, divided as a weight of their shape is.

        The other processes give any tensor of that shape and dtype.
        """
        if not self.main:
            values = torch.empty(values.shape, dtype=values.dtype)
        if isinstance(weight, DTensor) and weight.shape == values.shape:
            return distribute_tensor(values.to(self.device), weight.device_mesh, weight.placements)
        if self.size > 1:
            values = values.to(self.device).contiguous()
            dist.broadcast(values, 0)
        return values.cpu()  # where AdamW's count of steps must be; what belongs on the device is moved there

    def optimiser_state(self, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimiser, whole in the main process; all processes must call."""

        def gathered(value: DTensor) -> torch.Tensor | None:
            values = value.full_tensor()
            return values.cpu() if self.main else None

        return tree_map_only(DTensor, gathered, optimiser.state_dict())

    def load_optimiser_state(self, optimiser: torch.optim.Optimizer, saved: dict[str, Any] | None) -> None:
        """Load the main process's result of `optimiser_state`; all processes must call, the others without it."""
        state = self.by_main(lambda: tree_map_only(torch.Tensor, lambda value: value.to("meta"), saved))
        weights = [weight for group in optimiser.param_groups for weight in group["params"]]
        for number, values in (state if saved is None else saved)["state"].items():
            received = functools.partial(self._received, weight=weights[number])
            state["state"][number] = tree_map_only(torch.Tensor, received, values)
        optimiser.load_state_dict(state)

    def gradients_kept(self, module: nn.Module, keep: bool) -> contextlib.AbstractContextManager[None]:
        """Leave gradients in this process while `keep` is set: more micro-batches of the step follow."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(not keep)
        if isinstance(module, DistributedDataParallel) and keep:
            return module.no_sync()
        return contextlib.nullcontext()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be divided over processes; all of them must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _leave() -> None:
    """End gloo's group before Python ends, unless a script has."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        leave()
