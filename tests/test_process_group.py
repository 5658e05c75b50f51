"""Several ranks against one batch_norm on the whole batch in float64."""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import syncbn
from distributed import not_over_gloo_on_a_gpu, rank_device, run_ranks
from helpers import DTYPES, assert_near, assert_same_bits, batch, double, vector
from syncbn.functional import batchnorm2d_sync
from syncbn.sync import ProcessGroupExchange
from whole_batch import assert_part, parts, run_part, run_whole

EQUAL = [(2, 5, 3, 4), (2, 5, 3, 4)]
SHAPES = [
    EQUAL,
    [(3, 5, 3, 4), (1, 5, 3, 4)],  # batch sizes
    [(2, 5, 3, 4), (2, 5, 6, 1)],  # spatial sizes
    [(0, 5, 3, 4), (2, 5, 3, 4)],  # an empty rank
    [(1, 5), (1, 5)],  # one row each
    [(0, 5), (2, 5)],
    [(1, 66, 3, 3), (4, 66, 3, 3)],
    [(2, 1, 3, 3, 2), (1, 1, 3, 3, 2)],
]

over_shapes = pytest.mark.parametrize("shapes", SHAPES, ids=str)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_ranks_agree(results):
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for result in results[1:]:
            assert_same_bits(result[name], results[0][name], name)


def check_against_whole(xs, dys, weight=None, bias=None, device=None, **options):
    results = run_ranks(len(xs), _run_part, xs, dys, weight, bias, device, options)
    assert_ranks_agree(results)
    for actual, expected in zip(results, run_whole(xs, dys, weight, bias, **options), strict=True):
        assert_part(actual, expected)
    return results


def _run_part(xs, dys, weight, bias, device, options):
    return run_part(xs, dys, weight, bias, device=device, **options)


@over_dtypes
@over_shapes
def test_two_ranks_are_one_batch(shapes, dtype, device):
    channels = shapes[0][1]
    weight, bias = vector(channels, dtype), vector(channels, dtype, seed=1)
    results = check_against_whole(*parts(shapes, dtype), weight, bias, device)
    for result, shape in zip(results, shapes, strict=True):
        assert result["y"].shape == result["dx"].shape == shape
        if shape[0] == 0:
            assert (result["dweight"] == 0).all()
            assert (result["dbias"] == 0).all()


