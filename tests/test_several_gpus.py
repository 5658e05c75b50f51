"""Replicas on all GPUs that there are: ``nn.DataParallel`` and ``ModelDataParallel``."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import syncbn
from helpers import assert_same_bits, batch
from replication import compare_a_step, local_and_synchronized
from syncbn import ModelDataParallel, scatter
from syncbn.sync import ReplicaError
from test_replicas_faults import InjectedError, Net, restart, within
from test_training import assert_trains_as, batches, net, outcome

COUNT = torch.cuda.device_count()
UNEVEN = 3 * COUNT - 1  # rows: 3 per GPU, as nn.DataParallel divides them, and 2 on the last
pytestmark = pytest.mark.cuda
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")


def data_parallel(model, xs):
    """One whole batch on the first GPU, and the output there."""
    return [nn.DataParallel(model.cuda())(*xs)]


def model_data_parallel(model, xs):
    """The same by lists, with the parameters on the last GPU."""
    devices = [f"cuda:{i}" for i in reversed(range(COUNT))]
    parallel = ModelDataParallel(model.to(devices[0]), devices)
    return [torch.cat([y.cuda() for y in parallel(scatter(xs[0], devices))])]


def on_a_stream(model, xs):
    """nn.DataParallel on a stream of the caller's own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ys = data_parallel(model, xs)
    torch.cuda.current_stream().wait_stream(stream)
    return ys


def test_100_steps_of_sgd():
    expected_model, xs = net().cuda(), [x.cuda() for x in batches(4)]
    model = syncbn.convert_model(copy.deepcopy(expected_model))
    assert_trains_as(expected_model, nn.DataParallel(model), model, xs)


@needs_two
@pytest.mark.parametrize("visible", [[0], [COUNT - 1], [COUNT - 1, 0]], ids=str)
def test_a_part_of_the_gpus_is_visible(visible):
    """As many replicas as there are inputs, whatever the machine has."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(COUNT)))).split(",")
    visible = ",".join(ours[i] for i in visible)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(
        [*command, f"{__file__}::test_100_steps_of_sgd"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


@needs_two
@pytest.mark.parametrize("run", [data_parallel, model_data_parallel, on_a_stream])
@pytest.mark.parametrize("rows", [2 * COUNT, UNEVEN, COUNT, 1], ids=lambda n: f"{n} rows")
def test_steps(run, rows):
    """Even and uneven parts; one row each; the last batch of one sample, which is one replica."""
    reference, model = local_and_synchronized(net())
    reference.cuda()
    for seed in range(3):
        x = batch((rows, 3, 9, 7), device="cuda", seed=seed)
        compare_a_step(reference, model, [x], run)


@needs_two
def test_the_gpus_chosen_by_device_ids():
    reference, model = local_and_synchronized(net())
    for ids in [COUNT - 1], [COUNT - 1, 0]:
        xs = [batch((5, 3, 4, 4), device=f"cuda:{ids[0]}")]
        reference.to(ids[0])
        compare_a_step(
            reference,
            model,
            xs,
            lambda model, xs, ids=ids: [nn.DataParallel(model.to(ids[0]), ids)(*xs)],
        )


class Faulty(nn.Module):
    """A fault on the last GPU."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, fault=None):
        return self.net(x, fault if x.device.index == COUNT - 1 else None, 1)


@needs_two
@pytest.mark.parametrize(
    ("fault", "error"),
    [("raise", InjectedError), ("bad shape", ValueError), ("skip", ReplicaError)],
)
def test_a_fault_on_one_gpu_and_then_a_good_step(fault, error):
    reference, model = local_and_synchronized(Faulty(Net()))
    reference.cuda()
    parallel = nn.DataParallel(model.cuda())
    x = batch((UNEVEN, 3, 4, 4), device="cuda")
    for _ in range(3):
        with pytest.raises(error):
            within(60, parallel, x, fault)
        restart(reference, model)
        compare_a_step(reference, model, [x], lambda _, xs: [parallel(*xs)])


@needs_two
def test_results_repeat_bit_for_bit():
    def step():
        torch.manual_seed(0)
        model = syncbn.convert_model(net()).cuda()
        x = batch((UNEVEN, 3, 33, 31), torch.float32, device="cuda").requires_grad_()
        nn.DataParallel(model)(x).square().sum().backward()
        return {"dx": x.grad, **outcome(model)}

    torch.backends.cudnn.deterministic = True
    try:
        first = step()
        for _ in range(5):
            for name, value in step().items():
                assert_same_bits(value, first[name], name)
    finally:
        torch.backends.cudnn.deterministic = False


@needs_two
def test_the_host_waits_for_no_gpu():
    devices = [f"cuda:{i}" for i in range(COUNT)]
    layers = nn.Sequential(syncbn.BatchNorm2d(3), nn.ReLU(), syncbn.BatchNorm2d(3)).cuda()
    parallel = ModelDataParallel(layers, devices)
    xs = [batch((4, 3, 9, 9), torch.float32, device=d) for d in devices]

    def step():
        loss = sum(y.square().sum().to("cuda:0", non_blocking=True) for y in parallel(xs))
        loss.backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_two
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    """Near the step of one GPU; with local statistics, parts this unlike would be far off."""
    reference, model = local_and_synchronized(net())
    reference, model = reference.float().cuda(), model.float().cuda()
    x = batch((UNEVEN, 3, 9, 9), torch.float32, device="cuda")
    x += torch.arange(UNEVEN, device="cuda").view(-1, 1, 1, 1)
    dy = batch((UNEVEN, 3, 9, 9), torch.float32, device="cuda", seed=1)
    with torch.autocast("cuda", dtype):
        alone, all_gpus, local = (
            m(x) for m in (reference, nn.DataParallel(model), nn.DataParallel(net().cuda()))
        )
    assert (all_gpus - alone).abs().max() < 0.05 < 0.5 < (local - alone).abs().max()
    alone.backward(dy.to(alone.dtype))
    all_gpus.backward(dy.to(all_gpus.dtype))
    for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < 0.05 * max(1, a.grad.abs().max()), name
    for (name, a), b in zip(reference.named_buffers(), model.buffers(), strict=True):
        assert (a - b).abs().max() < 0.01 * max(1, a.abs().max()), name


@needs_two
def test_the_current_device_stays():
    x = torch.randn(4, 3, 5, 5, device="cuda:1")
    syncbn.functional.batchnorm2d_sync(x, None, None, None, None)
    assert torch.cuda.current_device() == 0
