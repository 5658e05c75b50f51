"""``batchnorm2d_sync`` on one rank, line by line of its semantics, against PyTorch in float64."""

import re

import pytest
import torch
import torch.nn.functional as F

import syncbn
from helpers import DTYPES, LAYOUTS, assert_near, assert_same_bits, batch, double, vector
from syncbn.functional import batchnorm2d_sync
from whole_batch import assert_part, parts, run_part, run_whole

SHAPES = [(4, 3), (2, 5, 7), (3, 64, 4, 5), (2, 66, 3, 3), (2, 3, 2, 3, 4), (2, 1, 1, 1)]
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Counting(syncbn.sync.Exchange):
    """Participants that are all like this one, and what was exchanged with them."""

    def __init__(self, size=1):
        self.size = size
        self.payloads = []

    def all_reduce(self, values):
        self.payloads.append(values.clone())
        return values * self.size


class Silent(syncbn.sync.Exchange):
    """A second participant that never has any values."""

    size = 2

    def all_reduce(self, values):
        return values


def check_against_whole(xs, dys, weight=None, bias=None, device="cpu", **options):
    actual = run_part(xs, dys, weight, bias, device=device, **options)
    assert_part(actual, run_whole(xs, dys, weight, bias, **options)[0])
    return actual


@pytest.mark.parametrize("absent", [(), ("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@over_dtypes
def test_one_rank_is_plain_batch_norm(shape, dtype, absent, device):
    xs, dys = parts([shape], dtype)
    vectors = {"weight": vector(shape[1], dtype), "bias": vector(shape[1], dtype, seed=1)}
    vectors |= dict.fromkeys(absent)
    check_against_whole(xs, dys, **vectors, device=device)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0, None])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_momentum_and_eps(momentum, eps, device):
    xs, dys = parts([(3, 5, 4, 4)])
    running = vector(5), vector(5).abs()
    check_against_whole(xs, dys, device=device, momentum=momentum, eps=eps, running=running)


@pytest.mark.parametrize("vectors_dtype", DTYPES, ids=str)
@over_dtypes
def test_parameters_and_statistics_of_another_dtype(dtype, vectors_dtype, device):
    xs, dys = parts([(3, 5, 4, 4)], dtype)
    weight, bias = (vector(5, vectors_dtype, seed=i) for i in range(2))
    actual = check_against_whole(xs, dys, weight, bias, device=device)
    assert actual["y"].dtype == actual["dx"].dtype == dtype
    assert actual["dweight"].dtype == actual["dbias"].dtype == vectors_dtype


@pytest.mark.parametrize("vectors_dtype", DTYPES, ids=str)
@over_dtypes
def test_evaluation_with_parameters_of_another_dtype(dtype, vectors_dtype, device):
    """A layer that trains must evaluate, though PyTorch's kernels take few such mixtures."""
    layer = syncbn.BatchNorm2d(5, dtype=vectors_dtype, device=device)
    with torch.no_grad():
        for i, v in enumerate([layer.weight, layer.bias, layer.running_mean, layer.running_var]):
            v.copy_(vector(5, vectors_dtype, device, seed=i).abs())
    x, dy = (batch((3, 5, 4, 4), dtype, device=device, seed=i) for i in range(2))
    exact = [double(t.detach()).requires_grad_() for t in (x, layer.weight, layer.bias)]
    statistics = double(layer.running_mean), double(layer.running_var)
    y = F.batch_norm(exact[0], *statistics, *exact[1:], False, 0.0, 1e-5)
    expected = [y, *torch.autograd.grad(y, exact, double(dy))]
    for trains, frozen in (False, False), (True, True):
        layer.train(trains)
        layer.frozen = frozen
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        actual = [y, *torch.autograd.grad(y, (leaf, layer.weight, layer.bias), dy)]
        assert [t.dtype for t in actual] == [dtype, dtype, vectors_dtype, vectors_dtype]
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            # PyTorch's CUDA kernels round once to the dtype of x on the way to the parameters.
            rough = device.type == "cuda" and dtype.itemsize == 2 and i >= 2
            scale = b.abs().max() * (torch.finfo(dtype).eps / 2e-5 if rough else 1)
            assert_near(a, b, scale, computed_in=torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_that_are_no_longer_tracked_still_evaluate(frozen, device):
    """``track_running_stats`` switched off later on means training alone, as in torch.nn."""
    stock = torch.nn.BatchNorm2d(5, dtype=torch.float64)
    stock(batch((3, 5, 4, 4)))
    layer = syncbn.BatchNorm2d(5, dtype=torch.float64, device=device)
    layer.load_state_dict(stock.state_dict())
    layer.track_running_stats = False
    layer.frozen = frozen
    layer.train(frozen)
    for dtype in torch.float64, torch.float32:  # of which PyTorch's kernels take the first
        x = batch((3, 5, 4, 4), dtype, device=device, seed=1)
        assert_near(layer(x), stock.eval()(double(x).cpu()))


def test_cumulative_average_over_several_batches(device):
    stock = torch.nn.BatchNorm2d(5, momentum=None, dtype=torch.float64)
    layer = syncbn.BatchNorm2d(5, momentum=None, dtype=torch.float64, device=device)
    for seed in range(5):
        x = batch((2, 5, 3, 3), seed=seed)
        assert_near(layer(x.to(device)), stock(x))
        assert_near(layer.running_mean, stock.running_mean)
        assert_near(layer.running_var, stock.running_var)
        assert layer.num_batches_tracked == seed + 1


@over_dtypes
def test_eval_equals_torch_and_does_not_communicate(dtype, device):
    exchange = Counting(size=2)
    x = batch((3, 5, 4, 4), dtype, device=device)
    running = vector(5, dtype, device), vector(5, dtype, device).abs()
    before = [v.clone() for v in running]
    weight, bias = (vector(5, dtype, device, seed=i) for i in range(2))
    y = batchnorm2d_sync(x, weight, bias, *running, exchange, training=False)
    assert_same_bits(y, F.batch_norm(x, *running, weight, bias, False, 0.1, 1e-5))
    assert exchange.payloads == []
    for v, old in zip(running, before, strict=True):
        assert_same_bits(v, old)


def test_eval_without_running_statistics_is_local(device):
    exchange = Counting(size=2)
    x = batch((3, 5, 4, 4), device=device)
    y = batchnorm2d_sync(x, None, None, None, None, exchange, training=False)
    assert_near(y, F.batch_norm(x, None, None, None, None, True))
    assert exchange.payloads == []


def test_one_value_per_channel_on_one_rank_is_an_error(device):
    for shape in [(1, 3), (1, 3, 1, 1)]:
        x = torch.zeros(shape, device=device)
        with pytest.raises(ValueError, match="more than 1 value per channel when training"):
            batchnorm2d_sync(x, None, None, None, None)
        with pytest.raises(ValueError, match="more than 1 value per channel when training"):
            torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))
        assert batchnorm2d_sync(x, None, None, None, None, Counting(2)).isfinite().all()


