"""The four ops as functions that allocate and return their results, and as ``torch.ops.syncbn``.

Three sets of the same four functions, of which a call picks one: ``KERNELS`` goes straight to
``_C``, at the least cost for the host; ``REFERENCE`` is for tensors that the kernels cannot read;
``torch.ops.syncbn`` goes through PyTorch's dispatcher, where compilers see it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, empty_like, float32, float64

from . import _C, reference
from ._workspace import memory_for

# Every look-up in a module costs the host.
_current_graph_task_id = torch._C._current_graph_task_id
_increment_version = torch._C._increment_version
same_layout = _C.same_layout


class Ops:
    """The ops over an implementation that takes its outputs as arguments."""

    def __init__(
        self, implementation: ModuleType, workspace_for: Callable[[Tensor], Tensor | None]
    ) -> None:
        self._op = implementation
        self._workspace_for = workspace_for
        self.check = implementation.check

    def statistics(self, x: Tensor) -> Tensor:
        """Sums [2C + 1] float64 of ``x`` [N, C, ...]: [sum of x | sum of x^2 | n]."""
        sums = x.new_empty(2 * x.shape[1] + 1, dtype=float64)
        self._op.statistics(x, sums, self._workspace_for(x))
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
        running_mean, running_var, num_batches_tracked = moved(
            running_mean, running_var, num_batches_tracked
        )
        y = empty_like(x)
        moments = empty_like(sums)
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
        return y, moments

    def backward_reduce(
        self, dy: Tensor, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Sums [2C]: [sum of dy | sum of dy * xhat]; and gradients like ``weight`` and ``bias``."""
        sums_dy = sums_dy_for(x)
        dweight = None if weight is None else empty_like(weight)
        dbias = None if bias is None else empty_like(bias)
        self._op.backward_reduce(dy, x, moments, sums_dy, dweight, dbias, self._workspace_for(x))
        return sums_dy, dweight, dbias

    def backward_input(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, moments: Tensor, sums_dy: Tensor
    ) -> Tensor:
        """dx [N, C, ...], from the reduced sums."""
        dx = empty_like(x)
        self._op.backward_input(dy, x, weight, moments, sums_dy, dx)
        return dx


def moved(
    running_mean: Tensor | None, running_var: Tensor | None, num_batches_tracked: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of the running statistics that the forward pass at hand is to move.

    None of them inside a backward pass: that is a recomputation (checkpointing), whose batch has
    been counted. Autograd is told of the others: an earlier forward in eval may have saved them.
    """
    if _current_graph_task_id() != -1:
        return None, None, None
    if running_mean is not None:
        statistics = running_mean, running_var
        _increment_version(
            statistics if num_batches_tracked is None else (*statistics, num_batches_tracked)  # type: ignore[arg-type]
        )
    return running_mean, running_var, num_batches_tracked


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return float64 if x.dtype is float64 else float32


def sums_dy_for(x: Tensor) -> Tensor:
    """Memory for [2C] in the accumulation type of ``x``."""
    return x.new_empty(2 * x.shape[1], dtype=accumulation_dtype(x))


class _Reference(Ops):
    """The ops over tensors that the kernels cannot read: no workspace, sums where float64 is."""

    def statistics(self, x: Tensor) -> Tensor:
        sums = torch.empty(2 * x.shape[1] + 1, dtype=float64, device=reference.sums_device(x))
        reference.statistics(x, sums)
        return sums


KERNELS = Ops(_C, lambda x: memory_for(x).workspace)
REFERENCE = _Reference(reference, lambda x: None)


def alike(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Both, copied as far as their elements do not lie at the same places, without gaps.

    A saved ``x`` has gaps only where a hook for saved tensors has put it among others.
    """
    if same_layout(dy, x):
        return x, dy
    x = _dense(x)
    return x, dy if same_layout(dy, x) else empty_like(x).copy_(dy)


class _Dispatched(Ops):
    """``KERNELS`` for a compiler, which hands over tensors of any strides."""

    def statistics(self, x: Tensor) -> Tensor:
        return super().statistics(_dense(x))

    def normalize(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        sums: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        return super().normalize(_dense(x), _contiguous(weight), _contiguous(bias), sums, *rest)

    def backward_reduce(
        self, dy: Tensor, x: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, dy = alike(_dense(x), dy)
        return super().backward_reduce(dy, x, *rest)

    def backward_input(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, moments: Tensor, sums_dy: Tensor
    ) -> Tensor:
        x, dy = alike(_dense(x), dy)
        return super().backward_input(dy, x, _contiguous(weight), moments, sums_dy)


def _own_workspace(x: Tensor) -> Tensor | None:
    """Not kept: torch.compile(mode="reduce-overhead") warms up in the memory of its CUDA graphs,
    where nothing may be kept that is not an output."""
    if not x.is_cuda:
        return None
    return torch.zeros(_C.WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)


def _dense(x: Tensor) -> Tensor:
    dense = _C.check(x, None, None, None, None, None, 0.0, 0.0)
    return x if dense else empty_like(x).copy_(x)


def _contiguous(v: Tensor | None) -> Tensor | None:
    return None if v is None else v.contiguous()


def _fake_statistics(x: Tensor) -> Tensor:
    return x.new_empty(2 * x.shape[1] + 1, dtype=float64)


def _fake_normalize(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return empty_like(x), x.new_empty(2 * x.shape[1] + 1, dtype=float64)


def _fake_backward_reduce(
    dy: Tensor, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return (
        sums_dy_for(x),
        None if weight is None else empty_like(weight),
        None if bias is None else empty_like(bias),
    )


def _fake_backward_input(dy: Tensor, x: Tensor, *rest: object) -> Tensor:
    return empty_like(x)


_SCHEMAS = {
    "statistics": "(Tensor x) -> Tensor",
    "normalize": (
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor sums, Tensor(a!)? running_mean, "
        "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps) "
        "-> (Tensor, Tensor)"
    ),
    "backward_reduce": (
        "(Tensor dy, Tensor x, Tensor moments, Tensor? weight, Tensor? bias) "
        "-> (Tensor, Tensor?, Tensor?)"
    ),
    "backward_input": (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor moments, Tensor sums_dy) -> Tensor"
    ),
}
_dispatched = _Dispatched(_C, _own_workspace)
_library = torch.library.Library("syncbn", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=[torch.Tag.pt2_compliant_tag])
    _library.impl(_name, getattr(_dispatched, _name), "CPU")
    _library.impl(_name, getattr(_dispatched, _name), "CUDA")
    _library.impl(_name, getattr(REFERENCE, _name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"syncbn::{_name}", globals()[f"_fake_{_name}"], lib=_library)
