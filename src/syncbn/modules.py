"""BatchNorm modules whose statistics cover the mini-batches of all participants."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .functional import batchnorm2d_sync
from .sync import Exchange, Replica
from .sync.replicas import take_part

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "SyncBatchNorm",
    "Synchronized",
]


class Synchronized(_BatchNorm):
    """What the modules here add to PyTorch's: a forward that synchronizes, and three attributes.

    Attributes:
        process_group: who shares the mini-batch, as ``group`` of ``batchnorm2d_sync``. ``None``
            stands for the default process group, looked up at each forward, so that a model may be
            built before it exists. Deep copies share it; pickles leave it out.
        sync: False makes the module behave as its PyTorch base class.
        frozen: True normalizes by the running statistics and leaves them alone, also in training.
    """

    process_group: dist.ProcessGroup | Exchange | None = None
    sync: bool = True
    frozen: bool = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | Exchange | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **kwargs)
        if process_group is not None:
            self.process_group = process_group

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self._forward(x)
        except Exception as error:
            if isinstance(self.process_group, Replica):
                self.process_group.fail(error)  # the other replicas wait
            raise

    def _forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if self.frozen:
            if self.running_mean is None:
                raise ValueError(
                    "frozen: expected running statistics, got track_running_stats=False"
                )
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if not (self.training and self.sync):
            return super().forward(x)
        # Straight from the dictionaries: attribute access of a module costs 0.6 us each. Replicas
        # and parametrized modules keep their tensors elsewhere.
        parameters, buffers = self._parameters, self._buffers
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        if self.track_running_stats:
            running_mean, running_var = buffers["running_mean"], buffers["running_var"]
            num_batches_tracked = buffers["num_batches_tracked"]
        else:
            running_mean = running_var = num_batches_tracked = None
        return batchnorm2d_sync(
            x,
            weight,
            bias,
            running_mean,
            running_var,
            self.process_group,
            True,
            self.momentum,
            self.eps,
            num_batches_tracked,
        )

    def extra_repr(self) -> str:
        text: str = super().extra_repr()
        if self.process_group is not None:
            text += f", process_group={self.process_group!r}"
        if not self.sync:
            text += ", sync=False"
        if self.frozen:
            text += ", frozen=True"
        return text

    def _replicate_for_data_parallel(self) -> Synchronized:
        # Called by replicate, once per replica, before the replicas run.
        replica: Synchronized = super()._replicate_for_data_parallel()
        replica.process_group = take_part(self, replica, self.process_group)
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> Synchronized:
        # A process group cannot be copied: the copy belongs to the same one. The place of a replica
        # cannot be taken twice: a copy is a layer by itself.
        state, group = self.__dict__, self.process_group
        if isinstance(group, Replica):
            group = group.group
            state = {**state, "process_group": group}
        memo[id(group)] = group
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(state, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "process_group"}


_ARGUMENTS = """

    Args:
        num_features: C, the channels of the input.
        eps: added to the variance.
        momentum: weight of the new value in the running statistics; None for the cumulative
            average.
        affine: whether there are a weight and a bias, [C] each.
        track_running_stats: whether there are running statistics, [C] each.
        process_group: who shares the mini-batch: None for the default process group, looked up at
            each forward; a ProcessGroup; or a syncbn.sync.Exchange.
        device, dtype: of parameters and running statistics. Further keyword arguments go to the
            base class.

    Raises, in forward:
        ValueError: an input of the wrong number of dimensions or channels, or, with a single
            participant in training, of one value per channel.
    """


class BatchNorm1d(Synchronized, nn.BatchNorm1d):
    __doc__ = "Synchronized ``torch.nn.BatchNorm1d``: inputs [N, C] or [N, C, L]." + _ARGUMENTS


class BatchNorm2d(Synchronized, nn.BatchNorm2d):
    __doc__ = "Synchronized ``torch.nn.BatchNorm2d``: inputs [N, C, H, W]." + _ARGUMENTS


class BatchNorm3d(Synchronized, nn.BatchNorm3d):
    __doc__ = "Synchronized ``torch.nn.BatchNorm3d``: inputs [N, C, D, H, W]." + _ARGUMENTS


class SyncBatchNorm(Synchronized):
    # Not a subclass of nn.SyncBatchNorm, which DistributedDataParallel refuses on the CPU.
    __doc__ = (
        "``torch.nn.SyncBatchNorm`` on every device: inputs [N, C, ...] of 2 or more dimensions."
        + _ARGUMENTS
    )

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")


class _Lazy(Synchronized):
    """The constructor of the lazy modules: that of ``Synchronized`` without ``num_features``."""

    def __init__(
        self, *args: Any, process_group: dist.ProcessGroup | Exchange | None = None, **kwargs: Any
    ) -> None:
        # PyTorch's lazy class next in line takes everything but the process group.
        super(Synchronized, self).__init__(*args, **kwargs)
        if process_group is not None:
            self.process_group = process_group


class LazyBatchNorm1d(_Lazy, nn.LazyBatchNorm1d):
    """Becomes a synchronized ``BatchNorm1d`` at its first input."""

    cls_to_become = BatchNorm1d  # type: ignore[assignment]


class LazyBatchNorm2d(_Lazy, nn.LazyBatchNorm2d):
    """Becomes a synchronized ``BatchNorm2d`` at its first input."""

    cls_to_become = BatchNorm2d  # type: ignore[assignment]


class LazyBatchNorm3d(_Lazy, nn.LazyBatchNorm3d):
    """Becomes a synchronized ``BatchNorm3d`` at its first input."""

    cls_to_become = BatchNorm3d  # type: ignore[assignment]
