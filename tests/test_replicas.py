"""Replicas in threads: one mini-batch, as one nn.BatchNorm would see it."""

import copy
import gc
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

import syncbn
from helpers import assert_near, assert_same_bits, batch, vector
from replication import (
    compare_a_step,
    data_parallel,
    local_and_synchronized,
    parallel_apply,
    replicate,
)
from test_training import assert_trains_as, batches, net
from whole_batch import assert_part, parts, run_whole


@pytest.mark.parametrize("rows", [[2, 2], [1, 3], [1] * 8, [3, 1, 2, 5]], ids=str)
def test_a_layer_equals_one_layer_on_the_whole_batch(rows):
    xs, dys = parts([(n, 5, 4, 3) for n in rows])
    layer = syncbn.BatchNorm2d(5, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(vector(5, seed=1))
        layer.bias.copy_(vector(5, seed=2))
    leaves = [x.clone().requires_grad_() for x in xs]
    replicas = replicate(layer, len(rows))
    ys = parallel_apply(replicas, leaves)
    torch.autograd.backward(ys, dys)
    expected = run_whole(xs, dys, layer.weight, layer.bias)
    for y, x, e in zip(ys, leaves, expected, strict=True):
        assert_near(y, e["y"], message="y")
        assert_near(x.grad, e["dx"], e["sizes"]["dx"], message="dx")
    assert_near(layer.weight.grad, sum(e["dweight"] for e in expected), 100.0)
    assert_near(layer.bias.grad, sum(e["dbias"] for e in expected), 100.0)
    assert_near(layer.running_mean, expected[0]["running_mean"])
    assert_near(layer.running_var, expected[0]["running_var"])
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track_running_stats": False}, {}], ids=str
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_options_of_the_layer(options, momentum):
    layer = nn.BatchNorm2d(5, momentum=momentum, **options)
    reference, model = local_and_synchronized(nn.Sequential(nn.Conv2d(3, 5, 1), layer))
    for seed in range(3):
        x = batch((5, 3, 4, 4), seed=seed)
        compare_a_step(reference, model, x.split([2, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    xs, dys = parts([(2, 5, 4, 3), (3, 5, 4, 3)], dtype)
    layer = syncbn.BatchNorm2d(5)
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = data_parallel(layer, leaves)
    torch.autograd.backward(ys, dys)
    for y, x, e in zip(ys, leaves, run_whole(xs, dys, layer.weight, layer.bias), strict=True):
        part = {"y": y, "dx": x.grad, "running_mean": layer.running_mean}
        assert_part(part, {k: e[k] for k in (*part, "sizes")}, torch.float32)


def test_a_replica_without_rows_takes_part():
    xs, dys = parts([(0, 5, 4, 3), (3, 5, 4, 3)])
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = data_parallel(syncbn.BatchNorm2d(5, dtype=torch.float64), leaves)
    torch.autograd.backward(ys, dys)
    _, expected = run_whole(xs, dys)
    assert leaves[0].grad.shape == (0, 5, 4, 3)
    assert_near(leaves[1].grad, expected["dx"], expected["sizes"]["dx"])


def test_one_value_per_channel_in_each_replica():
    reference, model = local_and_synchronized(nn.BatchNorm1d(4))
    compare_a_step(reference, model, batch((3, 4)).split(1))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        data_parallel(model, [batch((1, 4))])  # one input: one replica, plain BN


def test_no_grad_and_eval():
    reference, model = local_and_synchronized(nn.Sequential(nn.BatchNorm2d(5), nn.BatchNorm2d(5)))
    x = batch((5, 5, 4, 3))
    with torch.no_grad():
        ys = data_parallel(model, x.split([2, 3]))
        assert_near(torch.cat(ys), reference(x))
    assert_same_bits(model[1].num_batches_tracked, torch.tensor(1))
    model.eval()
    reference.eval()
    compare_a_step(reference, model, x.split([2, 3]))
    only_one = replicate(model, 2)[0]
    assert_near(only_one(x), reference(x))  # evaluation waits for nobody


def test_layer_used_several_times():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(5)

        def forward(self, x):
            return self.norm(torch.sin(self.norm(x)) * 3 + 1)

    reference, model = local_and_synchronized(Twice())
    compare_a_step(reference, model, batch((5, 5, 4, 3)).split([2, 3]))
    assert model.norm.num_batches_tracked == 2


def test_layers_called_directly_are_plain():
    reference, model = local_and_synchronized(nn.BatchNorm2d(5))
    compare_a_step(reference, model, [batch((4, 5, 3, 3))], lambda m, xs: [m(x) for x in xs])
    compare_a_step(reference, model, batch((4, 5, 3, 3)).split(2))
    compare_a_step(reference, model, [batch((4, 5, 3, 3))], lambda m, xs: [m(x) for x in xs])


def test_replicas_in_excess_of_the_inputs_are_not_waited_for():
    reference, model = local_and_synchronized(nn.BatchNorm2d(5))

    def run(module, xs):
        return parallel_apply(replicate(module, 5)[: len(xs)], xs)

    compare_a_step(reference, model, batch((4, 5, 3, 3)).split(2), run)


def test_models_run_concurrently():
    def work(seed):
        reference, model = local_and_synchronized(net())
        for step in range(10):
            compare_a_step(reference, model, batch((4, 3, 3, 3), seed=seed + step).split(2))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(0, 60, 20))) == [None] * 3


class Two(syncbn.sync.Exchange):
    size = 2

    def all_reduce(self, values):
        return values


def _pruned(layer, name):
    prune.custom_from_mask(layer, name, torch.tensor([1.0, 0.0, 1.0]))


def _parametrized(layer, name):
    parametrize.register_parametrization(layer, name, nn.Softplus())


def _attribute(layer, name):
    value = getattr(layer, name).detach().clone()
    delattr(layer, name)
    setattr(layer, name, value)


@pytest.mark.parametrize("names", [["weight"], ["bias"], ["weight", "bias"]], ids=str)
@pytest.mark.parametrize("change", [_pruned, _parametrized, _attribute])
def test_layers_whose_parameters_are_elsewhere(change, names):
    xs = batch((7, 3, 2, 2)).split([4, 3])
    stock, model = (nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)).double() for _ in "12")
    for name in names:
        change(stock[1], name)
        change(model[1], name)
    syncbn.convert_model(model)
    for _ in range(2):
        assert_near(torch.cat(data_parallel(model, xs)), stock(torch.cat(xs)), 10.0)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = syncbn.ModelDataParallel(syncbn.BatchNorm2d(3).double(), ["cpu"] * 2)

    def forward(self, x):
        return torch.cat(self.inner(syncbn.scatter(x, self.inner.devices)))


