"""The four ops as functions that allocate and return their results, and as ``torch.ops.syncbn``.

Three sets of the same four functions, of which a call picks one: ``KERNELS`` goes straight to
``_C``, at the least cost for the host; ``REFERENCE`` is for tensors that the kernels cannot read;
``torch.ops.syncbn`` goes through PyTorch's dispatcher, where compilers see it.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import _C, reference
from ._workspace import workspace_for

_float64 = torch.float64


class Ops:
    """The ops over an implementation that takes its outputs as arguments."""

    def __init__(self, implementation: ModuleType) -> None:
        self._op = implementation
        self.check = implementation.check

    def _workspace(self, x: Tensor) -> Tensor | None:
        return workspace_for(x) if x.is_cuda and self._op is _C else None

    def statistics(self, x: Tensor) -> Tensor:
        """Sums [2C + 1] float64 of ``x`` [N, C, ...]: [sum of x | sum of x^2 | n]."""
        device = reference.sums_device(x) if self._op is reference else x.device
        sums = torch.empty(2 * x.shape[1] + 1, dtype=_float64, device=device)
        self._op.statistics(x, sums, self._workspace(x))
        return sums

    def normalize(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        sums: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """``y`` and moments [2C + 1] float64: [mean | invstd | n]. Moves the running statistics."""
        if torch._C._current_graph_task_id() != -1:
            # Inside a backward pass: a recomputation (checkpointing), whose batch has been counted.
            running_mean = running_var = num_batches_tracked = None
        y = torch.empty_like(x)
        moments = torch.empty_like(sums)
        self._op.normalize(
            x,
            weight,
            bias,
            sums,
            running_mean,
            running_var,
            num_batches_tracked,
            y,
            moments,
            momentum,
            eps,
        )
        if running_mean is not None:
            # The writes, made known to autograd: an earlier forward in eval may have saved these.
            torch._C._increment_version(
                (running_mean, running_var)  # type: ignore[arg-type]
                if num_batches_tracked is None
                else (running_mean, running_var, num_batches_tracked)
            )
        return y, moments

    def backward_reduce(
        self,
        dy: Tensor,
        x: Tensor,
        moments: Tensor,
        weight_dtype: torch.dtype | None,
        bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Sums [2C]: [sum of dy | sum of dy * xhat]; and dweight and dbias [C], if asked for."""
        channels = x.shape[1]
        sums_dy = _empty(x, 2 * channels, _acc_dtype(x))
        dweight = None if weight_dtype is None else _empty(x, channels, weight_dtype)
        dbias = None if bias_dtype is None else _empty(x, channels, bias_dtype)
        self._op.backward_reduce(dy, x, moments, sums_dy, dweight, dbias, self._workspace(x))
        return sums_dy, dweight, dbias

    def backward_input(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, moments: Tensor, sums_dy: Tensor
    ) -> Tensor:
        """dx [N, C, ...], from the reduced sums."""
        dx = torch.empty_like(x)
        self._op.backward_input(dy, x, weight, moments, sums_dy, dx)
        return dx


def _acc_dtype(x: Tensor) -> torch.dtype:
    return _float64 if x.dtype is _float64 else torch.float32


def _empty(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[size] on the device of ``x``. Naming a dtype costs the host a quarter more."""
    return x.new_empty(size) if x.dtype is dtype else x.new_empty(size, dtype=dtype)


def link_for(x: Tensor) -> Tensor:
    """[2C], uninitialized: of the device and dtype of the sums of ``backward_reduce``."""
    return _empty(x, 2 * x.shape[1], _acc_dtype(x))


KERNELS = Ops(_C)
REFERENCE = Ops(reference)


def with_layout_of(x: Tensor, dy: Tensor) -> Tensor:
    """``dy``, copied if its elements do not lie where those of ``x`` do."""
    return dy if _C.same_layout(dy, x) else torch.empty_like(x).copy_(dy)


class _Dispatched(Ops):
    """``KERNELS`` for a compiler, which hands over tensors of any strides."""

    def statistics(self, x: Tensor) -> Tensor:
        return super().statistics(_dense(x))

    def normalize(self, x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return super().normalize(_dense(x), *rest)  # type: ignore[arg-type]

    def backward_reduce(
        self, dy: Tensor, x: Tensor, *rest: object
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = _dense(x)
        return super().backward_reduce(with_layout_of(x, dy), x, *rest)  # type: ignore[arg-type]

    def backward_input(self, dy: Tensor, x: Tensor, *rest: object) -> Tensor:
        x = _dense(x)
        return super().backward_input(with_layout_of(x, dy), x, *rest)  # type: ignore[arg-type]


def _dense(x: Tensor) -> Tensor:
    dense = _C.check(x, None, None, None, None, None, 0.0)
    return x if dense else torch.empty_like(x).copy_(x)


def _fake_statistics(x: Tensor) -> Tensor:
    return x.new_empty(2 * x.shape[1] + 1, dtype=_float64)


def _fake_normalize(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2 * x.shape[1] + 1, dtype=_float64)


def _fake_backward_reduce(
    dy: Tensor,
    x: Tensor,
    moments: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    channels = x.shape[1]
    return (
        _empty(x, 2 * channels, _acc_dtype(x)),
        None if weight_dtype is None else _empty(x, channels, weight_dtype),
        None if bias_dtype is None else _empty(x, channels, bias_dtype),
    )


def _fake_backward_input(dy: Tensor, x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


_SCHEMAS = {
    "statistics": "(Tensor x) -> Tensor",
    "normalize": (
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor sums, Tensor(a!)? running_mean, "
        "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps) "
        "-> (Tensor, Tensor)"
    ),
    "backward_reduce": (
        "(Tensor dy, Tensor x, Tensor moments, ScalarType? weight_dtype, ScalarType? bias_dtype) "
        "-> (Tensor, Tensor?, Tensor?)"
    ),
    "backward_input": (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor moments, Tensor sums_dy) -> Tensor"
    ),
}
_dispatched = _Dispatched(_C)
_library = torch.library.Library("syncbn", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=[torch.Tag.pt2_compliant_tag])
    _library.impl(_name, getattr(_dispatched, _name), "CPU")
    _library.impl(_name, getattr(_dispatched, _name), "CUDA")
    _library.impl(_name, getattr(REFERENCE, _name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"syncbn::{_name}", globals()[f"_fake_{_name}"], lib=_library)
