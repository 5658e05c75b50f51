"""Synchronized batch normalization as a function."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, empty_like, float64, is_grad_enabled
from torch._C import _are_functorch_transforms_active as functorch_active
from torch._C import _len_torch_dispatch_stack
from torch.autograd import profiler
from torch.compiler import is_compiling

from . import _C, reference
from ._function import direct, is_batched
from ._ops import (
    KERNELS,
    REFERENCE,
    accumulation_dtype,
    alike,
    moved,
)
from ._workspace import memory_for, take
from .sync import Exchange, Local, ProcessGroupExchange, exchange_for
from .sync.local import LOCAL

__all__ = ["batchnorm2d_sync"]

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def batchnorm2d_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    group: dist.ProcessGroup | Exchange | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """Batch normalization with statistics over the mini-batches of all participants of ``group``.

    As ``torch.nn.functional.batch_norm`` on the concatenation of all participants' ``x``, gradients
    and running statistics included; the gradients of ``weight`` and ``bias`` are this participant's
    addends, which DistributedDataParallel averages. In training every participant must make the
    call, and run its backward, in the same order; one with an empty ``x`` too.

    Args:
        x: [N, C, ...], 2 or more dimensions in spite of the name; float32, float16, bfloat16 or
            float64; any strides. A dense ``x`` (contiguous, channels_last or another order of
            dimensions) is used in place, another one is copied. N may be 0 and differ between
            participants.
        weight: [C] or None for ones; any of the four dtypes, as ``bias`` and the running
            statistics.
        bias: [C] or None for zeros.
        running_mean: [C] or None. Updated in place in training, unless the call is a recomputation
            inside a backward pass (activation checkpointing).
        running_var: [C] or None, as ``running_mean``; takes the unbiased variance.
        group: ``None`` (the default process group if there is one, else no exchange), a
            ``ProcessGroup``, or a ``syncbn.sync.Exchange``.
        training: False normalizes by the running statistics, or by local statistics where there are
            none; without communication.
        momentum: weight of the new value in the running statistics; ``None`` for the cumulative
            average, which needs ``num_batches_tracked``.
        eps: added to the variance.
        num_batches_tracked: [] int64 or None; counts one more in training.

    Returns:
        [N, C, ...], of the dtype and strides of ``x`` (if dense).

    Raises:
        TypeError: an argument is not a tensor, of another dtype, or a tensor subclass without plain
            memory.
        ValueError: a shape or device does not fit; one participant with one value per channel in
            training.
        RuntimeError: the collective failed, or ``x`` is on CUDA and this build has no CUDA kernels.

    The first three are raised before any communication.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015; eps, momentum and the unbiased
    running variance as in ``torch.nn.BatchNorm2d``.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"batchnorm2d_sync: expected x to be a tensor, got {type(x).__name__}")
    plain = type(x).__torch_dispatch__ is _PLAIN_DISPATCH
    if is_compiling():
        ops: Any = torch.ops.syncbn
        check = reference.check
    elif functorch_active() or not (plain and (x.is_cpu or x.is_cuda)):
        ops = REFERENCE
        check = reference.check
    else:
        # Whoever listens at PyTorch's dispatcher hears of the same kernels by their names.
        watched = profiler._is_profiler_enabled or _len_torch_dispatch_stack()
        ops = torch.ops.syncbn if watched else KERNELS
        check = KERNELS.check
    ready = check(x, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps)
    if not training:
        # F.batch_norm takes local statistics only where it is told that it trains, and on CUDA it
        # has no backward for a bias without a weight.
        local = running_mean is None
        if weight is None and bias is not None:
            weight = torch.ones_like(bias)
        vectors = running_mean, running_var, weight, bias
        if not fit_batch_norm(x, *vectors):
            wide = torch.promote_types(x.dtype, torch.float32)
            running_mean, running_var, weight, bias = (
                None if v is None else v.to(wide) for v in vectors
            )
        out = F.batch_norm(x, running_mean, running_var, weight, bias, local, 0.0, eps)
        if out.requires_grad and not (is_compiling() or functorch_active()):
            out.register_hook(partial(_in_layout, out.stride()))
        return out
    if ops is REFERENCE and functorch_active():
        raise RuntimeError(
            "batchnorm2d_sync: expected no transform of torch.func (vmap, grad, ...) in training, "
            "got one; use torch.autograd, or a layer with sync=False"
        )
    exchange = exchange_for(group)
    if exchange.size == 1:
        if x.numel() == x.shape[1]:
            raise ValueError(
                "expected more than 1 value per channel when training, "
                f"got x of shape {list(x.shape)}"
            )
    elif not plain and not is_compiling():
        raise TypeError(
            f"batchnorm2d_sync: expected x to be a plain torch.Tensor, got {type(x).__name__}, "
            "whose statistics cannot be exchanged; pass its local part"
        )
    if not ready:
        x = torch.empty_like(x).copy_(x)
        weight = weight if weight is None else weight.contiguous()
        bias = bias if bias is None else bias.contiguous()
    rest = running_mean, running_var, num_batches_tracked, momentum, eps
    if exchange.joins:
        return exchange.batch_norm(ops, x, weight, bias, *rest)
    y: Tensor
    if ops is KERNELS and type(exchange) is Local:
        y = _apply_alone(x, weight, bias, rest)
    elif ops is KERNELS and type(exchange) is ProcessGroupExchange:
        y = _apply_in_group(x, weight, bias, (exchange, rest))
    else:
        y = _BatchNorm.apply(x, weight, bias, (ops, exchange, rest))
    return y


