"""Every half number through the kernels: read exactly, written rounded to nearest even."""

import pytest
import torch

import op_calls
from syncbn import _C

HALVES = [torch.float16, torch.bfloat16]

over_halves = pytest.mark.parametrize("half", HALVES, ids=str)


def every_number(half, device):
    """All 65,536 bit patterns: subnormal numbers, infinities and NaN too."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(half).to(device)


def around_every_number(half, device):
    """float32 numbers halfway between neighbours, where ties go to even, and next to these."""
    numbers = every_number(half, device).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[:-1].double() + numbers[1:].double()).div(2).float()
    infinity = torch.full_like(ties, torch.inf)
    beside = [ties, ties.nextafter(infinity), ties.nextafter(-infinity)]
    return torch.cat([*beside, numbers[-1:] * 1.002, numbers[:1] * 1.002, infinity[:1]])


def unit_sums(x):
    """Sums of a mini-batch with mean 0 and variance 1: normalization changes nothing."""
    channels = x.shape[1]
    n = float(x.numel() / channels)
    sums = [0.0] * channels + [n] * channels + [n]
    return torch.tensor(sums, dtype=torch.float64, device=x.device)


def assert_same_numbers(actual, expected):
    assert actual.dtype == expected.dtype
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    wrong = (~same).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} wrong, such as {actual[tuple(wrong[0])].item()!r} instead of "
        f"{expected[tuple(wrong[0])].item()!r}"
    )


@pytest.mark.parametrize("shape", [(1, 1, 256, 256), (256, 256), (1, 256, 256), (2**16, 1)])
@pytest.mark.parametrize("factor", [1.0, -1.0, 0.7, 1.9, 3e-4, 300.0])
@over_halves
def test_input_and_output(half, factor, shape, device):
    x = every_number(half, device).view(shape)
    weight = torch.full((x.shape[1],), factor, device=device)
    y = op_calls.normalize(_C, x, unit_sums(x), (weight, None, None, None), eps=0.0)["y"]
    assert_same_numbers(y, (x.float() * weight[0]).to(half))


@over_halves
def test_vectors_that_are_read(half, device):
    weight = every_number(half, device)
    weight = weight[~weight.isinf()]
    x = torch.ones(1, len(weight), device=device)
    y = op_calls.normalize(_C, x, unit_sums(x), (weight, None, None, None), eps=0.0)["y"]
    assert_same_numbers(y[0], weight.float())
    y = op_calls.normalize(_C, x, unit_sums(x), (None, weight, None, None), eps=0.0)["y"]
    assert_same_numbers(y[0], (1 + weight.double()).float())


@over_halves
def test_vectors_that_are_written(half, device):
    dy = around_every_number(half, device).view(1, -1)
    x = torch.ones_like(dy)
    moments = torch.ones(2 * x.shape[1] + 1, dtype=torch.float64, device=device)
    moments[: x.shape[1]] = 0  # mean 0 and invstd 1: xhat is 1
    result = op_calls.backward_reduce(_C, dy, x, moments, half, half)
    finite = dy[0].isfinite()
    assert_same_numbers(result["dbias"], dy[0].to(half))
    assert_same_numbers(result["dweight"][finite], dy[0].to(half)[finite])


@over_halves
def test_running_statistics_that_are_written(half, device):
    value = around_every_number(half, device).double()
    value = value[value.isfinite()]
    x = torch.ones(1, len(value), device=device)
    sums = torch.cat([value, value**2, torch.ones(1, dtype=torch.float64, device=device)])
    running = [torch.zeros(len(value), dtype=half, device=device) for _ in "mv"]
    vectors = None, None, *running
    result = op_calls.normalize(_C, x, sums, vectors, momentum=1.0)
    assert_same_numbers(result["running_mean"], value.to(half))
