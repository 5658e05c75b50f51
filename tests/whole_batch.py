"""The same batch on one device and split over ranks.

``xs`` and ``dys`` are lists of tensors, one per rank; sizes may differ, in every dimension but the
channels'.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers import assert_near, batch, double
from syncbn.functional import batchnorm2d_sync


def parts(shapes, dtype=torch.float64, seed=0):
    """xs and dys of these shapes, one per rank."""
    xs = [batch(shape, dtype, seed=seed + i) for i, shape in enumerate(shapes)]
    dys = [batch(shape, dtype, seed=seed + 100 + i) for i, shape in enumerate(shapes)]
    return xs, dys


def run_part(xs, dys, weight=None, bias=None, group=None, device=None, running=None, **options):
    """Forward and backward of this rank's part; for ``run_ranks``, or for one process as rank 0.

    On ``device``, by default where the parts are.

    ``running``: running_mean and running_var at the start; by default zeros and ones.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = device or xs[rank].device
    x = xs[rank].detach().to(device).requires_grad_()
    weight = None if weight is None else weight.detach().to(device).requires_grad_()
    bias = None if bias is None else bias.detach().to(device).requires_grad_()
    if running is None:
        dtype = x.dtype if weight is None else weight.dtype
        running = [f(x.shape[1], dtype=dtype) for f in (torch.zeros, torch.ones)]
    running_mean, running_var = (v.clone().to(device) for v in running)
    batches = torch.tensor(0, device=device)
    y = batchnorm2d_sync(
        x, weight, bias, running_mean, running_var, group, num_batches_tracked=batches, **options
    )
    y.backward(dys[rank].to(device))
    return {
        "y": y,
        "dx": x.grad,
        "dweight": None if weight is None else weight.grad,
        "dbias": None if bias is None else bias.grad,
        "running_mean": running_mean,
        "running_var": running_var,
        "num_batches_tracked": batches,
    }


def rows(x):
    """[N, C, ...] as [values per channel, C]."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def unrows(rows, like):
    shape = (like.shape[0], *like.shape[2:], like.shape[1])
    return rows.view(shape).movedim(-1, 1)


def exact(t):
    """float64 on the CPU, from whatever device."""
    return None if t is None else double(t).cpu()


def run_whole(xs, dys, weight=None, bias=None, running=None, momentum=0.1, eps=1e-5):
    """What ``run_part`` is to return on each rank: PyTorch's batch_norm on all rows, in float64."""
    x = torch.cat([rows(exact(x)) for x in xs]).requires_grad_()
    dy = torch.cat([rows(exact(dy)) for dy in dys])
    channels = x.shape[1]
    if running is None:
        running = torch.zeros(channels), torch.ones(channels)
    running_mean, running_var = (exact(v).clone() for v in running)
    first = 1.0 if momentum is None else momentum
    y = F.batch_norm(x, running_mean, running_var, exact(weight), exact(bias), True, first, eps)
    (dx,) = torch.autograd.grad(y, x, dy)
    xhat = F.batch_norm(x.detach(), None, None, None, None, True, 0.0, eps)
    factor = (x.detach().var(0, correction=0) + eps).rsqrt()
    factor = factor if weight is None else factor * exact(weight).abs()
    sizes = [x.numel() // channels for x in xs]
    results = []
    split = zip(*(t.detach().split(sizes) for t in (y, dx, xhat, dy)), strict=True)
    for part, (y_, dx_, xhat_, dy_) in zip(xs, split, strict=True):
        results.append(
            {
                "y": unrows(y_, part),
                "dx": unrows(dx_, part),
                "dweight": None if weight is None else (dy_ * xhat_).sum(0),
                "dbias": None if bias is None else dy_.sum(0),
                "running_mean": running_mean,
                "running_var": running_var,
                "num_batches_tracked": torch.tensor(1),
                "sizes": {  # of what is added up
                    "dx": 4 * dy.abs().max() * factor.max(),
                    "dweight": dy_.abs().sum() * xhat.abs().max(),
                    "dbias": dy_.abs().sum(),
                },
            }
        )
    return results


def assert_part(actual, expected, computed_in=None):
    """A result of ``run_part`` against one of ``run_whole``, to the precision of its dtypes."""
    computed_in = computed_in or actual["y"].dtype
    for name, value in expected.items():
        if name == "sizes":
            continue
        if value is None or name == "num_batches_tracked":
            assert actual[name] == value, name
        else:
            size = expected["sizes"].get(name)
            assert_near(actual[name], value, size, computed_in, name)