def _in_layout(strides: tuple[int, ...], dy: Tensor | None) -> Tensor | None:
    """``dy`` with these strides. PyTorch's backward on the CPU reads others wrongly where x has
    dimensions of size 1."""
    if dy is None or dy.stride() == strides:  # None: no gradient comes this way
        return dy
    return dy.new_empty_strided(dy.shape, strides).copy_(dy)


def fit_batch_norm(x: Tensor, *vectors: Tensor | None) -> bool:
    """Whether ``F.batch_norm`` takes these [C]: all of ``x``'s dtype, or float32 beside halves."""
    dtypes = {v.dtype for v in vectors if v is not None}
    return dtypes <= {x.dtype} or (dtypes == {torch.float32} and x.dtype.itemsize == 2)


class _BatchNorm(torch.autograd.Function):
    """Two ops and one exchange each way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: tuple[Any, ...]
    ) -> Any:
        ops, exchange, rest = call
        sums = exchange.all_reduce(ops.statistics(x))
        y, moments = ops.normalize(x, weight, bias, sums, *rest)
        ctx.save_for_backward(x, weight)
        ctx.rest = ops, exchange, moments, bias, rest[-1]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ops, exchange, moments, bias, eps = ctx.rest
        needs = ctx.needs_input_grad
        if is_grad_enabled() or (not is_compiling() and is_batched(dy)):
            return _differentiable(dy, x, weight, bias, moments, eps, needs, exchange)
        need_dx, need_dweight, need_dbias, _ = needs
        if ops is KERNELS:
            x, dy = alike(x, dy)
        sums_dy, dweight, dbias = ops.backward_reduce(
            dy, x, moments, weight if need_dweight else None, bias if need_dbias else None
        )
        # Also where this x needs no gradient: the other participants' may, and they wait for sums.
        sums_dy = exchange.all_reduce(sums_dy)
        dx = ops.backward_input(dy, x, weight, moments, sums_dy) if need_dx else None
        return dx, dweight, dbias, None


class _BatchNormInGroup(torch.autograd.Function):
    """``_BatchNorm`` over ``KERNELS`` and a process group, at the host's best pace.

    The exchange is known to be done with its sums when they have been read: the next call gets the
    same memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: tuple[Any, ...]
    ) -> Any:
        exchange, rest = call
        size = 2 * x.shape[1] + 1
        memory = memory_for(x)
        spare = memory.spare[size, float64]
        sums = take(spare, x, size, float64)
        _C.statistics(x, sums, memory.workspace)
        y, moments = KERNELS.normalize(x, weight, bias, exchange.all_reduce(sums), *rest)
        spare.append(sums)
        ctx.save_for_backward(x, weight)
        ctx.rest = exchange, moments, bias, rest[-1]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        exchange, moments, bias, eps = ctx.rest
        needs = ctx.needs_input_grad
        if is_grad_enabled() or is_batched(dy):
            return _differentiable(dy, x, weight, bias, moments, eps, needs, exchange)
        need_dx, need_dweight, need_dbias, _ = needs
        x, dy = alike(x, dy)
        size, dtype = 2 * x.shape[1], accumulation_dtype(x)
        memory = memory_for(x)
        spare = memory.spare[size, dtype]
        sums_dy = take(spare, x, size, dtype)
        dweight = empty_like(weight) if need_dweight else None
        dbias = empty_like(bias) if need_dbias else None
        _C.backward_reduce(dy, x, moments, sums_dy, dweight, dbias, memory.workspace)
        total = exchange.all_reduce(sums_dy)
        dx = KERNELS.backward_input(dy, x, weight, moments, total) if need_dx else None
        spare.append(sums_dy)
        return dx, dweight, dbias, None


