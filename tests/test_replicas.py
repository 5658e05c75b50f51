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
from torch.utils.checkpoint import checkpoint

import syncbn
from helpers import assert_near, assert_same_bits, batch, vector
from replication import data_parallel, parallel_apply, replicate
from test_training import batches, net, outcome, train
from whole_batch import assert_part, parts, run_whole


def local_and_synchronized(model):
    """``model`` with PyTorch's layers, and a copy with ours; in float64."""
    model = model.double()
    return model, syncbn.convert_model(copy.deepcopy(model))


def assert_same_training(expected, actual):
    for (name, a), b in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert_near(b.grad, a.grad, 1.0 + a.grad.abs().max(), message=f"gradient of {name}")
    for (name, a), b in zip(expected.named_buffers(), actual.buffers(), strict=True):
        if a.dtype == torch.int64:
            assert_same_bits(b, a, name)
        else:
            assert_near(b, a, 1.0 + a.abs().max(), message=name)


def compare_a_step(reference, model, xs, run=data_parallel):
    """Outputs, gradients of inputs and parameters, and buffers of a step, against one batch."""
    xs = [x.detach().requires_grad_() for x in xs]
    whole = torch.cat([x.detach() for x in xs]).requires_grad_()
    expected = reference(whole)
    dy = batch(expected.shape, seed=99)
    for m in (reference, model):
        m.zero_grad()
    expected.backward(dy)
    ys = run(model, xs)
    torch.autograd.backward(ys, list(dy.split([len(x) for x in xs])))
    assert_near(torch.cat([y.detach() for y in ys]), expected, message="y")
    assert_near(torch.cat([x.grad for x in xs]), whole.grad, 10.0, message="dx")
    assert_same_training(reference, model)


@pytest.mark.parametrize("rows", [[2, 2], [1, 3], [1] * 8, [3, 1, 2, 5]], ids=str)
def test_a_layer_equals_one_layer_on_the_whole_batch(rows):  # cases 16 and 17
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


@pytest.mark.parametrize("used", [[0], [1], [1, 2]], ids=str)
def test_a_loss_that_uses_some_outputs_reaches_all_inputs(used):
    xs, dys = parts([(2, 5, 4, 3)] * 3)
    dys = [dy if i in used else torch.zeros_like(dy) for i, dy in enumerate(dys)]
    layer = syncbn.BatchNorm2d(5, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = data_parallel(layer, leaves)
    torch.autograd.backward([ys[i] for i in used], [dys[i] for i in used])
    for x, e in zip(leaves, run_whole(xs, dys, layer.weight, layer.bias), strict=True):
        assert_near(x.grad, e["dx"], e["sizes"]["dx"])


def test_two_backward_passes_through_one_graph_do_not_mix():
    xs, dys = parts([(2, 5, 4, 3)] * 2)
    layer = syncbn.BatchNorm2d(5, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = data_parallel(layer, leaves)
    # The first pass reduces dy of replica 0 and never comes to its dx.
    torch.autograd.grad(ys[0], layer.weight, dys[0], retain_graph=True)
    actual = torch.autograd.grad(ys[1], leaves, dys[1])
    dys[0] = torch.zeros_like(dys[0])
    for dx, e in zip(actual, run_whole(xs, dys), strict=True):
        assert_near(dx, e["dx"], e["sizes"]["dx"])


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
def test_inputs_that_need_no_gradient(needs):
    xs, dys = parts([(2, 5, 4, 3)] * 2)
    layer = syncbn.BatchNorm2d(5, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(need) for x, need in zip(xs, needs, strict=True)]
    torch.autograd.backward(data_parallel(layer, leaves), dys)
    expected = run_whole(xs, dys, layer.weight, layer.bias)
    for x, e, need in zip(leaves, expected, needs, strict=True):
        assert (x.grad is not None) == need
        if need:
            assert_near(x.grad, e["dx"], e["sizes"]["dx"])
    assert_near(layer.weight.grad, sum(e["dweight"] for e in expected), 100.0)


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


def test_layers_called_directly_are_plain():  # case 18
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


class Checkpointed(nn.Module):
    def __init__(self, times=1, use_reentrant=False):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.times, self.use_reentrant = times, use_reentrant
        self.on = True

    def block(self, x):
        x = self.conv(x)
        for _ in range(self.times):
            x = self.norm(x)
        return torch.relu(x)

    def forward(self, x):
        if not self.on:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


def test_activation_checkpointing():  # case 20
    reference, model = local_and_synchronized(nn.Sequential(Checkpointed(), Checkpointed()))
    reference[0].on = reference[1].on = False
    for seed in range(3):
        compare_a_step(reference, model, batch((6, 3, 3, 3), seed=seed).split([1, 2, 3]))


def test_recomputation_leaves_the_replicas_usable():
    _, model = local_and_synchronized(Checkpointed())
    xs = [x.requires_grad_() for x in batch((4, 3, 3, 3)).split(2)]
    replicas = replicate(model, 2)
    torch.cat(parallel_apply(replicas, xs)).sum().backward()
    with torch.no_grad():
        assert len(parallel_apply(replicas, xs)) == 2
    assert model.norm.num_batches_tracked == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_around_all_replicas(use_reentrant):
    reference, model = local_and_synchronized(net())

    def run(module, xs):
        def forward(*xs):
            return tuple(data_parallel(module, list(xs)))

        return checkpoint(forward, *xs, use_reentrant=use_reentrant)

    compare_a_step(reference, model, batch((5, 3, 3, 3)).split([2, 3]), run)


class Two(syncbn.sync.Exchange):
    size = 2

    def all_reduce(self, values):
        return values


def test_replicas_and_a_process_group_are_not_mixed():
    xs = batch((4, 3, 3, 3)).split(2)
    layer = syncbn.BatchNorm2d(3, process_group=Two()).double()
    with pytest.raises(RuntimeError, match="cannot share one mini-batch: expected one replica"):
        data_parallel(layer, xs)
    layer.process_group = syncbn.sync.Local()
    assert len(data_parallel(layer, xs)) == 2
    layer.process_group = Two()
    assert len(data_parallel(layer.eval(), xs)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": 2}, "called once per forward, got 2"),
        ({"use_reentrant": True}, "use_reentrant=F"),
    ],
)
def test_checkpointing_that_cannot_work_says_so(options, message):
    _, model = local_and_synchronized(Checkpointed(**options))
    xs = [x.requires_grad_() for x in batch((4, 3, 3, 3)).split(2)]
    ys = data_parallel(model, xs)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])


