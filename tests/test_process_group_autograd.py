"""Derivatives across ranks: numerical ones of the whole computation, and double backward."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import syncbn
from distributed import rank_device, run_ranks
from helpers import assert_near, batch, vector
from syncbn.functional import batchnorm2d_sync
from whole_batch import parts, rows, unrows

# The functions below turn two ranks' computation into one function that every rank evaluates in
# step: it takes the whole batch, the same on each rank, and returns the whole output. Each is the
# transpose of another.


class Take(torch.autograd.Function):
    """The whole batch -> this rank's rows."""

    @staticmethod
    def forward(ctx, whole, sizes):
        ctx.sizes = sizes
        return whole.split(sizes)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        return Give.apply(gradient, ctx.sizes), None


class Give(torch.autograd.Function):
    """This rank's rows -> the whole batch."""

    @staticmethod
    def forward(ctx, part, sizes):
        ctx.sizes = sizes
        whole = part.new_zeros(sum(sizes), *part.shape[1:])
        whole.split(sizes)[dist.get_rank()].copy_(part)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return Take.apply(gradient, ctx.sizes), None


class Share(torch.autograd.Function):
    """A parameter of all -> this rank's copy."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient)


class Sum(torch.autograd.Function):
    """Every rank's addend -> the sum."""

    @staticmethod
    def forward(ctx, value):
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return Share.apply(gradient)


def _check_derivatives(check, sizes, shape):
    def normalize(whole, weight, bias):
        part = Take.apply(whole, sizes)
        y = batchnorm2d_sync(part, Share.apply(weight), Share.apply(bias), None, None)
        return Give.apply(y, sizes)

    x = torch.randn(sum(sizes), *shape, dtype=torch.float64).to(rank_device()).requires_grad_()
    vectors = [vector(shape[0], device=x.device, seed=i).requires_grad_() for i in range(2)]
    return check(normalize, (x, *vectors))


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [0, 3], [1, 1]], ids=str)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_numerical_derivatives_on_two_ranks(check, shape, sizes):
    assert run_ranks(2, _check_derivatives, check, sizes, shape) == [True, True]


def penalty(layer, x):
    """A gradient penalty and a usual loss, and every gradient of their sum."""
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    (dx.square().sum() + layer(x).square().sum()).backward()
    return [x.grad, layer.weight.grad, layer.bias.grad]


def _penalty_on_this_rank(layer, xs, device):
    return penalty(syncbn.convert_model(layer).to(device), xs[dist.get_rank()].to(device))


