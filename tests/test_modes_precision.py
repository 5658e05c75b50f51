"""Mixed precision on two ranks: autocast with a scaler, models in half, FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import syncbn
from compiled import batches, network
from distributed import not_over_gloo_on_a_gpu, rank_device, run_ranks
from helpers import assert_same_bits, batch


def _amp(dtype):
    """Autocast with GradScaler: finite, equal on both ranks, and near the step in float32."""
    results = []
    on = rank_device().type
    for autocast in dtype, None:
        model = network()
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler(on, init_scale=256.0, enabled=autocast is not None)
        for x in batches(4, 4):
            optimizer.zero_grad()
            with torch.autocast(on, autocast, enabled=autocast is not None):
                loss = ddp(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append({name: v.detach().double() for name, v in model.state_dict().items()})
    mixed, single = results
    for name, value in single.items():
        assert (mixed[name] - value).abs().max() < 0.05 * max(1.0, float(value.abs().max())), name
    return mixed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_with_a_scaler(dtype):
    a, b = run_ranks(2, _amp, dtype)
    for name, value in a.items():
        assert_same_bits(value, b[name], name)
    assert a["1.num_batches_tracked"] == 2


def _half(dtype, xs, dys):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    model = syncbn.convert_model(model).to(rank_device(), dtype)
    x = xs[dist.get_rank()].to(dtype).requires_grad_()
    y = model(x)
    y.backward(dys[dist.get_rank()].to(dtype))
    return y, x.grad, model[0].running_var


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_of_half(dtype):
    """All parameters and statistics in half: ``.half()``, ``.bfloat16()``."""
    xs, dys = ([batch((n, 3, 5, 5), seed=seed + n) for n in (3, 5)] for seed in (0, 10))
    xs, dys = ([t.to(dtype).double() for t in ts] for ts in (xs, dys))
    stock = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3)).double()
    x = torch.cat(xs).requires_grad_()
    y = stock(x)
    y.backward(torch.cat(dys))
    tolerance = 2 * torch.finfo(dtype).eps
    for result, y_, dx in zip(
        run_ranks(2, _half, dtype, xs, dys), y.split([3, 5]), x.grad.split([3, 5]), strict=True
    ):
        for actual, expected in zip(result, (y_, dx, stock[0].running_var), strict=True):
            assert actual.dtype == dtype
            error = (actual.double() - expected).abs().max()
            assert error <= tolerance * expected.abs().max()


def _shard(mixed):
    model, plain = network(), network()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else None
    # By default it is one of GPUs where there are some, whatever the backend.
    mesh = init_device_mesh(rank_device().type, (2,))
    options = {"mesh": mesh, **({"mp_policy": policy} if mixed else {})}
    for m in model[1], model[3]:
        fully_shard(m, **options)
    fully_shard(model, **options)
    inputs = batches(4, 4)
    ddp = DistributedDataParallel(plain)
    losses = []
    for forward, m in (model, model), (ddp, plain):
        optimizer = torch.optim.SGD(m.parameters(), 0.01)
        for x in inputs:
            optimizer.zero_grad()
            loss = forward(x).float().square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss)
    tolerance = 0.02 if mixed else 1e-5
    for (name, v), other in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        v = v.full_tensor() if hasattr(v, "full_tensor") else v
        assert (v - other).abs().max() <= tolerance * max(1.0, float(other.abs().max())), name
    assert model[1].num_batches_tracked == 2


@not_over_gloo_on_a_gpu
@pytest.mark.parametrize("mixed", [False, True])
def test_fully_shard(mixed):
    run_ranks(2, _shard, mixed)