@over_dtypes
def test_global_count_of_one(dtype, device):
    x = batch((1, 3), dtype, device=device).requires_grad_()
    weight, bias = (vector(3, dtype, device, seed=i).requires_grad_() for i in range(2))
    running = vector(3, dtype, device), vector(3, dtype, device).abs()
    old_mean, old_var = (v.clone() for v in running)
    batches = torch.tensor(4, device=device)
    y = batchnorm2d_sync(x, weight, bias, *running, Silent(), num_batches_tracked=batches)
    y.backward(torch.ones_like(y))
    assert_same_bits(y[0], bias)
    assert_same_bits(running[1], old_var)
    assert_near(running[0], double(old_mean) * 0.9 + double(x[0]) * 0.1)
    assert batches == 5
    assert not x.grad.any()
    assert not weight.grad.any()
    assert (bias.grad == 1).all()


@pytest.mark.parametrize("group", [None, Silent()], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("momentum", [0.1, None])
@over_dtypes
def test_empty_batch_leaves_the_running_statistics(dtype, momentum, group, device):
    x = torch.zeros(0, 3, 4, 4, dtype=dtype, device=device, requires_grad=True)
    weight, bias = (vector(3, dtype, device, seed=i).requires_grad_() for i in range(2))
    running = vector(3, dtype, device), vector(3, dtype, device).abs()
    before = [v.clone() for v in running]
    batches = torch.tensor(4, device=device)
    y = batchnorm2d_sync(
        x, weight, bias, *running, group, momentum=momentum, num_batches_tracked=batches
    )
    y.backward(torch.zeros_like(y))
    assert y.shape == x.grad.shape == (0, 3, 4, 4)
    assert (weight.grad == 0).all()
    assert (bias.grad == 0).all()
    assert batches == 4
    for v, old in zip(running, before, strict=True):
        assert_same_bits(v, old)


@pytest.mark.parametrize("value", [3.0, 0.1, -1e4])
@over_dtypes
def test_no_variance_and_no_eps(value, dtype, device):
    x = torch.full((4, 3, 5, 5), value, dtype=dtype, device=device, requires_grad=True)
    weight, bias = (vector(3, dtype, device, seed=i).requires_grad_() for i in range(2))
    y = batchnorm2d_sync(x, weight, bias, None, None, eps=0.0)
    y.backward(batch(x.shape, dtype, device=device))
    assert (y == bias.view(3, 1, 1)).all()
    assert (x.grad == 0).all()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinity_stay_in_their_channel(bad, dtype, layout, device):
    xs, dys = parts([(2, 5, 3, 3)], dtype)
    xs[0][1, 3, 2, 0] = bad
    xs[0] = xs[0].to(memory_format=torch.channels_last if "last" in layout else None)
    actual = run_part(xs, dys, vector(5, dtype), vector(5, dtype), device=device)
    expected = run_whole(xs, dys, vector(5, dtype), vector(5, dtype))[0]
    others = [0, 1, 2, 4]
    assert actual["y"][:, 3].isnan().all()
    assert actual["dx"][:, 3].isnan().all()
    assert actual["running_var"][3].isnan()
    for name in ("y", "dx"):
        assert_near(actual[name][:, others], expected[name][:, others], message=name)
    for name in ("running_mean", "running_var"):
        assert_near(actual[name][others], expected[name][others], message=name)
        assert not actual[name][3].isfinite()


@pytest.mark.parametrize("dy_layout", [*LAYOUTS, "expanded", "sliced"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded", "sliced", "flipped strides"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_strides_of_input_and_gradient(layout, dy_layout, dtype, device):
    def arranged(name, seed):
        if name == "expanded":
            return batch((4, 5, 1, 3), dtype, device=device, seed=seed).expand(4, 5, 6, 3)
        if name == "sliced":
            return batch((8, 7, 6, 5), dtype, device=device, seed=seed)[::2, 1:6, :, 2:]
        if name == "flipped strides":
            return batch((3, 6, 5, 4), dtype, device=device, seed=seed).permute(3, 2, 1, 0)
        return batch((4, 5, 6, 3), dtype, name, device, seed)

    x, dy = arranged(layout, 0), arranged(dy_layout, 1)
    leaf = x.clone().requires_grad_() if layout in LAYOUTS else x.detach().requires_grad_()
    weight, bias = (vector(5, dtype, device, seed=i).requires_grad_() for i in range(2))
    y = batchnorm2d_sync(leaf, weight, bias, None, None)
    y.backward(dy)
    expected = run_whole([x], [dy], weight, bias)[0]
    assert_near(y, expected["y"])
    assert_near(leaf.grad, expected["dx"])
    assert_near(weight.grad, expected["dweight"], double(dy).abs().sum())
    assert_near(bias.grad, expected["dbias"], double(dy).abs().sum())
    if layout in LAYOUTS or layout == "flipped strides":
        assert y.stride() == x.stride()


def test_strided_weight_and_bias(device):
    xs, dys = parts([(3, 5, 4, 4)])
    weight, bias = vector(10, device=device)[::2], vector(1, device=device).expand(5)
    x = xs[0].to(device)
    y = batchnorm2d_sync(x, weight, bias, None, None)
    assert_near(y, run_whole(xs, dys, weight.cpu(), bias.cpu())[0]["y"])


def test_a_view_with_a_lazy_sign(device):
    """The imaginary part of a conjugate: its memory holds the opposite numbers, with gaps, so that
    it is copied."""
    x, dy = (batch((3, 5, 4, 4), device=device, seed=i) for i in range(2))
    lazy = [torch.complex(t, -t).conj().imag for t in (x, dy)]
    assert lazy[0].is_neg()
    leaf = lazy[0].detach().requires_grad_()
    y = batchnorm2d_sync(leaf, None, None, None, None)
    y.backward(lazy[1])
    expected = run_whole([x], [dy])[0]
    assert_near(y, expected["y"])
    assert_near(leaf.grad, expected["dx"])


def test_one_collective_each_way_of_constant_size(device):
    exchange = Counting(size=1)
    x = batch((3, 5, 4, 4), torch.bfloat16, device=device).requires_grad_()
    y = batchnorm2d_sync(x, vector(5, device=device), None, None, None, exchange)
    assert [(p.dtype, p.numel()) for p in exchange.payloads] == [(torch.float64, 11)]
    assert exchange.payloads[0][-1] == 3 * 4 * 4
    y.backward(torch.ones_like(y))
    assert [(p.dtype, p.numel()) for p in exchange.payloads[1:]] == [(torch.float32, 10)]


def test_an_exchange_is_taken_at_its_word(device):
    """Participants all alike: the statistics are this one's, the count is theirs together."""
    xs, dys = parts([(3, 5, 4, 4)])
    actual = run_part(xs, dys, vector(5), vector(5), Counting(size=3), device)
    assert_part(actual, run_whole(xs * 3, dys * 3, vector(5), vector(5))[0])


@pytest.mark.parametrize("missing", ["x", "weight", "bias"])
def test_gradients_are_made_where_they_are_wanted(missing, device):
    xs, dys = parts([(3, 5, 4, 4)])
    inputs = {"x": xs[0].to(device), "weight": vector(5, device=device)}
    inputs["bias"] = vector(5, device=device, seed=1)
    for name, t in inputs.items():
        t.requires_grad_(name != missing)
    y = batchnorm2d_sync(*inputs.values(), None, None)
    y.backward(dys[0].to(device))
    expected = run_whole(xs, dys, inputs["weight"], inputs["bias"])[0]
    assert inputs[missing].grad is None
    for name in {"x", "weight", "bias"} - {missing}:
        assert_near(inputs[name].grad, expected[f"d{name}"], double(dys[0]).abs().sum())


def bad_calls():
    x, v = torch.zeros(4, 3, 5, 5), torch.ones(3)
    four = "of dtype float32, float16, bfloat16 or float64"
    return {
        "wrong channels": ((x, torch.ones(4), None, None, None), ValueError, "weight of shape"),
        "wrong statistics": ((x, None, None, torch.ones(2), v), ValueError, "running_mean of sha"),
        "one dimension": ((v, None, None, None, None), ValueError, "x with at least 2 dimensions"),
        "integers": ((x.long(), None, None, None, None), TypeError, f"x {four}"),
        "integer bias": ((x, v, v.long(), None, None), TypeError, f"bias {four}"),
        "another device": ((x, v.to("meta"), None, None, None), ValueError, "weight on cpu, as x"),
        "no tensor": (([1.0], None, None, None, None), TypeError, "x to be a tensor"),
        "weight a list": ((x, [1.0], None, None, None), TypeError, "weight"),
        "half of the statistics": ((x, None, None, v, None), ValueError, "both or neither"),
    }


@pytest.mark.parametrize("name", ["momentum", "eps"])
@pytest.mark.parametrize("value", ["0.1", [0.1], torch.nn], ids=str)
def test_numbers_are_checked_before_any_collective(name, value, device):
    exchange = Counting(size=2)
    x = torch.zeros(4, 3, device=device)
    text = f"batchnorm2d_sync: expected {name} to be a number, got {type(value).__name__}"
    with pytest.raises(TypeError, match=re.escape(text)):
        batchnorm2d_sync(x, None, None, None, None, exchange, **{name: value})
    assert exchange.payloads == []


@pytest.mark.parametrize("eps", [-1.0, float("nan"), None])
def test_a_bad_eps_is_found_before_any_collective(eps, device):
    exchange = Counting(size=2)
    x = torch.zeros(4, 3, device=device)
    error, text = (TypeError, "a number") if eps is None else (ValueError, f"0 or more, got {eps}")
    with pytest.raises(error, match=f"batchnorm2d_sync: expected eps .*{text}"):
        batchnorm2d_sync(x, None, None, None, None, exchange, eps=eps)
    with torch.device("meta"), pytest.raises(error, match=f"expected eps .*{text}"):
        batchnorm2d_sync(torch.zeros(4, 3), None, None, None, None, exchange, eps=eps)
    assert exchange.payloads == []


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", bad_calls())
def test_bad_arguments_are_found_before_any_collective(case, training):
    arguments, error, text = bad_calls()[case]
    exchange = Counting(size=2)
    with pytest.raises(error, match=text):
        batchnorm2d_sync(*arguments, exchange, training=training)
    assert exchange.payloads == []


def test_bad_group(device):
    x = torch.zeros(4, 3, device=device)
    with pytest.raises(TypeError, match=r"group: expected None, .*ProcessGroup or .*, got str"):
        batchnorm2d_sync(x, None, None, None, None, "world")


def test_cumulative_average_needs_a_count(device):
    x, v = torch.zeros(4, 3, device=device), torch.ones(3, device=device)
    with pytest.raises(ValueError, match="num_batches_tracked for momentum=None"):
        batchnorm2d_sync(x, None, None, v, v, momentum=None)


@pytest.mark.cuda
def test_mixed_devices():
    x = torch.zeros(4, 3, device="cuda")
    with pytest.raises(ValueError, match="weight on cuda:0, as x"):
        batchnorm2d_sync(x, torch.ones(3), None, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_momentum_of_1_forgets_what_was_there(dtype, device):
    """However large: running + (value - running) would be 0."""
    x = batch((8, 3, 5, 2), dtype, device=device)
    far = [torch.full((3,), value, dtype=dtype, device=device) for value in (1e20, 1e30)]
    new = [torch.zeros_like(v) for v in far]
    for running in (far, new):
        batchnorm2d_sync(x, None, None, *running, momentum=1.0)
    for a, b in zip(far, new, strict=True):
        assert_same_bits(a, b)
    assert_near(far[1], x.double().transpose(0, 1).flatten(1).var(1), 10.0)


@pytest.mark.parametrize("shape", [(1, 3, 5, 9), (4, 3, 1, 1), (3, 1, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_evaluation_takes_gradients_of_any_strides(shape, dtype, device):
    """As of a sequence of tokens (DETR); PyTorch's own layer gets them wrong on the CPU."""
    x, dy = (batch(shape, dtype, device=device, seed=i) for i in range(2))
    channels = shape[1]
    weight, bias = (vector(channels, dtype, device, seed=i) for i in range(2))
    running = torch.zeros(channels, dtype=dtype, device=device), torch.ones_like(weight)
    leaves = [v.clone().requires_grad_() for v in (x, weight, bias)]
    y = batchnorm2d_sync(*leaves, *running, training=False)
    tokens = dy.flatten(2).permute(2, 0, 1).contiguous()
    (y.flatten(2).permute(2, 0, 1) * tokens).sum().backward()
    scale = weight.double() / (1 + 1e-5) ** 0.5
    xhat = x.double() / (1 + 1e-5) ** 0.5
    expected = [
        dy.double() * scale.view(1, -1, 1, 1),
        (dy.double() * xhat).sum((0, 2, 3)),
        dy.double().sum((0, 2, 3)),
    ]
    for leaf, e in zip(leaves, expected, strict=True):
        assert_near(leaf.grad, e, 100.0)
