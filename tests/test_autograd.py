"""Derivatives on one rank: numerical, double, and where autograd is used in unusual ways."""

import copy
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import syncbn
from helpers import LAYOUTS, assert_near, assert_same_bits, batch, vector
from syncbn.functional import batchnorm2d_sync

SHAPES = [(4, 3), (2, 3, 2), (2, 2, 2, 2), (0, 3, 2, 2)]


def inputs(shape, layout, device, absent=()):
    x = batch(shape, layout=layout, device=device).requires_grad_()
    vectors = [vector(shape[1], device=device, seed=i).requires_grad_() for i in range(2)]
    return x, *(None if name in absent else v for name, v in zip("wb", vectors, strict=True))


def normalize(x, weight, bias):
    return batchnorm2d_sync(x, weight, bias, None, None)


@pytest.mark.parametrize("absent", ["", "w", "b", "wb"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradcheck(shape, layout, absent, device):
    assert gradcheck(normalize, inputs(shape, layout, device, absent))


@pytest.mark.parametrize("absent", ["", "w", "b", "wb"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_gradgradcheck(shape, absent, device):
    arguments = inputs(shape, "contiguous", device, absent)
    assert gradgradcheck(normalize, arguments, gen_non_contig_grad_outputs=True)


def test_gradgradcheck_of_a_strided_input(device):
    """The copy that the kernels work on is part of the graph."""
    x = batch((2, 5, 2, 4), device=device).requires_grad_()
    weight, bias = (vector(6, device=device, seed=i).requires_grad_() for i in range(2))

    def of_slices(x, weight, bias):
        return normalize(x[:, 1:4, :, ::2], weight[::2], bias[1::2])

    assert gradcheck(of_slices, (x, weight, bias))
    assert gradgradcheck(of_slices, (x, weight, bias))


def penalty(layer, x):
    """A gradient penalty, as in WGAN-GP, and every gradient of it."""
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    (dx.square().sum() + layer(x).square().sum()).backward()
    return {"dx": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_double_backward_equals_batch_norm(dtype, layout, device):
    stock = torch.nn.BatchNorm2d(3, dtype=torch.float64)
    stock.weight.data, stock.bias.data = vector(3), vector(3, seed=1)
    ours = syncbn.convert_model(copy.deepcopy(stock)).to(dtype).to(device)
    x = batch((4, 3, 5, 5), dtype, layout)
    expected = penalty(stock, x.double().contiguous())
    for name, value in penalty(ours, x.to(device)).items():
        assert_near(value, expected[name], 10 * expected[name].abs().max(), dtype, name)


def test_third_derivative_of_a_gradient(device):
    """create_graph all the way: the formulas that backward runs are differentiable themselves."""
    x, weight, bias = inputs((3, 2, 2), "contiguous", device)

    def first_gradient(x, weight, bias):
        y = normalize(x, weight, bias).sin().sum()
        return torch.autograd.grad(y, (x, weight, bias), create_graph=True)

    assert gradgradcheck(first_gradient, (x, weight, bias))


def test_gradients_with_create_graph_are_the_ones_without(device):
    x, weight, bias = inputs((4, 3, 5, 5), "contiguous", device)
    dy = batch(x.shape, device=device, seed=1)
    leaves = x, weight, bias
    with_graph = torch.autograd.grad(normalize(*leaves), leaves, dy, create_graph=True)
    without = torch.autograd.grad(normalize(*leaves), leaves, dy)
    for a, b in zip(with_graph, without, strict=True):
        assert_near(a, b, 10.0)


def test_double_backward_without_variance_and_eps(device):
    """invstd is 0 there: no NaN may come out of a branch that is not taken."""
    x = torch.full((4, 3), 2.0, dtype=torch.float64, device=device, requires_grad=True)
    weight = vector(3, device=device).requires_grad_()
    y = batchnorm2d_sync(x, weight, None, None, None, eps=0.0)
    (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    dx.sum().backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_two_backward_passes_of_one_graph(device):
    leaves = inputs((4, 3, 5, 5), "contiguous", device)
    dy = batch((4, 3, 5, 5), device=device, seed=1)
    y = normalize(*leaves)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    second = torch.autograd.grad(y, leaves, dy)
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


def test_inputs_are_left_as_they_were(device):
    leaves = inputs((4, 3, 5, 5), "contiguous", device)
    before = [t.detach().clone() for t in leaves]
    dy = batch((4, 3, 5, 5), device=device, seed=1)
    old_dy = dy.clone()
    normalize(*leaves).backward(dy)
    for t, old in zip((*leaves, dy), (*before, old_dy), strict=True):
        assert_same_bits(t, old)


@pytest.mark.parametrize("make", [torch.nn.BatchNorm2d, syncbn.BatchNorm2d])
def test_backward_refuses_an_input_that_changed(make, device):
    layer = make(3, device=device)
    x = batch((4, 3, 5, 5), torch.float32, device=device).requires_grad_() * 1
    y = layer(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_of_eval_refuses_statistics_that_training_moved(device):
    layer = syncbn.BatchNorm2d(3, device=device)
    x = batch((4, 3, 5, 5), torch.float32, device=device).requires_grad_()
    y = layer.eval()(x)
    layer.train()(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_versions_of_the_statistics_count_training_steps(device):
    layer = syncbn.BatchNorm2d(3, device=device)
    buffers = dict(layer.named_buffers())
    before = {name: b._version for name, b in buffers.items()}
    layer(batch((4, 3, 5, 5), torch.float32, device=device))
    assert len(buffers) == 3
    assert all(b._version > before[name] for name, b in buffers.items())


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_a_batch_once(reentrant, momentum, device):
    def model():
        torch.manual_seed(0)
        layers = torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4, momentum=momentum)
        return syncbn.convert_model(torch.nn.Sequential(*layers).double()).to(device)

    plain, checkpointed = model(), model()
    x = batch((4, 3, 5, 5), device=device)
    results = []
    for m, run in (
        (plain, lambda m, x: m(x)),
        (
            checkpointed,
            lambda m, x: checkpoint(m, x, use_reentrant=reentrant),
        ),
    ):
        leaf = x.clone().requires_grad_()
        for _ in range(3):
            run(m, leaf).sin().sum().backward()
        results.append(leaf.grad)
    assert_near(results[1], results[0])
    for (name, a), b in zip(
        checkpointed.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert_same_bits(a, b, name)
    assert checkpointed[1].num_batches_tracked == 3
    for a, b in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert_near(a.grad, b.grad, 10.0)


def test_without_grad_mode(device):
    layer, stock = syncbn.BatchNorm2d(3, device=device), torch.nn.BatchNorm2d(3, device=device)
    x = batch((4, 3, 5, 5), torch.float32, device=device).requires_grad_()
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            y = layer(x)
            assert_near(y, stock(x).double())
        assert not y.requires_grad
    assert layer.num_batches_tracked == 2


def test_a_layer_made_in_inference_mode(device):
    with torch.inference_mode():
        layer, stock = syncbn.BatchNorm2d(3, device=device), torch.nn.BatchNorm2d(3, device=device)
        x = batch((4, 3, 5, 5), torch.float32, device=device)
        assert_near(layer(x), stock(x).double())
        assert_near(layer.running_var, stock.running_var.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype, device):
    """A half input meets float32 parameters, as behind a convolution."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).to(device)
    ours = syncbn.convert_model(copy.deepcopy(model))
    x = batch((4, 3, 5, 5), torch.float32, device=device)
    with torch.autocast(device.type, dtype):
        y, expected = ours(x), model(x)
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert ours[1].weight.grad.dtype == torch.float32
    assert_near(y, expected.double(), 1000 if dtype == torch.bfloat16 else 100)


def test_an_activation_that_works_in_place_behind_the_layer(device):
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.ReLU(inplace=True)).double()
    ours = syncbn.convert_model(copy.deepcopy(model)).to(device)
    x = batch((4, 3, 5, 5))
    a, b = x.clone().requires_grad_(), x.to(device).requires_grad_()
    model(a).square().sum().backward()
    ours(b).square().sum().backward()
    assert_near(b.grad, a.grad, 10.0)


@pytest.mark.parametrize("absent", ["", "w", "wb"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_of_gradients(shape, absent, replicas):
    """``is_grads_batched=True``, as of ``jacobian(vectorize=True)``, ``torch.vmap``, and one after
    another."""
    x, weight, bias = inputs(shape, "contiguous", "cpu", absent)
    layer = syncbn.SyncBatchNorm(shape[1], dtype=torch.float64)
    layer.weight, layer.bias = (
        None if v is None else torch.nn.Parameter(v.detach()) for v in (weight, bias)
    )
    if replicas == 1:
        y = layer(x)
    else:
        net = syncbn.ModelDataParallel(layer, ["cpu"] * 2)
        y = torch.cat(net(syncbn.scatter(x, net.devices)))
    wanted = [x, *layer.parameters()]
    dys = batch((3, *shape), seed=5)
    each = [torch.autograd.grad(y, wanted, dy, retain_graph=True) for dy in dys]

    def gradients_of(dy, create_graph=False):
        return torch.autograd.grad(y, wanted, dy, retain_graph=True, create_graph=create_graph)

    mapped = torch.vmap(gradients_of)(dys)
    differentiable = torch.vmap(partial(gradients_of, create_graph=True))(dys)
    together = torch.autograd.grad(y, wanted, dys, is_grads_batched=True)
    for found in together, mapped, differentiable:
        for i, gradient in enumerate(found):
            assert found is differentiable or not gradient.requires_grad
            expected = torch.stack([gradients[i] for gradients in each])
            assert_near(gradient.detach(), expected, 100.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_gradients_in_evaluation(layout):
    x = batch((4, 3, 2, 2), layout=layout).requires_grad_()
    y = syncbn.BatchNorm2d(3, dtype=torch.float64).eval()(x)
    dys = batch((3, *x.shape), seed=5)
    expected = torch.stack([torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in dys])
    mapped = torch.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(dys)
    assert_near(mapped, expected, 10.0)
    (together,) = torch.autograd.grad(y, x, dys, is_grads_batched=True)
    assert_near(together, expected, 10.0)


def test_jacobians_and_hessians_by_vectors():
    layer = syncbn.BatchNorm1d(3, dtype=torch.float64)
    x = batch((4, 3))
    functional = torch.autograd.functional
    assert_near(functional.jacobian(layer, x, vectorize=True), functional.jacobian(layer, x), 100.0)

    def loss(x):
        return layer(x).pow(3).sum()

    assert_near(functional.hessian(loss, x, vectorize=True), functional.hessian(loss, x), 1e4)
