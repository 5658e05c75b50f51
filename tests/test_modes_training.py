"""Ways to train on two ranks: DDP and its options, accumulation, checkpoints, penalties."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import syncbn
from compiled import assert_same_training, batches, network, train
from distributed import rank_device, run_ranks
from helpers import assert_near, assert_same_bits, batch


def whole_batches(*sizes):
    """Both ranks' batches, in float64."""
    pairs = zip(batches(*sizes, rank=0), batches(*sizes, rank=1), strict=True)
    return [torch.cat(pair).double() for pair in pairs]


def stock_network():
    return syncbn.revert_model(network()).double()


def loss_of(y):
    """Summed, so that two ranks' losses add up to one device's whatever the sizes are."""
    return y.double().square().sum() + y.double().sin().sum()


def named_gradients(model):
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


# ---- DistributedDataParallel: gradients are the mean over ranks


def _accumulate():
    model = network()
    ddp = DistributedDataParallel(model)
    first, second = batches(3, 4)
    with ddp.no_sync():
        loss_of(ddp(first)).backward()
    loss_of(ddp(second)).backward()
    return named_gradients(model)


def test_accumulation_with_no_sync():
    stock = stock_network()
    for x in whole_batches(3, 4):
        loss_of(stock(x)).backward()
    for result in run_ranks(2, _accumulate):
        for name, gradient in named_gradients(stock).items():
            scale = 1e2 * max(1.0, float(gradient.abs().max()))
            assert_near(result[name], gradient / 2, scale, message=name)


class TwoHeads(nn.Module):
    """The second head, with a layer of its own, runs on request."""

    def __init__(self):
        super().__init__()
        self.body = network()
        self.head = syncbn.BatchNorm2d(4, device=rank_device())

    def forward(self, x, second):
        y = self.body(x)
        return self.head(y) if second else y


def _with_unused_parameters():
    model = TwoHeads()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for i, x in enumerate(batches(3, 4, 5)):
        ddp.zero_grad()
        loss_of(ddp(x, i == 1)).backward()
    return named_gradients(model.body)


def test_find_unused_parameters():
    a, b = run_ranks(2, _with_unused_parameters)
    for name, gradient in a.items():
        assert gradient.abs().max() > 0
        assert_same_bits(gradient, b[name], name)


def _with_options(**options):
    model = network()
    ddp = DistributedDataParallel(model, **options)
    return train(ddp, model, batches(3, 4, 5))


def _compare_options(**options):
    assert_same_training(_with_options(**options), _with_options())


@pytest.mark.parametrize("options", [["static_graph"], ["gradient_as_bucket_view"]], ids=str)
def test_options_of_ddp(options):
    run_ranks(2, _compare_with_plain_ddp, options)


def _compare_with_plain_ddp(options):
    _compare_options(**dict.fromkeys(options, True))


def _static_graph_with_checkpoints():
    """The reentrant form, which DDP takes with a static graph alone."""
    model = network()
    ddp = DistributedDataParallel(Checkpointed(model, True), static_graph=True)
    assert_same_training(train(ddp, model, batches(3, 4, 5)), _with_options())


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=self.reentrant)


def test_static_graph_with_reentrant_checkpoints():
    run_ranks(2, _static_graph_with_checkpoints)


def _checkpoint_in_ddp():
    model = network()
    ddp = DistributedDataParallel(Checkpointed(model, False))
    assert_same_training(train(ddp, model, batches(3, 4, 5)), _with_options())
    assert model[1].num_batches_tracked == 3


def test_checkpoints_inside_ddp():
    run_ranks(2, _checkpoint_in_ddp)


def _two_forwards_before_a_backward(broadcast_buffers):
    model = network()
    ddp = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
    first, second = batches(3, 4)
    loss = loss_of(ddp(first))
    (loss + loss_of(ddp(second))).backward()
    return named_gradients(model), dict(model.named_buffers())


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_two_forwards_before_one_backward(broadcast_buffers):
    """As a GAN's discriminator does; torch#13402, #22095: the second forward broadcasts buffers."""
    stock = stock_network()
    sum(loss_of(stock(x)) for x in whole_batches(3, 4)).backward()
    for gradients, buffers in run_ranks(2, _two_forwards_before_a_backward, broadcast_buffers):
        for name, gradient in named_gradients(stock).items():
            scale = 1e2 * max(1.0, float(gradient.abs().max()))
            assert_near(gradients[name], gradient / 2, scale, message=name)
        for name, value in stock.named_buffers():
            assert_near(buffers[name].float(), value.double(), 10.0, message=name)


def _join(**options):
    """Rank 1 has one batch more. Returns the error."""
    ddp = DistributedDataParallel(network())
    steps = 0
    try:
        with ddp.join(**options):
            for x in batches(*[4] * (1 + dist.get_rank())):
                loss_of(ddp(x)).backward()
                steps += 1
    except RuntimeError as error:
        return steps, str(error)


def test_join_is_an_error_on_every_rank():
    for steps, error in run_ranks(2, _join):
        assert steps == 0
        assert "throw_on_early_termination" in error


def _join_that_throws():
    return _join(throw_on_early_termination=True)


def test_join_that_throws_ends_every_rank():
    for steps, error in run_ranks(2, _join_that_throws):
        assert steps == 1
        assert "exhausted" in error


# ---- selective checkpointing

OPS = ["syncbn.statistics", "syncbn.normalize", "_c10d_functional.all_reduce"]


def _checkpoint_selectively(saved):
    seen = set()

    def policy(_context, op, *_args, **_kwargs):
        name = str(op).removesuffix(".default")
        seen.add(name)
        save = name in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    (x,) = batches(4)
    results = []
    for options in {}, {"context_fn": partial(create_selective_checkpoint_contexts, policy)}:
        model, leaf = network(), x.clone().requires_grad_()
        checkpoint(model, leaf, use_reentrant=False, **options).square().sum().backward()
        results.append([leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    assert seen.issuperset(OPS)


@pytest.mark.parametrize("saved", [[], *([op] for op in OPS), OPS], ids=str)
def test_selective_checkpointing(saved):
    """Whether a policy saves what the ops and the collective return or computes it again."""
    run_ranks(2, _checkpoint_selectively, saved)


# ---- a gradient penalty


def critic():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6 * 6, 1)
    ).double()


def wgan_gp_step(model, real, fake, mix):
    """One step of the critic: Gulrajani et al., "Improved Training of Wasserstein GANs", 2017."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().sum()
    (model(fake).sum() - model(real).sum() + 10 * penalty).backward()


def _wgan_gp(real, fake, mix):
    rank = dist.get_rank()
    model = syncbn.convert_model(critic()).to(real.device)
    wgan_gp_step(model, *(t.split([3, 5])[rank] for t in (real, fake, mix)))
    return named_gradients(model)


def test_a_wgan_gp_step():
    real, fake = (batch((8, 3, 8, 8), seed=i) for i in range(2))
    mix = torch.rand(8, 1, 1, 1, dtype=torch.float64)
    stock = critic()
    wgan_gp_step(stock, real, fake, mix)
    a, b = run_ranks(2, _wgan_gp, real, fake, mix)
    for name, gradient in named_gradients(stock).items():
        assert_near(a[name] + b[name], gradient, 1e2 * max(1.0, float(gradient.abs().max())))
