"""BatchNorm modules whose statistics cover the mini-batches of all participants."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ._options import OPTIONS, Initializer, Options, channels_second
from .functional import batchnorm2d_sync, fit_batch_norm
from .sync import Exchange, Replica
from .sync.local import LOCAL
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


class Synchronized(Options):
    """What the modules here add to PyTorch's: a forward that synchronizes, and some attributes.

    The input is float32, float16, bfloat16 or float64, of any strides; the output has its shape,
    dtype and, if it is dense, its strides. Parameters and running statistics may be of another of
    these dtypes.

    Attributes:
        process_group: who shares the mini-batch, as ``group`` of ``batchnorm2d_sync``. ``None``
            stands for the default process group, looked up at each forward, so that a model may be
            built before it exists. Deep copies share it; pickles leave it out.
        sync: False makes the module behave as its PyTorch base class.
        frozen: True normalizes by the running statistics and leaves them alone, also in training.
        channel_axis: the dimension of the channels, as the argument below.
        keep_fp32: as the argument below.
        weight_init: as the argument below, and so the other three initializers.

    Source: as ``batchnorm2d_sync``; the options are those of Gluon's ``BatchNorm``.
    """

    process_group: dist.ProcessGroup | Exchange | None = None
    sync: bool = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | Exchange | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        center: bool = True,
        scale: bool = True,
        channel_axis: int = 1,
        use_global_stats: bool = False,
        keep_fp32: bool = False,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        running_mean_init: Initializer | None = None,
        running_var_init: Initializer | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            num_features: C, the channels of the input.
            eps: added to the variance.
            momentum: weight of the new value in the running statistics; None for the cumulative
                average.
            affine: whether there are a weight and a bias, [C] each.
            track_running_stats: whether there are running statistics, [C] each.
            process_group: who shares the mini-batch: None for the default process group, looked up
                at each forward; a ProcessGroup; or a ``syncbn.sync.Exchange``.
            device: of parameters and running statistics.
            dtype: of parameters and running statistics.
            center: False for no bias; True for one, if ``affine``.
            scale: False for no weight; True for one, if ``affine``.
            channel_axis: the dimension of the channels; -1 for [N, ..., C]. Dense inputs are not
                copied.
            use_global_stats: sets ``frozen``: normalize by the running statistics, also in
                training.
            keep_fp32: parameters and running statistics stay float32 under ``.half()`` and
                ``.bfloat16()``.
            weight_init: a callable that fills the weight in place, as those of ``torch.nn.init``;
                None for ones.
            bias_init: the same for the bias; None for zeros.
            running_mean_init: the same for the running mean; None for zeros.
            running_var_init: the same for the running variance; None for ones.
            **kwargs: what else the PyTorch class takes.

        Raises:
            ValueError: ``use_global_stats`` without running statistics.
        """
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, **kwargs
        )
        if process_group is not None:
            self.process_group = process_group
        self._set_options(
            center=center,
            scale=scale,
            channel_axis=channel_axis,
            use_global_stats=use_global_stats,
            keep_fp32=keep_fp32,
            weight_init=weight_init,
            bias_init=bias_init,
            running_mean_init=running_mean_init,
            running_var_init=running_var_init,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input``; in training by the statistics of all participants' inputs.

        Args:
            input: [N, C, ...] of as many dimensions as the class takes, or with the channels in
                ``channel_axis``.

        Returns:
            A tensor of the shape and dtype of ``input``.

        Raises:
            ValueError: a wrong number of dimensions or channels; with a single participant in
                training, one value per channel; ``frozen`` without running statistics.
            TypeError: a dtype other than the four.
            RuntimeError: the exchange failed, or ``input`` is on CUDA and this build has no CUDA
                kernels.
        """
        if isinstance(input, Proxy):
            # torch.fx.symbolic_trace: a leaf of the graph, as PyTorch's own layers are.
            path = input.tracer.path_of_module(self)
            return input.tracer.create_proxy("call_module", path, (input,), {})
        if type(self.process_group) is Replica:  # an isinstance of an ABC costs 0.3 us
            try:
                return self._synchronized_forward(input)
            except Exception as error:
                self.process_group.fail(error)  # the other replicas wait
                raise
        return self._synchronized_forward(input)

    def _synchronized_forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        axis = self.channel_axis
        if axis != 1:
            x = channels_second(x, axis)
        trains = self.training
        if self.frozen:
            if self.running_mean is None:
                raise ValueError(
                    "frozen: expected running statistics, got track_running_stats=False"
                )
            trains = False
        # Straight from the dictionaries: attribute access of a module costs 0.6 us each. Replicas
        # and parametrized modules keep tensors elsewhere.
        parameters, buffers = self._parameters, self._buffers
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        if self.track_running_stats or not trains:
            try:
                running_mean, running_var = buffers["running_mean"], buffers["running_var"]
                num_batches_tracked = buffers["num_batches_tracked"]
            except KeyError:  # parametrized, or attributes
                running_mean, running_var = self.running_mean, self.running_var
                num_batches_tracked = getattr(self, "num_batches_tracked", None)
        else:
            running_mean = running_var = num_batches_tracked = None
        if (
            not (self.frozen or (trains and self.sync))
            and (bias is None or weight is not None)
            and not (trains and isinstance(self, nn.SyncBatchNorm))  # whose own forward exchanges
            and fit_batch_norm(x, weight, bias, running_mean, running_var)
        ):
            # PyTorch's own forward, which on CUDA has no backward for a bias without a weight, and
            # takes few mixtures of dtypes.
            y: Tensor = super().forward(x)
        else:
            y = batchnorm2d_sync(
                x,
                weight,
                bias,
                running_mean,
                running_var,
                self.process_group if self.sync else LOCAL,
                trains,
                self.momentum,
                self.eps,
                num_batches_tracked,
            )
        return y if axis == 1 else y.movedim(1, axis)

    def extra_repr(self) -> str:
        text: str = super().extra_repr()
        if self.process_group is not None:
            text += f", process_group={self.process_group!r}"
        if not self.sync:
            text += ", sync=False"
        return text + self._options_repr()

    def _replicate_for_data_parallel(self) -> Synchronized:
        # Called by replicate, once per replica, before the replicas run.
        replica: Synchronized = super()._replicate_for_data_parallel()
        replica.process_group = take_part(self, replica, self.process_group)
        return replica

    def __prepare_scriptable__(self) -> Synchronized:
        raise RuntimeError(
            "torch.jit.script: expected no synchronized BatchNorm, got one; script "
            "syncbn.revert_model(copy.deepcopy(model).eval())"
        )

    def __copy__(self) -> Synchronized:
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)  # the process group too
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Synchronized:
        # A process group cannot be copied: the copy belongs to the same one. The place of a replica
        # cannot be taken twice: a copy is a layer by itself.
        group = self.process_group
        memo[id(group)] = group.group if isinstance(group, Replica) else group
        copied: Synchronized
        if hasattr(super(), "__deepcopy__"):  # a converted subclass's own
            copied = super().__deepcopy__(memo)  # type: ignore[misc]
        else:
            copied = self.__class__.__new__(self.__class__)
            memo[id(self)] = copied
            # A parametrized class has a __getstate__ that raises, for pickles.
            parametrized = parametrize.is_parametrized(self)
            state = Synchronized.__getstate__(self) if parametrized else self.__getstate__()
            copied.__setstate__(deepcopy(state, memo))
        if "process_group" in self.__dict__:
            copied.process_group = memo[id(group)]
        return copied

    def __getstate__(self) -> Any:
        # Python before 3.11 has no object.__getstate__.
        state = super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__
        if isinstance(state, dict):
            state = {k: v for k, v in state.items() if k != "process_group"}
        return state


class BatchNorm1d(Synchronized, nn.BatchNorm1d):
    """Synchronized ``torch.nn.BatchNorm1d``: inputs [N, C] or [N, C, L].

    Arguments, errors and source: ``Synchronized``.
    """


class BatchNorm2d(Synchronized, nn.BatchNorm2d):
    """Synchronized ``torch.nn.BatchNorm2d``: inputs [N, C, H, W].

    Arguments, errors and source: ``Synchronized``.
    """


class BatchNorm3d(Synchronized, nn.BatchNorm3d):
    """Synchronized ``torch.nn.BatchNorm3d``: inputs [N, C, D, H, W].

    Arguments, errors and source: ``Synchronized``.
    """


class SyncBatchNorm(Synchronized):
    """``torch.nn.SyncBatchNorm`` on every device: inputs [N, C, ...] of 2 or more dimensions.

    Arguments, errors and source: ``Synchronized``.
    """

    # Not a subclass of nn.SyncBatchNorm, which DistributedDataParallel refuses on the CPU.

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")


class _Lazy(Synchronized):
    """The constructor of the lazy modules: that of ``Synchronized`` without ``num_features``."""

    def __init__(
        self, *args: Any, process_group: dist.ProcessGroup | Exchange | None = None, **kwargs: Any
    ) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
        # PyTorch's lazy class next in line takes everything else but the process group.
        super(Options, self).__init__(*args, **kwargs)
        if process_group is not None:
            self.process_group = process_group
        self._set_options(**options)

    def _tensors(self) -> list[Any]:
        return [
            v
            for v in (self.weight, self.bias, self.running_mean, self.running_var)
            if v is not None
        ]

    def reset_parameters(self) -> None:
        if not any(map(is_lazy, self._tensors())) and self.num_features != 0:
            super().reset_parameters()

    def initialize_parameters(self, input: Tensor) -> None:
        """Takes the number of channels from the first input [N, C, ...]."""
        if self.num_features == 0:
            self.num_features = channels_second(input, self.channel_axis).shape[1]
            missing = list(filter(is_lazy, self._tensors()))
            for v in missing:
                v.materialize((self.num_features,))
            if missing:  # a state_dict may have brought them
                self.reset_parameters()


class LazyBatchNorm1d(_Lazy, nn.LazyBatchNorm1d):
    """Becomes a synchronized ``BatchNorm1d`` at its first input, whose channels it counts.

    Takes the arguments of ``Synchronized`` but for ``num_features``.
    """

    cls_to_become = BatchNorm1d  # type: ignore[assignment]


class LazyBatchNorm2d(_Lazy, nn.LazyBatchNorm2d):
    """Becomes a synchronized ``BatchNorm2d`` at its first input, whose channels it counts.

    Takes the arguments of ``Synchronized`` but for ``num_features``.
    """

    cls_to_become = BatchNorm2d  # type: ignore[assignment]


class LazyBatchNorm3d(_Lazy, nn.LazyBatchNorm3d):
    """Becomes a synchronized ``BatchNorm3d`` at its first input, whose channels it counts.

    Takes the arguments of ``Synchronized`` but for ``num_features``.
    """

    cls_to_become = BatchNorm3d  # type: ignore[assignment]
