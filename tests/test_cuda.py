"""The CUDA kernels where they differ from the CPU's: tiles, alignment, sizes, streams and graphs.

The general suite compares every op with the reference on both devices.
"""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import syncbn
from helpers import DTYPES, assert_same_bits, batch
from syncbn import _C, reference
from syncbn._workspace import memory_for

pytestmark = pytest.mark.cuda

FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
over_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Relative error of a tensor's norm: a few roundings of its dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float64: 1e-13}


def poisoned(like, dtype=None):
    return torch.empty_like(like, dtype=dtype).fill_(torch.nan)


def at_offset(t, offset):
    """``t`` in a storage that begins ``offset`` elements before it; NaN around it."""
    memory = torch.full((t.numel() + offset + 8,), torch.nan, dtype=t.dtype, device=t.device)
    return memory.as_strided(t.shape, t.stride(), offset).copy_(t)


def run(ops, x, dy, weight, bias, offset=0):
    """All four ops in a row, outputs poisoned and ``offset`` elements into their storages."""
    channels = x.shape[1]
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    vector = torch.empty(2 * channels + 1, dtype=torch.float64, device=x.device)
    sums, moments = poisoned(vector), poisoned(vector)
    sums_dy = poisoned(vector[1:], acc)
    running_mean, running_var = torch.zeros_like(weight), torch.ones_like(weight)
    batches = torch.zeros((), dtype=torch.int64, device=x.device)
    y, dx = at_offset(poisoned(x), offset), at_offset(poisoned(x), offset)
    dweight, dbias = poisoned(weight), poisoned(bias)
    workspace = memory_for(x).workspace if ops is _C else None
    ops.statistics(x, sums, workspace)
    ops.normalize(x, weight, bias, sums, running_mean, running_var, batches, y, moments, 0.1, 1e-5)
    ops.backward_reduce(dy, x, moments, sums_dy, dweight, dbias, workspace)
    ops.backward_input(dy, x, weight, moments, sums_dy, dx)
    return {
        "sums": sums,
        "y": y,
        "moments": moments,
        "running_mean": running_mean,
        "running_var": running_var,
        "batches": batches,
        "sums_dy": sums_dy,
        "dweight": dweight,
        "dbias": dbias,
        "dx": dx,
    }


def check(shape, dtype, fmt, offset=0, dy_offset=0):
    """All four ops against the reference in float64; returns what the ops gave."""
    # batch() keeps few values of a channel apart, where random ones may have next to no variance.
    x = at_offset(batch(shape, dtype, device="cuda").contiguous(memory_format=fmt), offset)
    dy = at_offset(torch.empty_like(x).normal_(), dy_offset)
    vectors = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = (torch.randn(shape[1], dtype=vectors, device="cuda") for _ in range(2))
    got = run(_C, x, dy, weight, bias, offset)
    expected = run(reference, x.double(), dy.double(), weight.double(), bias.double())
    # Sums cancel, dx nearly so where there are few values: errors are relative to the addends.
    invstd = expected["moments"][shape[1] : -1].view(1, -1, 1, 1)
    addends = {
        "dx": (weight.view(1, -1, 1, 1) * invstd * dy).norm().item(),
        "sums_dy": math.sqrt(x.numel()),
        "dweight": math.sqrt(x.numel()),
        "dbias": math.sqrt(x.numel()),
        "running_mean": math.sqrt(shape[1]),
    }
    for name, actual in got.items():
        tolerance = 10 * TOLERANCE[dtype if name in ("y", "dx") else vectors]
        scale = addends.get(name, 0) + expected[name].double().norm().item()
        error = (actual.double() - expected[name].double()).norm().item()
        assert error <= tolerance * scale, f"{name}: {error} of {scale}, {shape} at {offset}"
    for part in (slice(0, shape[1]), slice(shape[1], 2 * shape[1])):  # without n, which is large
        actual, exact = got["moments"][part], expected["moments"][part]
        error = (actual - exact).norm() / (exact.norm() + math.sqrt(shape[1]))
        assert error <= 10 * TOLERANCE[vectors], f"moments: {error}, {shape} at {offset}"
    return got, (x, dy, weight, bias)


