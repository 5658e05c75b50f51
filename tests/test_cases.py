"""Cases that users of other synchronized batch norms reported; docstrings name the reports.

Those about modules are in test_cases_modules.py. Expected numbers are float64 (exact.json).
"""

import copy
import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from distributed import rank_device, run_ranks
from helpers import DTYPES, assert_near, assert_same_bits, batch, double, vector
from whole_batch import assert_part, parts, run_part, run_whole

EXACT = json.loads((Path(__file__).parent / "exact.json").read_text())

over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _run_part(xs, dys, weight, bias, device, options):
    return run_part(xs, dys, weight, bias, device=device, **options)


def on_ranks(xs, dys, weight=None, bias=None, device=None, **options):
    return run_ranks(len(xs), _run_part, xs, dys, weight, bias, device, options)


def check_exact(name, dtype, device):
    """Each rank's part of the case against its numbers; all of these fit into half exactly."""
    case = EXACT[name]
    expect = case["expect"]

    def tensors(per_rank):
        empty = torch.zeros(case.get("shape_of_empty", 0), dtype=torch.float64)
        return [torch.tensor(v, dtype=torch.float64) if v else empty for v in per_rank]

    channels = len(expect["mean"])
    weight = torch.tensor(case.get("w", [1.0] * channels), dtype=dtype)
    bias = torch.tensor(case.get("b", [0.0] * channels), dtype=dtype)
    xs, dys = ([t.to(dtype) for t in tensors(case[k])] for k in ("x", "dy"))
    options = {"eps": case["eps"], "momentum": case["momentum"]}
    results = on_ranks(xs, dys, weight, bias, device, **options)
    whole = run_whole(xs, dys, weight, bias, **options)
    for rank, actual in enumerate(results):
        numbers = {k: tensors(expect[k])[rank] for k in ("y", "dx")}
        numbers |= {k[:-6]: tensors(expect[k])[rank] for k in ("dweight_local", "dbias_local")}
        numbers |= {k: tensors([expect[k]])[0] for k in ("running_mean", "running_var")}
        numbers |= {"num_batches_tracked": 1, "sizes": whole[rank]["sizes"]}
        assert_part(actual, numbers)
    return results


@over_dtypes
def test_ranks_with_different_batch_sizes(dtype, device):
    """pytorch#22192, apex#387"""
    check_exact("uneven_rows", dtype, device)


@over_dtypes
def test_one_row_on_each_rank(dtype, device):
    """pytorch#36865, apex#262"""
    check_exact("one_row_per_rank", dtype, device)


@over_dtypes
def test_a_rank_with_an_empty_batch(dtype, device):
    """pytorch#36530"""
    empty = check_exact("empty_rank", dtype, device)[0]
    assert empty["dx"].shape == tuple(EXACT["empty_rank"]["shape_of_empty"])
    assert (empty["dweight"] == 0).all()
    assert (empty["dbias"] == 0).all()