def test_replicas_inside_of_replicas_are_refused():
    with pytest.raises(RuntimeError, match="expected replicas of one model, got replicas inside"):
        data_parallel(Nested(), batch((8, 3, 2, 2)).split(4))


def test_replicas_and_a_process_group_are_not_mixed():
    xs = batch((4, 3, 3, 3)).split(2)
    layer = syncbn.BatchNorm2d(3, process_group=Two()).double()
    with pytest.raises(RuntimeError, match="cannot share one mini-batch: expected one replica"):
        data_parallel(layer, xs)
    layer.process_group = syncbn.sync.Local()
    assert len(data_parallel(layer, xs)) == 2
    layer.process_group = Two()
    assert len(data_parallel(layer.eval(), xs)) == 2


class Half(nn.Module):
    def forward(self, t):
        return t / 2


def test_a_parametrized_layer_whose_last_replicas_are_still_there():
    layer = syncbn.BatchNorm2d(3, dtype=torch.float64)
    for name in "weight", "bias":
        parametrize.register_parametrization(layer, name, Half())
    x = batch((4, 3, 2, 2))
    expected = copy.deepcopy(layer)(x)
    kept = replicate(layer.eval(), 2)
    assert len(kept) == 2
    assert_near(torch.cat(data_parallel(layer.train(), x.split(2))), expected)


def test_copies_and_pickles_after_a_step():
    model = syncbn.convert_model(net())
    before = pickle.loads(pickle.dumps(model.__getstate__()))
    data_parallel(model, batch((4, 3, 3, 3), torch.float32).split(2))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[1].process_group is None
        for (name, a), b in zip(
            model.state_dict().items(), twin.state_dict().values(), strict=True
        ):
            assert_same_bits(b, a, name)
        data_parallel(twin, batch((4, 3, 3, 3), torch.float32).split(2))
    assert before.keys() == model.__getstate__().keys()
    assert "process_group" not in model[1].__dict__
    with torch.no_grad():
        replica = replicate(model, 2)[0]
    assert copy.deepcopy(replica)[1].process_group is None


def test_results_repeat_bit_for_bit():
    def step():
        torch.manual_seed(0)
        model = syncbn.convert_model(net())
        xs = [x.requires_grad_() for x in batch((12, 3, 9, 9), torch.float32).split(3)]
        ys = data_parallel(model, xs)
        torch.cat(ys).square().sum().backward()
        return {**dict(enumerate(x.grad for x in xs)), **model.state_dict()}

    first = step()
    for _ in range(5):
        for name, value in step().items():
            assert_same_bits(value, first[name], name)


@pytest.mark.parametrize("per_replica", [1, 4])
def test_100_steps_of_sgd(per_replica):
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return torch.cat(data_parallel(self.module, x.chunk(2)))

    expected_model, xs = net(), batches(per_replica)
    model = syncbn.convert_model(copy.deepcopy(expected_model))
    assert_trains_as(expected_model, Wrapped(model), model, xs)


def test_1000_iterations_leave_nothing_behind():
    model = syncbn.convert_model(net())
    xs = batch((4, 3, 3, 3), torch.float32).split(2)

    def run(steps):
        for _ in range(steps):
            ys = data_parallel(model, xs)
            F.mse_loss(torch.cat(ys), torch.zeros(4, 3, 3, 3)).backward()

    def counts():
        gc.collect()
        files = len(os.listdir("/proc/self/fd"))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(gc.get_objects()), threading.active_count(), files, pages

    run(100)
    counts()  # the list of all objects, megabytes after other tests, stays with the allocator
    gc.disable()  # nothing may need the garbage collector
    try:
        objects, threads, files, pages = counts()
        run(1000)
        before_collection = len(gc.get_objects())
        after = counts()
    finally:
        gc.enable()
    assert before_collection - objects < 500
    assert after[0] - objects < 200
    assert after[1:3] == (threads, files)
    assert (after[3] - pages) * os.sysconf("SC_PAGE_SIZE") < 4 << 20