@pytest.mark.parametrize(
    "shapes",
    [[(2, 5, 3, 4), (2, 5, 3, 4)], [(3, 5, 2, 2), (1, 5, 1, 3)], [(0, 5, 2, 2), (2, 5, 2, 2)]],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_double_backward_on_two_ranks_is_that_of_the_whole_batch(dtype, shapes, device):
    xs, _ = parts(shapes, dtype)
    layer = nn.BatchNorm1d(5, dtype=torch.float64)
    layer.weight.data, layer.bias.data = vector(5), vector(5, seed=1)
    ours = syncbn.SyncBatchNorm(5, dtype=dtype)
    ours.load_state_dict(layer.state_dict())
    results = run_ranks(2, _penalty_on_this_rank, ours, xs, device)
    dx, dweight, dbias = penalty(layer, torch.cat([rows(x.double()) for x in xs]))
    sizes = [x.numel() // 5 for x in xs]
    for result, part, x in zip(results, dx.split(sizes), xs, strict=True):
        assert_near(result[0], unrows(part, x), 10 * dx.abs().max(), dtype)
    for i, total in (1, dweight), (2, dbias):
        assert_near(sum(r[i].double() for r in results), total, 100 * total.abs().max(), dtype)


def _checkpointed(model, xs, reentrant):
    x = xs[dist.get_rank()].requires_grad_()
    for _ in range(2):
        y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        y.sin().sum().backward()
    return [x.grad, *model.state_dict().values(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_on_two_ranks(reentrant):
    xs, _ = parts([(3, 5, 2, 2), (1, 5, 2, 2)])
    model = nn.Sequential(nn.Conv2d(5, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))
    model = syncbn.convert_model(model.double())
    plain = run_ranks(2, _checkpointed, copy.deepcopy(model), xs, None)
    for actual, expected in zip(
        run_ranks(2, _checkpointed, model, xs, reentrant), plain, strict=True
    ):
        for a, b in zip(actual, expected, strict=True):
            assert_near(a.double(), b.double(), 10.0)


def _some_outputs_unused(xs):
    """Rank 0's loss ignores what the layer gave; its backward runs all the same, with zeros."""
    x = xs[dist.get_rank()].requires_grad_()
    layer = syncbn.SyncBatchNorm(5).to(x)
    y = layer(x)
    (y.sin().sum() * dist.get_rank()).backward()
    return x.grad


def test_a_rank_whose_loss_is_zero_gets_its_share_of_the_gradient():
    xs, _ = parts([(2, 5), (3, 5)])
    whole = torch.cat(xs).requires_grad_()
    y = nn.BatchNorm1d(5).double()(whole)
    y[2:].sin().sum().backward()
    for actual, expected in zip(
        run_ranks(2, _some_outputs_unused, xs), whole.grad.split([2, 3]), strict=True
    ):
        assert_near(actual, expected)
        assert actual.abs().max() > 0


def _gradients_of_the_weights_gradient(xs, weight):
    """Only rank 0 asks for the gradient of its x."""
    rank = dist.get_rank()
    x = xs[rank].detach().requires_grad_(rank == 0)
    weight = weight.detach().requires_grad_()
    y = batchnorm2d_sync(x, weight, None, None, None)
    (dweight,) = torch.autograd.grad(y.pow(3).sum(), weight, create_graph=True)
    dweight.sin().sum().backward()
    return x.grad, weight.grad


def test_double_backward_where_one_rank_needs_no_gradient_of_x():
    """The other one waits for it all the same."""
    xs, _ = parts([(3, 5, 2, 2), (2, 5, 2, 2)])
    weight = vector(5)
    (dx, first), (nothing, second) = run_ranks(2, _gradients_of_the_weights_gradient, xs, weight)
    assert nothing is None
    leaves = [x.clone().requires_grad_() for x in xs]
    weight = weight.requires_grad_()
    y = nn.functional.batch_norm(torch.cat(leaves), None, None, weight, None, True)
    # Each rank's gradient of the weight is its addend of the whole one.
    addends = [
        torch.autograd.grad(part.pow(3).sum(), weight, create_graph=True)[0]
        for part in y.split([3, 2])
    ]
    sum(d.sin().sum() for d in addends).backward()
    assert_near(dx, leaves[0].grad, 1e3)
    assert_near(first + second, weight.grad, 1e3)


def _empty_everywhere(x, weight):
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = batchnorm2d_sync(x, weight, None, None, None)
    gradients = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
    sum(g.sum() for g in gradients).backward()
    return weight.grad


def test_double_backward_of_no_values_at_all():
    for dweight in run_ranks(2, _empty_everywhere, torch.zeros(0, 5, 2), vector(5)):
        assert dweight.tolist() == [0] * 5


def _batches_of_gradients(x):
    x = x.requires_grad_()
    y = batchnorm2d_sync(x, None, None, None, None)
    (dx,) = torch.autograd.grad(y, x, x.detach(), create_graph=True)
    dys = torch.ones(2, *x.shape).to(x)
    errors = []
    for output in y, dx:
        for create_graph in False, True:
            gradient = partial(
                torch.autograd.grad, output, x, retain_graph=True, create_graph=create_graph
            )
            for batched in partial(gradient, is_grads_batched=True), torch.vmap(gradient):
                try:
                    batched(dys)
                except RuntimeError as error:
                    errors.append(str(error))
    return errors


def test_a_batch_of_gradients_is_refused():
    expected = "batchnorm2d_sync: expected one gradient at a time with several"
    for errors in run_ranks(2, _batches_of_gradients, batch((4, 3))):
        assert len(errors) == 8
        assert [error[:62] for error in errors] == [expected] * 8
