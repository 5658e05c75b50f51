"""Each op of ``_C`` against ``syncbn.reference`` in float64.

Over dtypes, memory layouts, odd shapes and absent vectors.
"""

import math
from itertools import product

import pytest
import torch

import op_calls
from helpers import (
    DTYPES,
    LAYOUTS,
    assert_near,
    assert_same_bits,
    batch,
    double,
    per_channel,
    values_dims,
    vector,
)
from syncbn import _C, reference

CHANNELS = (1, 3, 64, 65, 257)
SPATIAL = ((), (1, 1), (7, 7), (1, 17), (33, 5), (3,), (2, 3, 4))
SHAPES = [
    shape
    for n, c, spatial in product((0, 1, 2, 5), CHANNELS, SPATIAL)
    if math.prod(shape := (n, c, *spatial)) < 60_000  # the largest add time alone
]

over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
over_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def batches(dtype, layout, device):
    """(number, x, message) for each shape."""
    for i, shape in enumerate(SHAPES):
        yield i, batch(shape, dtype, layout, device, seed=i), f"shape {shape}"


def gradient(x, seed):
    return batch(x.shape, x.dtype, device=x.device, seed=1000 + seed) * 0.5


def like(t, x):
    """``t`` with the dtype and strides of ``x``."""
    return torch.empty_like(x).copy_(t)


