"""Replicas in threads and autograd: partial losses, checkpointing, second derivatives."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncbn
from helpers import assert_near, batch
from replication import (
    compare_a_step,
    data_parallel,
    local_and_synchronized,
    parallel_apply,
    replicate,
)
from test_training import net
from whole_batch import parts, run_whole


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


def test_activation_checkpointing():
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


def test_concurrent_backward_passes_do_not_mix():
    xs, dys = parts([(2, 5, 4, 3)] * 2)
    _, others = parts([(2, 5, 4, 3)] * 2, seed=7)
    layer = syncbn.BatchNorm2d(5, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = data_parallel(layer, leaves)
    both = threading.Barrier(2)
    for y in ys:
        y.register_hook(lambda dy: (both.wait(30), None)[1])  # the passes go in step
    gradients = {}

    def differentiate(name, dys):
        gradients[name] = torch.autograd.grad(ys, leaves, dys, retain_graph=True)

    passes = {"one": dys, "other": others}
    threads = [threading.Thread(target=differentiate, args=item) for item in passes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, dys in passes.items():
        for dx, e in zip(gradients[name], run_whole(xs, dys), strict=True):
            assert_near(dx, e["dx"], e["sizes"]["dx"])


def test_gradients_that_arrive_as_copies_are_an_error():
    """Not 0 in place of a dy that was lost on its way."""
    xs, _ = parts([(2, 5, 4, 3)] * 2)
    layer = syncbn.BatchNorm2d(5, dtype=torch.float64)
    y, _ = data_parallel(layer, [x.clone().requires_grad_() for x in xs])
    links = [edge for edge, _ in y.grad_fn.next_functions if "Join" in type(edge).__name__]
    links[0].register_prehook(
        lambda gradients: tuple(g if g is None else g.clone() for g in gradients)
    )
    with pytest.raises(RuntimeError, match="expected autograd's own engine under replicas"):
        y.sum().backward()