class _BatchNormAlone(torch.autograd.Function):
    """``_BatchNorm`` over ``KERNELS`` for a participant that is alone: one call each way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rest: tuple[Any, ...]
    ) -> Any:
        running_mean, running_var, batches, momentum, eps = rest
        running_mean, running_var, batches = moved(running_mean, running_var, batches)
        size = 2 * x.shape[1] + 1
        workspace = None
        if x.is_cuda:
            size *= 2  # scratch memory behind the moments
            workspace = memory_for(x).workspace
        moments = x.new_empty(size, dtype=float64)
        y = empty_like(x)
        _C.forward(
            x,
            weight,
            bias,
            running_mean,
            running_var,
            batches,
            y,
            moments,
            momentum,
            eps,
            workspace,
        )
        ctx.save_for_backward(x, weight)
        ctx.rest = moments, bias, eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        moments, bias, eps = ctx.rest
        needs = ctx.needs_input_grad
        if is_grad_enabled():
            moments = moments[: 2 * x.shape[1] + 1]
            return _differentiable(dy, x, weight, bias, moments, eps, needs, LOCAL)
        need_dx, need_dweight, need_dbias, _ = needs
        dx = empty_like(x) if need_dx else None
        dweight = empty_like(weight) if need_dweight else None
        dbias = empty_like(bias) if need_dbias else None
        workspace = memory_for(x).workspace if x.is_cuda else None
        if not _C.backward(dy, x, weight, moments, dweight, dbias, dx, workspace):
            if is_batched(dy):
                moments = moments[: 2 * x.shape[1] + 1]
                return _differentiable(dy, x, weight, bias, moments, eps, needs, LOCAL)
            x, dy = alike(x, dy)
            dx = empty_like(x) if need_dx else None
            _C.backward(dy, x, weight, moments, dweight, dbias, dx, workspace)
        return dx, dweight, dbias, None


_apply_in_group = direct(_BatchNormInGroup)
_apply_alone = direct(_BatchNormAlone)


def _differentiable(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Tensor,
    eps: float,
    needs: tuple[bool, ...],
    exchange: Exchange,
) -> tuple[Tensor | None, ...]:
    """The gradients in PyTorch's own operations: create_graph=True, or a batch of gradients."""

    def all_reduce(values: Tensor) -> Tensor:
        if exchange.size == 1:
            return values
        _expect_one_gradient(values)
        if is_grad_enabled() and not values.requires_grad:
            # Others may differentiate their values again, and then wait for this participant.
            values.requires_grad_()
        reduced: Tensor = _AllReduce.apply(values, exchange)
        return reduced

    gradients = reference.backward(dy, x, weight, moments, eps, all_reduce)
    likes: tuple[Any, ...] = x, weight, bias
    return *(
        g.to(like.dtype) if need else None
        for g, like, need in zip(gradients, likes, needs, strict=False)
    ), None


class _AllReduce(torch.autograd.Function):
    """The exchange as a differentiable function.

    The loss is the sum of the participants' losses, so the gradient of an addend is the sum of the
    participants' gradients of the sum.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_reduce(values.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _expect_one_gradient(gradient)
        return _AllReduce.apply(gradient, ctx.exchange), None


def _expect_one_gradient(values: Tensor) -> None:
    if not is_compiling() and (functorch_active() or is_batched(values)):
        raise RuntimeError(
            "batchnorm2d_sync: expected one gradient at a time with several participants, got a "
            "batch of them (torch.vmap, is_grads_batched=True, or vectorize=True of "
            "torch.autograd.functional)"
        )