@pytest.mark.parametrize("other", [torch.float16, torch.float32], ids=str)
def test_an_empty_rank_in_half(other, device):
    """pytorch PR#37198: both must put the same dtype on the wire"""
    xs, dys = parts([(0, 5, 3, 3), (4, 5, 3, 3)], other)
    xs[0], dys[0] = xs[0].half(), dys[0].half()
    weight = vector(5, torch.float32)
    results = on_ranks(xs, dys, weight, weight, device)
    for actual, expected in zip(results, run_whole(xs, dys, weight, weight), strict=True):
        assert_part(actual, expected, computed_in=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_half_module_counts_81920_values(dtype, device):
    """pytorch#70901: counts must not be held in half"""
    xs, dys = parts([(10, 2, 64, 64)] * 2)
    xs = [(5 + torch.randn(x.shape)).to(dtype) for x in xs]
    dys = [(dy / 16).to(dtype) for dy in dys]  # their sum fits into float16
    weight, bias = torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype)
    results = on_ranks(xs, dys, weight, bias, device)
    y = torch.cat([double(r["y"]) for r in results])
    assert y.mean((0, 2, 3)).abs().max() < 0.01
    for actual, expected in zip(results, run_whole(xs, dys, weight, bias), strict=True):
        assert_part(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_input_without_running_statistics(dtype, device):
    """pytorch#49730, fairscale#659: float32 parameters, track_running_stats=False"""
    layer = syncbn.BatchNorm2d(5, track_running_stats=False, device=device)
    xs, dys = parts([(4, 5, 3, 3)], dtype)
    x = xs[0].to(device).requires_grad_()
    y = layer(x)
    y.backward(dys[0].to(device))
    expected = run_whole(xs, dys, torch.ones(5), torch.zeros(5))[0]
    assert_near(y, expected["y"])
    assert_near(x.grad, expected["dx"], expected["sizes"]["dx"])
    assert_near(layer.weight.grad, expected["dweight"], expected["sizes"]["dweight"])


@over_dtypes
@pytest.mark.parametrize("channels_last", ["x", "dy"])
def test_gradient_in_another_layout(channels_last, dtype, device):
    """pytorch#62967"""
    xs, dys = parts([(3, 66, 4, 5), (2, 66, 4, 5)], dtype)
    changed = xs if channels_last == "x" else dys
    changed[:] = [t.to(memory_format=torch.channels_last) for t in changed]
    weight, bias = vector(66, dtype), vector(66, dtype, seed=1)
    results = on_ranks(xs, dys, weight, bias, device)
    for actual, expected in zip(results, run_whole(xs, dys, weight, bias), strict=True):
        assert_part(actual, expected)


@over_dtypes
@pytest.mark.parametrize("channels", [1, 3, 64, 66, 130, 257])
def test_channels_last_with_many_channels(channels, dtype, device):
    """pytorch PR#57077"""
    xs, dys = parts([(4, channels, 5, 7)], dtype)
    xs, dys = ([t.to(memory_format=torch.channels_last) for t in ts] for ts in (xs, dys))
    weight, bias = vector(channels, dtype), vector(channels, dtype, seed=1)
    actual = run_part(xs, dys, weight, bias, device=device)
    assert_part(actual, run_whole(xs, dys, weight, bias)[0])


@pytest.mark.parametrize("make", [syncbn.BatchNorm1d, syncbn.SyncBatchNorm])
def test_input_of_two_dimensions(make, device):
    """pytorch#20204, apex#194"""
    x = batch((8, 4), torch.float32, device=device)
    assert_near(make(4, device=device)(x), run_whole([x.cpu()], [x.cpu()])[0]["y"])


def test_without_weight_and_bias(device):
    """pytorch#54495, apex#158"""
    xs, dys = parts([(3, 5, 2, 2), (1, 5, 2, 2)], torch.float32)
    results = on_ranks(xs, dys, None, None, device)
    for actual, expected in zip(results, run_whole(xs, dys), strict=True):
        assert_part(actual, expected)
    layer = syncbn.convert_model(nn.BatchNorm2d(5, affine=False)).to(device)
    assert_near(layer(xs[0].to(device)), run_whole(xs[:1], dys[:1])[0]["y"])


def _one_rank_skips_the_layer(direction):
    """What is broken is a group of its own, whose time-out is short."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    layer = syncbn.BatchNorm1d(3, process_group=group)
    error = None
    try:
        if direction == "backward":
            y = layer(torch.randn(4, 3))
        if dist.get_rank() == 0:
            y = layer(torch.randn(4, 3)) if direction == "forward" else y
            y.sum().backward()
    except RuntimeError as e:
        error = str(e)
    dist.barrier()
    return error, group.group_name


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_rank_skips_the_layer(direction):
    """pytorch#44957: an error that names the group, never a silent wrong result"""
    start = time.monotonic()
    (error, name), (nothing, _) = run_ranks(
        2,
        _one_rank_skips_the_layer,
        direction,
        backend="gloo",  # NCCL ends the process
    )
    assert nothing is None
    assert f"process group {name!r} of ranks [0, 1] failed on rank 0" in error
    assert "must run the same synchronized layers in the same order" in error
    assert 1 < time.monotonic() - start < 30


@pytest.mark.cuda
def test_the_host_never_waits_for_the_gpu():
    """pytorch#36452"""
    layer = syncbn.BatchNorm2d(64, momentum=None, device="cuda")
    x = batch((8, 64, 14, 14), torch.float32, device="cuda").requires_grad_()
    layer(x).sum().backward()  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
        layer(x.to(memory_format=torch.channels_last)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert layer.num_batches_tracked == 3


@pytest.mark.cuda
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_training_step_in_a_cuda_graph(momentum):
    """pytorch#78549"""
    layer = syncbn.BatchNorm2d(5, momentum=momentum, device="cuda")
    eager = copy.deepcopy(layer)
    x = batch((4, 5, 7, 7), torch.float32, device="cuda").requires_grad_()
    start = copy.deepcopy(layer.state_dict())

    def step(layer, x):
        x.grad = None
        layer.zero_grad(set_to_none=True)
        y = layer(x)
        y.sin().sum().backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(layer, x)
    layer.load_state_dict(start)
    for seed in range(3):
        new = batch(x.shape, torch.float32, device="cuda", seed=seed)
        x.data.copy_(new)
        graph.replay()
        leaf = new.requires_grad_()
        assert_same_bits(y, step(eager, leaf))
        assert_same_bits(x.grad, leaf.grad)
    for a, b in zip(layer.state_dict().values(), eager.state_dict().values(), strict=True):
        assert_same_bits(a, b)


def _gradient_penalty(xs):
    x = xs[dist.get_rank()].requires_grad_()
    layer = syncbn.BatchNorm2d(5).to(x)
    (dx,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    dx.square().sum().backward()
    return x.grad


def test_gradient_penalty():
    """pytorch#61222"""
    xs, _ = parts([(3, 5, 2, 2), (1, 5, 2, 2)])
    whole = torch.cat(xs).requires_grad_()
    (dx,) = torch.autograd.grad(
        nn.BatchNorm2d(5).double()(whole).sin().sum(), whole, create_graph=True
    )
    dx.square().sum().backward()
    for actual, expected in zip(
        run_ranks(2, _gradient_penalty, xs), whole.grad.split([3, 1]), strict=True
    ):
        assert_near(actual, expected, 10 * whole.grad.abs().max())


@over_dtypes
def test_negative_gamma(dtype, device):
    """inplace_abn#92, #163: the sign is kept"""
    check_exact("negative_gamma", dtype, device)


def _parameter_gradients(layer, xs, dys, wrapped):
    layer = syncbn.convert_model(layer)
    rank = dist.get_rank()
    model = DistributedDataParallel(layer) if wrapped else layer
    model(xs[rank]).backward(dys[rank])
    return layer.weight.grad, layer.bias.grad


def test_parameter_gradients_are_local_sums():
    """nnabla#1120: DDP averages them, and must not meet sums over all ranks"""
    xs, dys = parts([(3, 5, 2, 2), (1, 5, 2, 2)])
    expected = run_whole(xs, dys, torch.ones(5), torch.zeros(5))
    layer = nn.BatchNorm2d(5).double()
    local = run_ranks(2, _parameter_gradients, layer, xs, dys, False)
    averaged = run_ranks(2, _parameter_gradients, layer, xs, dys, True)
    for i, name in enumerate(("dweight", "dbias")):
        mean = (expected[0][name] + expected[1][name]) / 2
        for rank in range(2):
            assert_near(local[rank][i], expected[rank][name], 100.0)
            assert_near(averaged[rank][i], mean, 100.0)


def _running_statistics(xs):
    layer = syncbn.BatchNorm2d(65, momentum=0.3, device=rank_device())
    for x in xs[dist.get_rank()]:
        layer(x)
    return list(layer.buffers())


def test_running_statistics_are_bitwise_equal_on_all_ranks():
    """detectron2#5409"""
    xs = [[torch.randn(n, 65, 7, 5) * 1e3 + i for i in range(10)] for n in (3, 2)]
    first, second = run_ranks(2, _running_statistics, xs)
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)
