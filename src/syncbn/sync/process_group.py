"""The exchange over a process group of ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.autograd import profiler
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from .exchange import Exchange

if dist.is_available():
    _SYNCHRONOUS = dist.AllreduceOptions()
    _SYNCHRONOUS.asyncOp = False


class ProcessGroupExchange(Exchange):
    """One all_reduce over ``group``: any backend, cost independent of the number of ranks.

    Args:
        group: a ``ProcessGroup`` that this rank is a member of.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self._backends: dict[str, Any] = {}  # by the type of device that they serve

    def all_reduce(self, values: Tensor) -> Tensor:
        if is_compiling():
            return self._functional(values)
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp._join_config.enable:
            _refuse_join(ddp._join_config.throw_on_early_termination)
        # Not dist.all_reduce: it adds 10 us of checks that hold here by construction. A synchronous
        # NCCL collective runs in the current stream, without the events that would tie another one
        # to it; a backend that knows of no such thing hands out work to wait for. wait() blocks
        # until the sum is there for gloo.
        try:
            if _len_torch_dispatch_stack() and type(self.group) is dist.ProcessGroup:
                # Selective checkpointing keeps results in place of calls: none of an op in place.
                return self._functional(values)
            work = self._backend(values).allreduce([values], _SYNCHRONOUS)
            if work is not None:
                work.wait()
        except Exception as error:
            rank = dist.get_rank() if dist.is_initialized() else self.group.rank()
            raise RuntimeError(
                f"all_reduce of {values.numel()} values over {self} failed on rank {rank}. Every "
                "rank of the group must run the same synchronized layers in the same order, "
                f"forward and backward. The backend says: {error}"
            ) from error
        return values

    def _functional(self, values: Tensor) -> Tensor:
        # Here, because it would add 30 ms to the import.
        from torch.distributed import _functional_collectives as funcol

        summed: Any = funcol.all_reduce(values, "sum", self.group)
        # Something to wait for where nothing is traced.
        return summed.wait() if isinstance(summed, funcol.AsyncCollectiveTensor) else summed

    def _backend(self, values: Tensor) -> Any:
        """What the group's own ``allreduce`` calls by way of the dispatcher, which costs 5 us.

        The dispatcher tells profilers of the call; and a subclass may have an ``allreduce`` of its
        own.
        """
        group = self.group
        if profiler._is_profiler_enabled or type(group) is not dist.ProcessGroup:
            return group
        device = values.device
        backend = self._backends.get(device.type)
        if backend is None:
            backend = self._backends[device.type] = group._get_backend(device)
        return backend

    def __repr__(self) -> str:
        try:
            ranks = dist.get_process_group_ranks(self.group)
            return f"process group {self.group.group_name!r} of ranks {ranks}"
        except (KeyError, RuntimeError):  # a group that PyTorch does not know
            return f"process group {object.__repr__(self.group)}"


def _refuse_join(throws: bool) -> None:
    """A rank that has run out of batches takes part in DDP's collectives there, not in others."""
    if not throws:
        raise RuntimeError(
            "DistributedDataParallel.join: expected throw_on_early_termination=True around "
            "synchronized batch norm, got False; or give a rank that has run out of batches empty "
            "ones"
        )


def create_process_group(group_size: int) -> dist.ProcessGroup:
    """Splits the world into groups of ``group_size`` consecutive ranks and returns this rank's.

    For ``convert_model(model, process_group)``: statistics are then shared inside each group. A
    collective call: every rank of the default group makes it, with the same ``group_size``.

    Args:
        group_size: ranks per group; divides the world size.

    Returns:
        The group that this rank is in.

    Raises:
        RuntimeError: no default process group yet.
        ValueError: ``group_size`` does not divide the world size.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "create_process_group: expected an initialized default process group, got none; "
            "call torch.distributed.init_process_group first"
        )
    world_size = dist.get_world_size()
    if group_size < 1 or world_size % group_size != 0:
        raise ValueError(
            f"create_process_group: expected a group_size that divides the world size "
            f"{world_size}, got {group_size}"
        )
    group, _ = dist.new_subgroups(group_size)
    return group
