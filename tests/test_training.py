"""Two ranks train as one nn.BatchNorm on the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from distributed import run_ranks

STEPS = 100


def net():
    """conv-BN-ReLU-conv-BN."""
    torch.manual_seed(123)
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1, 1, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 3, 1, 1, bias=False),
        nn.BatchNorm2d(3),
    )
    for m in model:
        if isinstance(m, nn.Conv2d):
            nn.init.normal_(m.weight, 0, (2 / 3) ** 0.5)
    return model


def batches(per_rank):
    torch.manual_seed(123)
    return [torch.rand(2 * per_rank, 3, 2, 2) for _ in range(STEPS)]


def train(model, xs, lr):
    torch.backends.cudnn.allow_tf32 = False
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for x in xs:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).mean((1, 2, 3)), torch.ones(len(x), device=x.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def outcome(model):
    state = {f"grad of {name}": p.grad for name, p in model.named_parameters()}
    return state | dict(model.state_dict())


def assert_trains_as(expected_model, parallel, model, xs):
    """``parallel``, which runs ``model``: losses, last gradients and state within 1e-5."""
    losses = train(parallel, xs, 1e-3)
    torch.testing.assert_close(losses, train(expected_model, xs, 1e-3), rtol=1e-5, atol=1e-5)
    expected = outcome(expected_model)
    assert len(expected) == 6 + 12
    for name, value in outcome(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def _train_on_this_rank(model, xs, lr, convert, device):
    rank = dist.get_rank()
    model = (syncbn.convert_model(model) if convert else model).to(device)
    xs = [x.chunk(2)[rank].to(device) for x in xs]
    losses = train(DistributedDataParallel(model), xs, lr)
    return losses, outcome(model)


@pytest.mark.parametrize("lr", [1e-3, 1e-1])
@pytest.mark.parametrize("per_rank", [1, 4])
def test_100_steps_of_sgd_on_two_ranks_equal_one_process(per_rank, lr, device):
    model, xs = net(), batches(per_rank)
    results = run_ranks(2, _train_on_this_rank, copy.deepcopy(model), xs, lr, True, device)
    losses = train(model.to(device), [x.to(device) for x in xs], lr).cpu()
    expected = {name: value.cpu() for name, value in outcome(model).items()}
    torch.testing.assert_close((results[0][0] + results[1][0]) / 2, losses, rtol=1e-5, atol=1e-5)
    assert len(expected) == 6 + 12
    for _, actual in results:
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_the_comparison_would_notice_local_statistics(device):
    model, xs = net(), batches(1)
    _, local = run_ranks(2, _train_on_this_rank, copy.deepcopy(model), xs, 1e-3, False, device)[0]
    train(model, xs, 1e-3)
    off = [(local[name] - value).abs().max() for name, value in outcome(model).items()]
    assert max(off) > 1e-2
