"""The short way of a participant that is alone: bit by bit what the four ops give one by one."""

import pytest
import torch

from helpers import DTYPES, LAYOUTS, assert_same_bits, batch, vector
from syncbn import _C
from syncbn.functional import batchnorm2d_sync
from syncbn.sync import Local


class Alone(Local):
    """An exchange of one that is not known to be one."""


def results(exchange, x, dy, weight, bias, momentum):
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    statistics = torch.zeros(3, device=x.device), torch.ones(3, device=x.device)
    batches = torch.tensor(2, device=x.device)
    y = batchnorm2d_sync(
        *leaves, *statistics, exchange, momentum=momentum, num_batches_tracked=batches
    )
    y.backward(dy)
    return y, *(None if t is None else t.grad for t in leaves), *statistics, batches


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("absent", ["", "w", "b", "wb"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits(dtype, layout, absent, momentum, device):
    shape = (4, 3, 5, 6)
    x, dy = (batch(shape, dtype, layout, device, seed) for seed in range(2))
    weight, bias = (vector(3, device=device, seed=i).float() for i in range(2))
    weight, bias = (None if n in absent else v for n, v in zip("wb", (weight, bias), strict=True))
    arguments = x, dy, weight, bias, momentum
    for a, b in zip(results(Local(), *arguments), results(Alone(), *arguments), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(a, b)


def test_more_channels_than_the_stack_holds():
    x, dy = (batch((4, 5000, 2), torch.float64, seed=seed) for seed in range(2))
    statistics = torch.zeros(5000), torch.ones(5000)
    gradients = []
    for exchange in Local(), Alone():
        leaf = x.clone().requires_grad_()
        batchnorm2d_sync(leaf, None, None, *statistics, exchange).backward(dy)
        gradients.append(leaf.grad)
    assert_same_bits(*gradients)


def test_gradients_that_are_not_needed():
    x, dy = (batch((4, 3, 5), torch.float32, seed=seed) for seed in range(2))
    for needed in range(3):
        leaves = [x.clone(), vector(3).float(), vector(3, seed=1).float()]
        leaves[needed].requires_grad_()
        batchnorm2d_sync(*leaves, None, None).backward(dy)
        assert [t.grad is not None for t in leaves] == [i == needed for i in range(3)]


def test_a_bad_argument_is_named():
    x = torch.randn(4, 3, 5)
    moments, sums_dy = torch.zeros(7, dtype=torch.float64), torch.zeros(6)
    for dy, dx, sums, text in [
        (x[:, :2], x.clone(), sums_dy, r"dy of shape \[4, 3, 5\]"),
        (x, x[:1].clone(), sums_dy, r"dx of shape \[4, 3, 5\]"),
        (x, x.clone(), sums_dy[:5], r"sums_dy of shape \[6\], got \[5\]"),
        (x[:, :2], x.clone(), None, r"dy of shape \[4, 3, 5\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            _C.backward(dy, x, None, moments, sums, None, None, dx)
    with pytest.raises(ValueError, match=r"sums of shape \[7\], got \[6\]"):
        _C.forward(x, None, None, moments[:6], None, None, None, x.clone(), moments, 0.1, 1e-5)
    with pytest.raises(TypeError, match="x to be a tensor, got None"):
        _C.backward(x, None, None, moments, None, None, None, x.clone())
