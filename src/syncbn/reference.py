"""The four ops in plain PyTorch: oracle of the tests, documentation, and the way on other devices.

Signatures and results are those of ``syncbn._C``: outputs are passed in. ``x`` is [N, C, ...], and
every sum runs over all dimensions but the channels'. Arithmetic is float64, or float32 on a device
that has no float64. The formulas are those of Ioffe and Szegedy, "Batch Normalization", ICML 2015,
with the values of all participants together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_FLOATING = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_WITHOUT_FLOAT64 = frozenset({"mps"})


def _acc_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type in _WITHOUT_FLOAT64 else torch.float64


def _acc(x: Tensor) -> Tensor:
    """``x`` in the type that sums are taken in."""
    return x.to(_acc_dtype(x))


def _dims(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [0, *range(2, x.dim())]


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    """[C] in a form that broadcasts against ``x`` [N, C, ...], in the type of sums of ``x``."""
    v = v.to(x.device, _acc_dtype(x))
    return v.view([-1 if i == 1 else 1 for i in range(x.dim())])


def sums_device(x: Tensor) -> torch.device:
    """Where the float64 sums and moments of ``x`` live."""
    return torch.device("cpu") if x.device.type in _WITHOUT_FLOAT64 else x.device


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> bool:
    """Raises what would make an op fail, before any participant communicates.

    Returns:
        True: here tensors of any strides will do.
    """
    if x.dtype not in _FLOATING:
        raise _wrong_dtype("x", x)
    if x.dim() < 2:
        raise ValueError(f"batchnorm2d_sync: expected x with at least 2 dimensions, got {x.dim()}")
    shape, device = x.shape[1:2], x.device
    vectors = (weight, bias, running_mean, running_var)
    for name, v in zip(_VECTORS, vectors, strict=True):
        if v is None:
            continue
        if v.shape != shape:
            raise ValueError(
                f"batchnorm2d_sync: expected {name} of shape {list(shape)}, the channels of x, "
                f"got {list(v.shape)}"
            )
        if v.dtype not in _FLOATING:
            raise _wrong_dtype(name, v)
        if v.device != device:
            raise ValueError(f"batchnorm2d_sync: expected {name} on {device}, as x, got {v.device}")
    if (running_mean is None) != (running_var is None):
        raise ValueError(
            "batchnorm2d_sync: expected running_mean and running_var both or neither, got one"
        )
    if num_batches_tracked is None:
        if momentum is None and running_mean is not None:
            raise ValueError(
                "batchnorm2d_sync: expected num_batches_tracked for momentum=None, got None"
            )
    elif num_batches_tracked.dtype is not torch.int64:
        raise TypeError(
            "batchnorm2d_sync: expected num_batches_tracked of dtype int64, "
            f"got {num_batches_tracked.dtype}"
        )
    if momentum is not None:
        _check_number("momentum", momentum)
    _check_number("eps", eps)
    if not eps >= 0:
        raise ValueError(f"batchnorm2d_sync: expected eps of 0 or more, got {eps}")
    return True


_VECTORS = ("weight", "bias", "running_mean", "running_var")


def _wrong_dtype(name: str, v: Tensor) -> TypeError:
    return TypeError(
        f"batchnorm2d_sync: expected {name} of dtype float32, float16, bfloat16 or float64, "
        f"got {v.dtype}"
    )


def _check_number(name: str, value: object) -> None:
    # Compilers know only the first question.
    if not isinstance(value, int | float) and not hasattr(value, "__float__"):
        raise TypeError(
            f"batchnorm2d_sync: expected {name} to be a number, got {type(value).__name__}"
        )


def statistics(x: Tensor, sums: Tensor, workspace: Tensor | None = None) -> None:
    """``sums`` [2C + 1] = [sum of x | sum of x^2 | n], by way of the squares about the mean."""
    channels = x.shape[1]
    n = x.numel() // channels
    v = _acc(x)
    total = v.sum(_dims(x))
    mean = total / max(n, 1)
    m2 = (v - _per_channel(mean, x)).square().sum(_dims(x))
    sums[:channels].copy_(total)
    sums[channels:-1].copy_(m2).add_(mean.to(sums.device).square(), alpha=n)
    sums[-1].fill_(n)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    y: Tensor,
    moments: Tensor,
    momentum: float | None,
    eps: float,
) -> None:
    """``y`` = weight * xhat + bias and ``moments`` [2C + 1] = [mean | invstd | n].

    With var = sum of x^2 / n - mean^2, invstd = 1 / sqrt(var + eps), xhat = (x - mean) * invstd.

    The running statistics move by ``momentum`` (``None``: 1 / num_batches_tracked, a cumulative
    average) towards the mean and the unbiased variance; ``num_batches_tracked`` counts one more.
    Where n is 0 all three stay; where n is 1 the unbiased variance is undefined and ``running_var``
    stays.
    """
    channels = x.shape[1]
    total, sumsq, n = sums[:channels], sums[channels:-1], sums[-1]
    mean = torch.where(n == 0, 0, total / n)
    m2 = sumsq - total * mean
    # Below the sums' own rounding there is no spread: csrc/moments.h.
    m2 = torch.where(m2 < 2.0**-50 * sumsq, 0, m2)
    var = torch.where(n == 0, 0, m2 / n)
    invstd = torch.where(var + eps == 0, 0, (var + eps).rsqrt())
    moments[:channels].copy_(mean)
    moments[channels:-1].copy_(invstd)
    moments[-1:].copy_(n)
    out = _xhat(x, mean, invstd)
    if weight is not None:
        out = out * _per_channel(weight, x)
    y.copy_(out if bias is None else out + _per_channel(bias, x))

    some = n > 0
    if num_batches_tracked is not None:
        num_batches_tracked.add_(some.to(num_batches_tracked))
    if running_mean is not None and running_var is not None:
        if momentum is None:
            assert num_batches_tracked is not None
            factor = 1 / num_batches_tracked.to(sums)
        else:
            factor = torch.full_like(n, momentum)
        _move(running_mean, mean, factor, some)
        _move(running_var, m2 / (n - 1), factor, n > 1)


def backward_reduce(
    dy: Tensor,
    x: Tensor,
    moments: Tensor,
    sums_dy: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    workspace: Tensor | None = None,
) -> None:
    """``sums_dy`` [2C] = [sum of dy | sum of dy * xhat]; ``dbias``, ``dweight``: the same sums."""
    channels = x.shape[1]
    v = _acc(dy)
    sum_dy = v.sum(_dims(x))
    sum_dy_xhat = (v * _xhat(x, moments[:channels], moments[channels:-1])).sum(_dims(x))
    sums_dy[:channels].copy_(sum_dy)
    sums_dy[channels:].copy_(sum_dy_xhat)
    if dweight is not None:
        dweight.copy_(sum_dy_xhat)
    if dbias is not None:
        dbias.copy_(sum_dy)


def backward_input(
    dy: Tensor, x: Tensor, weight: Tensor | None, moments: Tensor, sums_dy: Tensor, dx: Tensor
) -> None:
    """``dx`` = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n), from reduced sums."""
    channels = x.shape[1]
    mean, invstd, n = moments[:channels], moments[channels:-1], moments[-1]
    mean_dy, mean_dy_xhat = (sums_dy / n.to(sums_dy)).split(channels)
    d = _acc(dy) - _per_channel(mean_dy, x)
    d = d - _xhat(x, mean, invstd) * _per_channel(mean_dy_xhat, x)
    scale = _per_channel(invstd, x)
    dx.copy_(d * (scale if weight is None else scale * _per_channel(weight, x)))


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    moments: Tensor,
    eps: float,
    all_reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``weight`` and ``bias`` that can be differentiated again.

    Mean and variance are formed from ``x`` once more, as sums about the saved mean, which is a
    constant here; ``all_reduce`` is differentiable and sums over the participants. Two collectives.
    """
    channels = x.shape[1]
    origin, n = moments[:channels], moments[-1].clamp(min=1)
    d = _acc(x) - _per_channel(origin, x)
    shift, spread = (
        all_reduce(torch.cat([d.sum(_dims(x)), d.square().sum(_dims(x))])) / n.to(d)
    ).split(channels)
    var = spread - shift.square()
    # Both branches of where are differentiated: the first one's argument must stay away from 0.
    constant = moments[channels:-1].to(d) == 0
    invstd = torch.where(constant, 0, torch.where(constant, 1, var + eps).rsqrt())
    xhat = (d - _per_channel(shift, x)) * _per_channel(invstd, x)
    v = _acc(dy)
    dbias, dweight = v.sum(_dims(x)), (v * xhat).sum(_dims(x))
    mean_dy, mean_dy_xhat = (all_reduce(torch.cat([dbias, dweight])) / n.to(d)).split(channels)
    dx = (v - _per_channel(mean_dy, x) - xhat * _per_channel(mean_dy_xhat, x)) * _per_channel(
        invstd if weight is None else invstd * weight.to(invstd), x
    )
    return dx, dweight, dbias