# Rows just below, at and above a pack, a warp's and a block's packs, and many steps.
INNER = (2, 3, 4, 7, 8, 9, 31, 33, 49, 255, 256, 257, 1023, 1024, 1025, 4096 * 8 + 8)


@over_dtypes
@pytest.mark.parametrize("inner", INNER)
def test_rows_of_every_length(dtype, inner):
    for outer, channels in ((1, 3), (2, 5), (33, 2)):
        check((outer, channels, 1, inner), dtype, torch.contiguous_format)


# Channels just below, at and above a pack, a tile (of 64, 128, ...) and several tiles.
@over_dtypes
@pytest.mark.parametrize("channels", [1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 136, 520])
def test_matrices_of_every_width(dtype, channels):
    for outer in (2, 15, 16, 17, 129, 4099):
        check((outer, channels, 1, 1), dtype, torch.channels_last)


@over_dtypes
def test_many_channels_of_few_values(dtype):
    check((2, 6000, 3, 3), dtype, torch.contiguous_format)
    check((2, 6000, 3, 3), dtype, torch.channels_last)
    check((3, 70001, 1, 1), dtype, torch.channels_last)


@over_dtypes
@over_formats
@pytest.mark.parametrize("offsets", [(1, 1), (3, 3), (8, 8), (2, 4), (5, 0), (0, 1)])
def test_tensors_that_begin_anywhere(dtype, fmt, offsets):
    for shape in ((2, 64, 14, 14), (4, 5, 7, 7), (2, 64, 33, 31), (8, 16, 1, 1)):
        check(shape, dtype, fmt, *offsets)


@over_dtypes
@over_formats
def test_the_same_bits_in_every_run(dtype, fmt):
    for shape in ((8, 64, 28, 28), (2, 3, 128, 129), (16, 256, 7, 7)):
        first, inputs = check(shape, dtype, fmt)
        for _ in range(3):
            again = run(_C, *inputs)
            for name, value in first.items():
                assert_same_bits(again[name], value, f"{name}, {shape}")