@pytest.mark.parametrize("absent", ["weight", "bias", "both"])
@pytest.mark.parametrize(("momentum", "eps"), [(None, 1e-5), (0.7, 1e-2)])
def test_options(absent, momentum, eps, device):
    weight = vector(5) if absent == "bias" else None
    bias = vector(5) if absent == "weight" else None
    running = vector(5), vector(5).abs()
    options = {"momentum": momentum, "eps": eps, "running": running}
    check_against_whole(*parts(SHAPES[1]), weight, bias, device, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_input_with_other_parameters(dtype, device):
    xs, dys = parts(SHAPES[1], dtype)
    check_against_whole(xs, dys, vector(5, torch.float32), vector(5, torch.float64), device)


def test_far_means_on_the_ranks(device):
    """Each rank's own variance is 1; the variance of the batch comes from the means."""
    xs, dys = parts(EQUAL, torch.float32)
    xs[0] += 300
    check_against_whole(xs, dys, vector(5), vector(5), device)


@over_dtypes
def test_global_count_of_one(dtype, device):
    xs = [torch.zeros(0, 5, dtype=dtype), batch((1, 5), dtype)]
    dys = [torch.zeros(0, 5, dtype=dtype), torch.ones(1, 5, dtype=dtype)]
    weight, bias = vector(5, dtype), vector(5, dtype, seed=1)
    results = run_ranks(2, _run_part, xs, dys, weight, bias, device, {})
    assert_ranks_agree(results)
    assert_same_bits(results[1]["y"][0], bias)
    assert (results[1]["dx"] == 0).all()
    assert (results[0]["running_var"] == 1).all()
    assert_near(results[0]["running_mean"], 0.1 * double(xs[1][0]))
    assert results[0]["num_batches_tracked"] == 1


@pytest.mark.parametrize("momentum", [0.1, None])
def test_all_ranks_empty(momentum, device):
    xs = [torch.zeros(0, 5, 2, 2)] * 2
    options = {"momentum": momentum, "running": (vector(5), vector(5).abs())}
    for result in run_ranks(2, _run_part, xs, xs, vector(5), vector(5), device, options):
        assert_same_bits(result["running_mean"], vector(5))
        assert_same_bits(result["running_var"], vector(5).abs())
        assert result["num_batches_tracked"] == 0
        assert result["y"].shape == result["dx"].shape == (0, 5, 2, 2)
        assert (result["dweight"] == 0).all()


def test_no_variance_and_no_eps(device):
    xs = [torch.full((2, 5, 3, 3), 0.1)] * 2
    dys = [batch((2, 5, 3, 3), torch.float32, seed=i) for i in range(2)]
    for result in run_ranks(2, _run_part, xs, dys, vector(5), vector(5), device, {"eps": 0.0}):
        assert (result["y"] == vector(5).float().view(5, 1, 1)).all()
        assert (result["dx"] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_on_one_rank_is_nan_on_all_in_that_channel(bad, device):
    xs, dys = parts(EQUAL, torch.float32)
    weight = vector(5, torch.float32)
    expected = run_whole(xs, dys, weight, weight)
    xs[1][0, 2, 1, 1] = bad
    others = [0, 1, 3, 4]
    results = run_ranks(2, _run_part, xs, dys, weight, weight, device, {})
    assert_ranks_agree(results)
    for actual, whole in zip(results, expected, strict=True):
        assert actual["y"][:, 2].isnan().all()
        assert actual["dx"][:, 2].isnan().all()
        assert not actual["running_mean"][2].isfinite()
        assert actual["running_var"][2].isnan()
        assert_near(actual["y"][:, others], whole["y"][:, others])
        assert_near(actual["dx"][:, others], whole["dx"][:, others], 10.0)
        assert_near(actual["running_var"][others], whole["running_var"][others])


def _without_communication(x):
    layer = syncbn.BatchNorm2d(5).to(x)
    if dist.get_rank() == 0:  # alone: a collective would not come back
        layer.eval()
        expected = (x / (1 + layer.eps) ** 0.5, layer(x))
        plain = syncbn.BatchNorm2d(5, track_running_stats=False).to(x).eval()
        local = plain(x)
        layer.train().sync = False
        return *expected, local, layer(x)
    return None


def test_eval_and_sync_false_do_not_communicate():
    x = batch((2, 5, 3, 4))
    expected, y, local, not_synced = run_ranks(2, _without_communication, x)[0]
    assert_near(y, expected)
    stock = torch.nn.functional.batch_norm(x, None, None, None, None, True)
    assert_near(local, stock)
    assert_near(not_synced, stock)


def _no_gradient_for_input(xs, dys, weight):
    rank = dist.get_rank()
    x = xs[rank].requires_grad_(rank == 1)
    weight = weight.requires_grad_()
    batchnorm2d_sync(x, weight, None, None, None).backward(dys[rank])
    return x.grad, weight.grad


def test_a_rank_whose_input_needs_no_gradient_takes_part():
    xs, dys = parts(EQUAL)
    results = run_ranks(2, _no_gradient_for_input, xs, dys, vector(5))
    expected = run_whole(xs, dys, vector(5))
    assert results[0][0] is None
    assert_near(results[1][0], expected[1]["dx"])
    for (_, dweight), whole in zip(results, expected, strict=True):
        assert_near(dweight, whole["dweight"], whole["sizes"]["dweight"])


def _given_groups(xs, dys):
    """The same step over every kind of ``group``."""
    world = dist.group.WORLD
    alone = syncbn.create_process_group(1)
    groups = {
        "none": None,
        "world": world,
        "exchange": ProcessGroupExchange(world),
        "new group": dist.new_group([0, 1]),
        "create_process_group(2)": syncbn.create_process_group(2),
        "alone": alone,
        "local": syncbn.sync.Local(),
    }
    return {name: run_part(xs, dys, group=group) for name, group in groups.items()}


def test_group_none_process_group_or_exchange():
    xs, dys = parts(SHAPES[1])
    results = run_ranks(2, _given_groups, xs, dys)
    for rank, result in enumerate(results):
        together = run_whole(xs, dys)[rank]
        by_itself = run_whole(xs[rank : rank + 1], dys[rank : rank + 1])[0]
        for name, actual in result.items():
            assert_part(actual, by_itself if name in ("alone", "local") else together)


class Doubling(syncbn.sync.Exchange):
    """A custom exchange over point-to-point messages between two ranks."""

    size = 2

    def all_reduce(self, values):
        other = torch.empty_like(values)
        peer = 1 - dist.get_rank()
        messages = dist.P2POp(dist.isend, values, peer), dist.P2POp(dist.irecv, other, peer)
        for message in dist.batch_isend_irecv(list(messages)):
            message.wait()
        return values + other


def _custom_exchange(xs, dys, weight):
    return run_part(xs, dys, weight, group=Doubling())


@not_over_gloo_on_a_gpu
def test_custom_exchange():
    xs, dys = parts(SHAPES[1])
    results = run_ranks(2, _custom_exchange, xs, dys, vector(5))
    assert_ranks_agree(results)
    for actual, expected in zip(results, run_whole(xs, dys, vector(5)), strict=True):
        assert_part(actual, expected)


class Counting(dist.ProcessGroup):
    """A process group written in Python, as those of fault-tolerant training are."""

    def __init__(self, group):
        super().__init__(group.rank(), group.size())
        self.group = group
        self.calls = 0

    def allreduce(self, tensors, options):
        self.calls += 1
        if self.calls > 2:
            raise RuntimeError("the link is down")
        return self.group.allreduce(tensors, options)


def _group_in_python(xs, dys, weight):
    group = Counting(dist.group.WORLD)
    result = run_part(xs, dys, weight, group=group)
    return result, _error_of(run_part, xs, dys, weight, None, group)


def test_a_process_group_with_an_allreduce_of_its_own():
    xs, dys = parts(SHAPES[1])
    results = run_ranks(2, _group_in_python, xs, dys, vector(5))
    for (actual, error), expected in zip(results, run_whole(xs, dys, vector(5)), strict=True):
        assert_part(actual, expected)
        assert error.startswith("RuntimeError: all_reduce of 11 values over process group <")
        assert error.endswith("The backend says: the link is down")


def _count_calls(xs, dys):
    with CommDebugMode() as seen:
        run_part(xs, dys)
    with torch.profiler.profile() as profile:
        run_part(xs, dys)
    counts = {str(op): n for op, n in seen.get_comm_counts().items()}
    return counts, [e.name for e in profile.events()].count("c10d::allreduce_")


def test_tools_see_the_collectives():
    """PyTorch's dispatcher is bypassed only where nobody listens there."""
    for counts, profiled in run_ranks(2, _count_calls, *parts(EQUAL)):
        assert counts == {"c10d_functional.all_reduce": 2}
        assert profiled == 2


def _error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _not_a_member():
    group = dist.new_group([0])
    layer = syncbn.BatchNorm1d(3, process_group=group, device=rank_device())
    x = torch.randn(4, 3, device=rank_device())
    return _error_of(layer, x), _error_of(syncbn.create_process_group, 3)


def test_errors_of_groups():
    (member, divides), (stranger, _) = run_ranks(2, _not_a_member)
    assert member is None
    assert stranger.startswith("ValueError: group: expected a process group that this rank is a me")
    assert divides.startswith("ValueError: create_process_group: expected a group_size that divid")
    assert divides.endswith("the world size 2, got 3")


def test_create_process_group_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        syncbn.create_process_group(2)


def _wrong_channels_on_rank_0():
    """A group of its own, whose time-out is short: what breaks is this group alone."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    layer = syncbn.BatchNorm2d(3, process_group=group)
    channels = 4 if dist.get_rank() == 0 else 3
    start = time.monotonic()
    error = _error_of(layer, torch.randn(2, channels, 4, 4))
    seconds = time.monotonic() - start
    dist.barrier()  # the rank that failed at once stays until the other one has given up
    return error, seconds, group.group_name


def test_an_error_on_one_rank_comes_before_the_collective():
    (early, early_after, _), (late, late_after, name) = run_ranks(
        2,
        _wrong_channels_on_rank_0,
        backend="gloo",  # NCCL ends the process that waits too long
    )
    assert early.startswith("ValueError: batchnorm2d_sync: expected weight of shape [4]")
    assert early_after < 1
    assert late.startswith("RuntimeError: all_reduce of 7 values over process group ")
    assert repr(name) in late
    assert "of ranks [0, 1] failed on rank 1" in late
    assert 1 < late_after < 20


def _with_a_distributed_tensor(x):
    mesh = init_device_mesh(x.device.type, (2,))
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    layer = syncbn.BatchNorm2d(5).to(x)
    weight = distribute_tensor(torch.ones(5).to(x), mesh, [Shard(0)])
    plain = x.chunk(2)[dist.get_rank()]
    return (
        _error_of(layer, sharded),
        _error_of(batchnorm2d_sync, plain, weight, None, None, None),
        sharded.to_local().equal(plain),
    )


def test_distributed_tensors_get_a_clear_error():
    for of_input, of_weight, same in run_ranks(
        2, _with_a_distributed_tensor, torch.randn(4, 5, 2, 2)
    ):
        assert of_input.startswith("TypeError: batchnorm2d_sync: expected x to be a plain torch.Te")
        assert "DTensor" in of_input
        assert of_weight.startswith("TypeError: batchnorm2d_sync: expected weight to be a plain to")
        assert "DTensor" in of_weight
        assert same


def _four_ranks(xs, dys, weight):
    pair = syncbn.create_process_group(2)
    lower = dist.new_group([0, 2, 3])
    results = {"world": run_part(xs, dys, weight), "pairs": run_part(xs, dys, weight, group=pair)}
    if dist.get_rank() != 1:
        results["three"] = run_part(xs, dys, weight, group=lower)
    return results


def test_four_ranks_and_groups_of_them():
    """One is empty, one has a single row; all together, in pairs, and three of them."""
    shapes = [(3, 5, 2, 2), (0, 5, 2, 2), (1, 5, 1, 1), (2, 5, 4, 1)]
    xs, dys = parts(shapes)
    results = run_ranks(4, _four_ranks, xs, dys, vector(5))
    for name, groups in {
        "world": [[0, 1, 2, 3]],
        "pairs": [[0, 1], [2, 3]],
        "three": [[0, 2, 3]],
    }.items():
        for ranks in groups:
            members = [results[rank][name] for rank in ranks]
            whole = run_whole([xs[r] for r in ranks], [dys[r] for r in ranks], vector(5))
            assert_ranks_agree(members)
            for actual, expected in zip(members, whole, strict=True):
                assert_part(actual, expected)


def _backward_after_the_end_of_the_group():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    x = torch.randn(4, 3, requires_grad=True)
    y = batchnorm2d_sync(x, None, None, None, None, group)
    if dist.get_rank() == 1:
        return None
    try:
        gone = ValueError("Default process group has not been initialized")
        with (
            mock.patch.object(dist, "is_initialized", return_value=False),
            mock.patch.object(dist, "get_rank", side_effect=gone),
        ):
            y.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_collective_that_fails_when_the_default_group_is_gone():
    error, _ = run_ranks(2, _backward_after_the_end_of_the_group, backend="gloo")
    assert error.startswith("RuntimeError: all_reduce of 6 values over process group")
    assert "failed on rank 0" in error