def backward_statistics(dsums: Tensor, x: Tensor) -> Tensor:
    """Gradient of ``x`` from that of its sums [2C + 1]; can be differentiated again."""
    dtotal, dsumsq = dsums[:-1].split(x.shape[1])
    return (_per_channel(dtotal, x) + 2 * _acc(x) * _per_channel(dsumsq, x)).to(x.dtype)


def backward_normalize(
    dy: Tensor, x: Tensor, weight: Tensor | None, sums: Tensor, eps: float
) -> tuple[Tensor | None, ...]:
    """Gradients of ``x``, ``weight`` and ``sums`` as three independent inputs of ``normalize``.

    They can be differentiated again: ``y`` is computed once more, for autograd.
    """
    create_graph = torch.is_grad_enabled()  # else for a batch of gradients
    with torch.enable_grad():
        y, inputs = _normalized(x, weight, sums, eps)
    dx, dsums, *rest = torch.autograd.grad(y, inputs, _acc(dy), create_graph=create_graph)
    return dx, rest[0] if rest else None, dsums


def _normalized(
    x: Tensor, weight: Tensor | None, sums: Tensor, eps: float
) -> tuple[Tensor, list[Tensor]]:
    """``y`` without the bias, and the aliases of ``x``, ``sums`` and ``weight`` that it is of."""
    # Aliases: the gradient of x must not run on through sums, which also come from x.
    x, sums = x.view_as(x), sums.view_as(sums)
    inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in (x, sums)]
    x, sums = inputs
    total, sumsq = sums[:-1].split(x.shape[1])
    n = sums[-1].detach().clamp(min=1)
    mean = total / n
    m2 = sumsq - total * mean
    # The bounds of normalize. Both branches of where are differentiated: 0 must not reach rsqrt.
    var = torch.where(m2 < 2.0**-50 * sumsq, 0, m2) / n + eps
    invstd = torch.where(var == 0, 0, torch.where(var == 0, 1, var).rsqrt())
    y = _xhat(x, mean, invstd)
    if weight is not None:
        weight = weight.view_as(weight) if weight.requires_grad else weight.detach()
        weight = weight if weight.requires_grad else weight.requires_grad_()
        inputs.append(weight)
        y = y * _per_channel(weight, x)
    return y, inputs


def sum_per_channel(v: Tensor, dtype: torch.dtype) -> Tensor:
    """[C]"""
    return _acc(v).sum(_dims(v)).to(dtype)


def _xhat(x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    return (_acc(x) - _per_channel(mean, x)) * _per_channel(invstd, x)


def _move(running: Tensor, value: Tensor, factor: Tensor, where: Tensor) -> None:
    """Moves a running statistic by ``factor`` towards ``value``, where ``where`` holds."""
    old = running.to(value)
    running.copy_(torch.where(where, (1 - factor) * old + factor * value, old))