# Channels and memory format; rows of three channels are read value by value, and their number needs
# several sections (csrc/cuda/walk.cuh).
@pytest.mark.parametrize(
    ("channels", "fmt"),
    [
        (3, torch.contiguous_format),
        (8, torch.channels_last),
        (3, torch.channels_last),
        (1, torch.contiguous_format),  # more than a row may have
    ],
    ids=str,
)
def test_more_than_2_31_elements(channels, fmt):
    rows = 2**30 if channels == 3 and fmt == torch.channels_last else 2**31 // channels
    if channels == 1:
        rows = 2**33
    n = rows // 2**20 + 1
    if torch.cuda.mem_get_info()[0] < 10 * n * channels * 2**20:
        pytest.skip("not enough device memory")
    x = torch.empty(n, channels, 1024, 1024, dtype=torch.half, device="cuda", memory_format=fmt)
    x.normal_()
    sums = torch.empty(2 * channels + 1, dtype=torch.float64, device="cuda")
    moments = torch.empty_like(sums)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    workspace = memory_for(x).workspace
    _C.statistics(x, sums, workspace)
    y = torch.empty_like(x)
    _C.normalize(x, None, None, sums, None, None, None, y, moments, 0.1, 1e-5)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 2 * x.numel() + 2 * workspace.numel()

    assert sums[-1].item() == x.numel() // channels
    exact = sum(part.double().sum((1, 2)) for part in x)
    assert (sums[:channels] - exact).abs().max() < 1e-6 * sums[-1]
    mean, invstd = (v.float().view(-1, 1, 1) for v in moments[:-1].split(channels))
    for i in (0, n // 2, n - 2, n - 1):
        assert ((x[i].float() - mean) * invstd - y[i].float()).abs().max() < 2e-3

    # dy = y: its sum is 0, its sum with xhat n, and dx 0.
    sums_dy = torch.empty(2 * channels, device="cuda")
    _C.backward_reduce(y, x, moments, sums_dy, None, None, workspace)
    of_dy, of_dy_xhat = (sums_dy / sums[-1]).split(channels)
    assert of_dy.abs().max() < 1e-3
    assert (of_dy_xhat - 1).abs().max() < 1e-3
    dx = torch.empty_like(x)
    _C.backward_input(y, x, None, moments, sums_dy, dx)
    for i in (0, n // 2, n - 2, n - 1):
        assert dx[i].float().abs().max() < 5e-3


def test_rows_in_several_sections():
    """More packs than a section numbers (csrc/cuda/walk.cuh): two, both partial, per row of 2."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("not enough device memory")
    x = torch.empty(2**29 + 3, 2, 1, 2, dtype=torch.half, device="cuda").normal_()
    sums = torch.empty(5, dtype=torch.float64, device="cuda")
    _C.statistics(x, sums, memory_for(x).workspace)
    chunks = [part.double() for part in x[:: 2**22]]  # every so many rows
    assert sums[-1].item() == 2 * x.shape[0]
    exact = sum(part.sum((0, 2, 3), dtype=torch.float64) for part in x.split(2**26))
    assert (sums[:2] - exact).abs().max() < 1e-6 * sums[-1]
    y, moments = torch.empty_like(x), torch.empty_like(sums)
    _C.normalize(x, None, None, sums, None, None, None, y, moments, 0.1, 1e-5)
    mean, invstd = (v.view(2, 1, 1) for v in moments[:-1].split(2))
    for part, out in zip(chunks, y[:: 2**22], strict=True):
        assert ((part - mean) * invstd - out.double()).abs().max() < 2e-3
    assert ((x[-1].double() - mean) * invstd - y[-1].double()).abs().max() < 2e-3


def layer_and_input(channels=16):
    layer = syncbn.BatchNorm2d(channels, device="cuda")
    return layer, torch.randn(8, channels, 33, 33, device="cuda", requires_grad=True)


def test_streams_do_not_disturb_each_other():
    """Each stream has its own workspace, and the ops run in the stream that is current."""
    x = torch.randn(8, 3, 65, 65, device="cuda")
    expected = torch.nn.functional.batch_norm(x, None, None, training=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _, stream in itertools.product(range(20), streams):
        with torch.cuda.stream(stream):
            results.append(syncbn.functional.batchnorm2d_sync(x, None, None, None, None))
    torch.cuda.synchronize()
    torch.testing.assert_close(results[0], expected)
    for y in results:
        assert_same_bits(y, results[0], "between streams")


def test_a_graph_replayed_beside_eager_work():
    layer, x = layer_and_input(3)
    dy = torch.randn_like(x)

    def step():
        y = layer(x)
        return (y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other, other_x = layer_and_input(3)
    expected = other(other_x)
    torch.cuda.synchronize()
    eager = []
    for _ in range(20):
        with torch.cuda.stream(side):
            graph.replay()
        eager.append(other(other_x))
    torch.cuda.synchronize()
    for y in eager:
        assert_same_bits(y, expected, "eager beside a graph")
    for actual, expected in zip(captured, step(), strict=True):
        assert_same_bits(actual, expected, "graph beside eager")


def test_a_graph_moves_the_running_statistics_as_eager_steps_do():
    captured, x = layer_and_input()
    eager = syncbn.BatchNorm2d(16, device="cuda")
    for layer in (captured, eager):
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured(x)
    for _ in range(5):
        graph.replay()
        eager(x)
    torch.cuda.synchronize()
    for (name, a), b in zip(captured.named_buffers(), eager.buffers(), strict=True):
        assert_same_bits(a, b, name)


def test_the_script_for_compute_sanitizer():
    script = Path(__file__).with_name("cuda_kernels.py")
    subprocess.run([sys.executable, script], check=True, timeout=300)
