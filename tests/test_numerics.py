"""The numerical bars: data that naive sums get wrong, against float64 of the same values."""

import pytest
import torch

import syncbn
from helpers import DTYPES, LAYOUTS, assert_near, batch, double, in_layout
from syncbn.functional import batchnorm2d_sync
from whole_batch import run_part, run_whole

VALUES = 32_768
SHAPES = [(VALUES, 1), (8, 1, 64, 64)]

over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def normal(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def train_step(x, eps=1e-5):
    """y and the biased variance of the batch, by way of the running statistics."""
    channels = x.shape[1]
    running = [torch.zeros(channels, dtype=torch.float64, device=x.device) for _ in "mv"]
    y = batchnorm2d_sync(x, None, None, *running, momentum=1.0, eps=eps)
    n = x.numel() / channels
    return y, running[0], running[1] * (n - 1) / n


@over_shapes
def test_a_mean_of_2_to_the_17(shape, device):
    x = (2**17 + normal(shape)).float().to(device)
    y, mean, var = train_step(x)
    exact = double(x)
    exact_var, exact_mean = torch.var_mean(exact, correction=0)
    assert abs(var / exact_var - 1) < 1e-5
    assert abs(mean - exact_mean) < 1e-6
    exact_y = (exact - exact_mean) / (exact_var + 1e-5).sqrt()
    assert (double(y) - exact_y).abs().max() < 2e-6
    if x.is_cpu:  # the README says of PyTorch's: 0.001
        stock = torch.nn.functional.batch_norm(x, None, None, training=True)
        assert (double(stock) - exact_y).abs().max() > 1e-3


@over_shapes
@pytest.mark.parametrize("mean", [-(2.0**17), 1e4, 1e6, -3e-7])
def test_variance_beside_any_mean(mean, shape, device):
    """Float32 sums would lose all of it; float64 ones lose 2**-53 of the squares, a few times."""
    x = (mean + normal(shape)).float().to(device)
    _, _, var = train_step(x)
    assert abs(var / double(x).var(correction=0) - 1) < 1e-5 + 2**-51 * mean**2


@over_shapes
@pytest.mark.parametrize("mean", [1e3, -1e5, 1e6])
def test_a_float64_variance_beside_any_mean(mean, shape, device):
    """What docs/how-it-works.md says of it."""
    x = (mean + normal(shape)).to(device)
    y, _, var = train_step(x)
    exact_var, exact_mean = torch.var_mean(x, correction=0)
    error = 2.0**-53 * mean**2
    assert abs(var / exact_var - 1) < 8 * error
    exact_y = (x - exact_mean) / (exact_var + 1e-5).sqrt()
    assert (y - exact_y).abs().max() < 8 * 5 * error  # no value is 5 deviations away


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mean", [0.0, 1e3, -(2.0**17)])
def test_gradients_beside_any_mean(mean, layout, device):
    """dweight is a sum of dy * (x - mean): taken as two sums, it would cancel."""
    x = in_layout((mean + normal((32, 3, 32, 32))).float(), layout)
    dy = in_layout(normal(x.shape, seed=1).float(), layout)
    weight = torch.ones(3, dtype=torch.float64)
    actual = run_part([x], [dy], weight, weight, device=device)
    expected = run_whole([x], [dy], weight, weight)[0]
    for name in ("dx", "dweight", "dbias"):
        size = expected["sizes"][name]
        assert_near(actual[name], expected[name], size, torch.float32, name)


def test_many_channels_with_far_means(device):
    """Every channel has a mean of its own, far from the others: no shift fits them all."""
    means = torch.linspace(-(2.0**17), 2.0**17, 65, dtype=torch.float64).view(-1, 1, 1)
    for layout in LAYOUTS:
        x = in_layout((means + normal((32, 65, 8, 8))).float(), layout).to(device)
        _, mean, var = train_step(x)
        exact_var, exact_mean = torch.var_mean(double(x), (0, 2, 3), correction=0)
        assert (var / exact_var - 1).abs().max() < 1e-5
        assert (mean - exact_mean).abs().max() < 1e-6


def test_a_first_value_far_from_the_others(device):
    """What a sum shifted by the first value cannot do."""
    x = normal((4, 3, 64, 64)).float()
    x[0, :, 0, 0] = 1e6
    _, _, var = train_step(x.to(device))
    exact = double(x).var((0, 2, 3), correction=0)
    assert (var.cpu() / exact - 1).abs().max() < 1e-5


@over_shapes
def test_a_standard_deviation_of_1e_minus_5(shape, device):
    x = (normal(shape) * 1e-5).float().to(device)
    layer = syncbn.SyncBatchNorm(1, eps=1e-3, device=device)
    layer(x)
    exact = 0.9 + 0.1 * double(x).var(correction=1)
    assert abs(layer.running_var.item() / exact - 1) < 1e-4
    _, _, var = train_step(x, eps=1e-3)
    assert abs(var / double(x).var(correction=0) - 1) < 1e-4


@over_shapes
@pytest.mark.parametrize("value", [3.0, 0.1, -1234.567, 65504.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_variance_of_a_constant_is_0(dtype, value, shape, device):
    x = torch.full(shape, value, dtype=dtype, device=device)
    y, mean, var = train_step(x)
    assert var.item() == 0
    assert mean.item() == x.flatten()[0].double()
    assert (y == 0).all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_neighbouring_numbers_have_a_variance(layout, device):
    """The smallest spread that float32 holds is not taken for rounding."""
    low = torch.tensor(2.0**17)
    high = torch.nextafter(low, torch.tensor(torch.inf))
    x = torch.where(torch.arange(VALUES).view(8, 1, 64, 64) % 2 == 0, low, high)
    _, _, var = train_step(in_layout(x, layout).to(device))
    assert abs(var / double(x).var(correction=0) - 1).item() < 1e-5


@pytest.mark.parametrize("scale", [1e-18, 1e-9, 1e9, 1e15])
def test_squares_far_from_1(scale, device):
    x = (normal((64, 3, 8, 8)) * scale).float().to(device)
    _, mean, var = train_step(x)
    exact_var, exact_mean = torch.var_mean(double(x), (0, 2, 3), correction=0)
    assert (var / exact_var - 1).abs().max() < 1e-5
    assert ((mean - exact_mean) / exact_var.sqrt()).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_counts_above_what_half_holds(dtype, device):
    """More values than float16's largest number, 65,504, and than bfloat16 can count."""
    x = (5 + normal((20, 2, 64, 64))).to(dtype).to(device)
    y, mean, var = train_step(x)
    exact_var, exact_mean = torch.var_mean(double(x), (0, 2, 3), correction=0)
    assert (var / exact_var - 1).abs().max() < 1e-5
    assert (mean - exact_mean).abs().max() < 1e-5
    assert double(y).mean((0, 2, 3)).abs().max() < 1e-2


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_sums_of_a_large_gradient_keep_their_small_addends(layout, device):
    """100,352 addends: a float32 running sum would drift."""
    x = batch((32, 3, 56, 56), torch.float32, layout, device).requires_grad_()
    bias = torch.zeros(3, dtype=torch.float64, device=device, requires_grad=True)
    dy = in_layout(1 + normal((32, 3, 56, 56)) * 1e-3, layout).float().to(device)
    batchnorm2d_sync(x, None, bias, None, None).backward(dy)
    assert_near(bias.grad / double(dy).sum((0, 2, 3)), torch.ones(3), 0.1, torch.float32)