def some_vectors(i, channels, device):
    """weight, bias, running_mean and running_var, in the dtypes that ``i`` picks; some absent."""
    picked = [DTYPES[(i // 4**k) % 4] for k in range(4)]
    vectors = [vector(channels, d, device, seed=i + k) for k, d in enumerate(picked)]
    vectors[3] = vectors[3].abs()
    if i % 3 == 1:
        vectors[i % 2] = None
    if i % 5 == 2:
        vectors[2] = vectors[3] = None
    return vectors


def spread(x, moments):
    """[C]: the standard deviation, from moments with eps 0; 0 where there is none."""
    invstd = moments[x.shape[1] : -1]
    return torch.where(invstd == 0, 0, 1 / invstd)


@over_layouts
@over_dtypes
def test_statistics(dtype, layout, device):
    for _, x, message in batches(dtype, layout, device):
        channels = x.shape[1]
        sums = op_calls.statistics(_C, x)["sums"]
        expected = op_calls.exact_sums(x)
        assert sums[-1] == x.numel() / channels, message
        if x.shape[0] == 0:
            assert not sums.any(), message
            continue
        assert_near(
            sums[:channels],
            expected[:channels],
            scale=double(x).abs().sum(values_dims(x)),
            computed_in=dtype,
            message=message,
        )
        # What matters of the second half is the variance that it gives.
        std = spread(x, op_calls.normalize(reference, double(x), sums, eps=0.0)["moments"])
        expected_std = spread(x, op_calls.exact_moments(x, eps=0.0))
        assert_near(std, expected_std, scale=expected_std, computed_in=dtype, message=message)


@over_layouts
@over_dtypes
def test_normalize(dtype, layout, device):
    for i, x, message in batches(dtype, layout, device):
        channels = x.shape[1]
        sums = op_calls.exact_sums(x)
        vectors = some_vectors(i, channels, device)
        momentum = (0.1, 0.7, None)[i % 3]
        options = {"batches": i % 4, "momentum": momentum, "eps": (1e-5, 1e-3)[i % 2]}
        actual = op_calls.normalize(_C, x, sums, vectors, **options)
        expected = op_calls.normalize(
            reference, double(x), sums, [double(v) for v in vectors], **options
        )
        assert actual["num_batches_tracked"] == expected["num_batches_tracked"], message
        for name in ("y", "moments", "running_mean", "running_var"):
            if expected[name] is not None:
                computed_in = dtype if name == "y" else torch.float64
                assert_near(
                    actual[name],
                    expected[name],
                    computed_in=computed_in,
                    message=f"{name}, {message}",
                )


@over_layouts
@over_dtypes
def test_backward_reduce(dtype, layout, device):
    for i, x, message in batches(dtype, layout, device):
        dy = like(gradient(x, i), x)
        moments = op_calls.exact_moments(x)
        wanted = [DTYPES[i % 4], DTYPES[i // 4 % 4]]
        if i % 3 == 1:
            wanted[i % 2] = None
        actual = op_calls.backward_reduce(_C, dy, x, moments, *wanted)
        expected = op_calls.backward_reduce(
            reference, double(dy), double(x), moments, torch.float64, torch.float64
        )
        terms = double(dy).abs().sum(values_dims(x))
        products = (double(dy) * reference._xhat(x, *moments[:-1].chunk(2))).abs()
        products = products.sum(values_dims(x))
        scales = {
            "sums_dy": torch.cat([terms, products]),
            "dweight": products,
            "dbias": terms,
        }
        for name, scale in scales.items():
            if actual[name] is not None:
                assert_near(actual[name], expected[name], scale, dtype, f"{name}, {message}")


@over_layouts
@over_dtypes
def test_backward_input(dtype, layout, device):
    for i, x, message in batches(dtype, layout, device):
        dy = like(gradient(x, i), x)
        moments = op_calls.exact_moments(x)
        weight = some_vectors(i, x.shape[1], device)[0]
        sums_dy = op_calls.backward_reduce(reference, double(dy), double(x), moments)["sums_dy"]
        sums_dy = sums_dy.to(op_calls.accumulator(dtype))
        actual = op_calls.backward_input(_C, dy, x, weight, moments, sums_dy)["dx"]
        expected = op_calls.backward_input(
            reference, double(dy), double(x), double(weight), moments, double(sums_dy)
        )["dx"]
        invstd = moments[x.shape[1] : -1]
        factor = invstd if weight is None else invstd * double(weight)
        size = double(dy).abs().amax() if dy.numel() else 0.0
        scale = (4 * size * factor.abs()).view(per_channel(x)).expand(x.shape)
        assert_near(actual, expected, scale, message=message)


@pytest.mark.parametrize("vector_dtype", DTYPES, ids=str)
@over_dtypes
def test_every_pair_of_dtypes(dtype, vector_dtype, device):
    """Vectors in each dtype beside x in each dtype, in all three ops that read or write vectors."""
    x = batch((6, 5, 3, 4), dtype, device=device)
    dy = like(gradient(x, 0), x)
    vectors = [vector(5, vector_dtype, device, seed=k) for k in range(4)]
    vectors[3] = vectors[3].abs()
    sums, moments = op_calls.exact_sums(x), op_calls.exact_moments(x)

    def run(ops, x, dy, vectors):
        forward = op_calls.normalize(ops, x, sums, vectors, batches=2)
        vector_dtype = vectors[0].dtype
        reduced = op_calls.backward_reduce(ops, dy, x, moments, vector_dtype, vector_dtype)
        backward = op_calls.backward_input(ops, dy, x, vectors[0], moments, reduced["sums_dy"])
        return forward | reduced | backward

    actual = run(_C, x, dy, vectors)
    expected = run(reference, double(x), double(dy), [double(v) for v in vectors])
    assert actual.pop("num_batches_tracked") == expected.pop("num_batches_tracked") == 3
    for name, value in actual.items():
        scale = 100.0 if name in ("sums_dy", "dweight", "dbias") else None
        assert_near(value, expected[name], scale, computed_in=dtype, message=name)


LARGE = [(8, 64, 28, 28), (16, 3, 64, 64), (2, 300, 9, 7), (4096, 33), (3, 1, 200, 100), (70, 70)]


def all_outputs(x, dy):
    channels = x.shape[1]
    vectors = [vector(channels, torch.float32, x.device, seed=k) for k in range(4)]
    sums = op_calls.statistics(_C, x)["sums"]
    forward = op_calls.normalize(_C, x, sums, vectors, batches=0)
    reduced = op_calls.backward_reduce(_C, dy, x, forward["moments"], torch.float32, x.dtype)
    backward = op_calls.backward_input(
        _C, dy, x, vectors[0], forward["moments"], reduced["sums_dy"]
    )
    forward["num_batches_tracked"] = forward["num_batches_tracked"].double()
    return {"sums": sums} | forward | reduced | backward


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel_between"])
@over_dtypes
def test_results_repeat_bit_by_bit_with_any_number_of_threads(dtype, layout, device):
    for shape in LARGE:
        x = batch(shape, dtype, layout, device)
        dy = like(gradient(x, 0), x)
        expected = all_outputs(x, dy)
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            for name, value in all_outputs(x, dy).items():
                assert_same_bits(value, expected[name], f"{name}, {shape}, {threads} threads")


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
@over_dtypes
def test_unaligned_memory(dtype, offset, device):
    """Storage offsets that no vector load can take give the results of aligned memory."""
    for shape, layout in product([(4, 3, 5, 7), (4, 64, 3, 3), (9, 65)], LAYOUTS):
        x = batch(shape, dtype, layout, device)
        dy = like(gradient(x, 0), x)
        shifted = []
        for t in (x, dy):
            memory = torch.empty(t.numel() + offset, dtype=dtype, device=device)
            shifted.append(memory.as_strided(t.shape, t.stride(), offset).copy_(t))
        actual, expected = all_outputs(*shifted), all_outputs(x, dy)
        for name, value in actual.items():
            message = f"{name}, {shape}, {layout}"
            assert_near(
                value, expected[name].double(), computed_in=dtype, message=message, roundings=2
            )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@over_layouts
def test_reference_is_batch_norm(layout, momentum, affine, device):
    """The oracle itself, against torch.nn.BatchNorm in float64, over two batches."""
    for shape in [(4, 3), (5, 1, 3), (2, 65, 7, 7), (1, 3, 1, 17), (2, 3, 2, 3, 4)]:
        kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
        layer = kind.get(len(shape), torch.nn.BatchNorm3d)(
            shape[1], momentum=momentum, affine=affine, dtype=torch.float64, device=device
        )
        weight = bias = None
        if affine:
            weight, bias = vector(shape[1], device=device), vector(shape[1], device=device, seed=1)
            layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
        running = [torch.zeros(shape[1], device=device, dtype=torch.float64) for _ in "mv"]
        running[1].fill_(1)
        for step in range(2):
            x = batch(shape, layout=layout, device=device, seed=step)
            dy = gradient(x, step)
            # On other strides PyTorch's own backward is wrong at times: N = 1, channel_between.
            whole = x.contiguous().requires_grad_()
            y = layer(whole)
            y.backward(dy)
            actual = op_calls.normalize(
                reference, x, op_calls.exact_sums(x), (weight, bias, *running), step, momentum
            )
            running = [actual["running_mean"], actual["running_var"]]
            moments = actual["moments"]
            actual |= op_calls.backward_reduce(
                reference, dy, x, moments, torch.float64, torch.float64
            )
            actual |= op_calls.backward_input(reference, dy, x, weight, moments, actual["sums_dy"])
            assert_near(actual["y"], y)
            assert_near(actual["dx"], whole.grad)
            assert_near(actual["running_mean"], layer.running_mean)
            assert_near(actual["running_var"], layer.running_var)
            assert actual["num_batches_tracked"] == layer.num_batches_tracked
            if affine:
                assert_near(actual["dweight"], layer.weight.grad, scale=dy.abs().sum())
                assert_near(actual["dbias"], layer.bias.grad, scale=dy.abs().sum())
                layer.zero_grad()


def is_dense(x):
    return _C.check(x, None, None, None, None, None, 0.1, 1e-5)


def test_dense_means_without_gaps_or_overlaps(device):
    x = torch.zeros(4, 6, 5, 5, device=device)
    dense = [batch((4, 6, 5, 5), torch.float32, layout, device) for layout in LAYOUTS]
    dense += [x[1:3], x[:, :1, :1, :1].contiguous(), x[:0, :, 1:], x[:1, 2:4], x.transpose(0, 1)]
    strided = [x[:, 1:], x[..., ::2], x[:, :1], x[:1].expand(4, 6, 5, 5), x[::2]]
    assert all(is_dense(t) for t in dense)
    assert not any(is_dense(t) for t in strided)


def test_same_layout_means_equal_offsets(device):
    x = torch.zeros(4, 6, 5, 5, device=device)
    assert _C.same_layout(x, torch.ones_like(x))
    assert not _C.same_layout(x, x.to(memory_format=torch.channels_last))
    assert not _C.same_layout(x, x[:1].expand_as(x))
    assert not _C.same_layout(x, x[0])
    # Strides of dimensions of size 1, and all strides of an empty tensor, mean nothing.
    assert _C.same_layout(x[:, :, :1, :1], x[:, :, :1, :1].transpose(2, 3))
    assert _C.same_layout(x[:0], x[:0].to(memory_format=torch.channels_last))