@pytest.mark.parametrize("affine", [True, False])
def test_gradient_penalty(affine):
    """A loss of gradients and outputs, with respect to inputs and parameters."""
    norm = nn.BatchNorm2d(4, affine=affine)
    reference, model = local_and_synchronized(nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.Tanh()))
    xs = [x.requires_grad_() for x in batch((5, 3, 2, 2)).split([2, 3])]
    whole = torch.cat([x.detach() for x in xs]).requires_grad_()

    def loss(y, inputs):
        gradients = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        return torch.cat(gradients).square().sum() + y.pow(3).sum()

    loss(torch.cat(data_parallel(model, xs)), xs).backward()
    loss(reference(whole), [whole]).backward()
    size = whole.grad.abs().max()
    assert_near(torch.cat([x.grad for x in xs]), whole.grad, 100 * size)
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert_near(q.grad, p.grad, 1000 * size, message=name)


def test_second_derivatives_pass_gradgradcheck():
    layer = syncbn.BatchNorm1d(2).double()
    xs = [x.requires_grad_() for x in batch((5, 2)).split([2, 3])]

    def run(*xs):
        layer.reset_running_stats()
        return tuple(data_parallel(layer, list(xs)))

    assert torch.autograd.gradcheck(run, xs)
    assert torch.autograd.gradgradcheck(run, xs)


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
def test_the_first_seeds_100_steps(per_replica):
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return torch.cat(data_parallel(self.module, x.chunk(2)))

    expected_model, xs = net(), batches(per_replica)
    model = syncbn.convert_model(copy.deepcopy(expected_model))
    losses = train(Wrapped(model), xs, 1e-3)
    expected_losses = train(expected_model, xs, 1e-3)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    expected = outcome(expected_model)
    assert len(expected) == 6 + 12
    for name, value in outcome(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_1000_iterations_leave_nothing_behind():  # case 29
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


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_data_parallel_on_two_gpus():
    torch.backends.cudnn.allow_tf32 = False
    expected_model, xs = net().cuda(), [x.cuda() for x in batches(4)]
    model = syncbn.convert_model(copy.deepcopy(expected_model))
    losses = train(nn.DataParallel(model, [0, 1]), xs, 1e-3)
    torch.testing.assert_close(losses, train(expected_model, xs, 1e-3), rtol=1e-5, atol=1e-5)
    expected = outcome(expected_model)
    for name, value in outcome(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)
