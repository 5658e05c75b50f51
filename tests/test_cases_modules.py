"""Reported cases that concern modules, their conversion and their life; see test_cases.py."""

import copy
import gc
import io
import resource
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncbn
from distributed import rank_device, run_ranks
from helpers import assert_near, assert_same_bits, batch


def test_a_converted_layer_called_directly(device):
    """GANet#23: outside any parallel wrapper and process group it is plain BN"""
    x = batch((4, 5, 3, 3), torch.float32)
    stock = nn.BatchNorm2d(5)
    layer = syncbn.convert_model(copy.deepcopy(stock)).to(device)
    assert_near(layer(x.to(device)), stock.double()(x.double()))


def _train_then_eval(layer, xs):
    layer = syncbn.convert_model(layer)
    for x in xs[dist.get_rank()]:
        layer(x)
    return list(layer.buffers()), layer.eval()(xs[0][0])


def test_train_then_eval():
    """PyTorch-Encoding#35: buffers equal nn.BatchNorm's, with the unbiased variance"""
    stock = nn.BatchNorm2d(5).double()
    xs = [[batch((n, 5, 2, 2), seed=10 * n + i) for i in range(4)] for n in (3, 1)]
    results = run_ranks(2, _train_then_eval, copy.deepcopy(stock), xs)
    for pair in zip(*xs, strict=True):
        stock(torch.cat(pair))
    expected = stock.eval()(xs[0][0])
    for buffers, y in results:
        for actual, buffer in zip(buffers, stock.buffers(), strict=True):
            assert_near(actual.double(), buffer)
        assert_near(y, expected)


def test_convert_after_the_optimizer_was_built(device):
    """pytorch#38940, CenterPoint#146: the optimizer still updates the layer"""
    model = nn.Sequential(nn.BatchNorm2d(5)).to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    syncbn.convert_model(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model(batch((4, 5, 3, 3), torch.float32, device=device)).square().sum().backward()
    optimizer.step()
    assert (model[0].weight != 1).all()


class ActivatedBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_a_subclass_whose_forward_adds_an_activation(device):
    """pytorch#187298, timm#1254: its behaviour is kept"""
    model = nn.Sequential(ActivatedBatchNorm(5)).to(device)
    x = batch((4, 5, 3, 3), torch.float32, device=device)
    expected = copy.deepcopy(model)(x)
    with pytest.warns(UserWarning, match="ActivatedBatchNorm"):
        syncbn.convert_model(model)
    assert_same_bits(model(x), expected)


def test_convert_keeps_everything(device):
    """apex#380, pytorch PR#22569, #37930, #43592"""
    layer = nn.BatchNorm2d(5, dtype=torch.float64, device=device)
    layer(batch((4, 5, 3, 3), device=device))
    layer.eval()
    layer.weight.requires_grad_(False)
    layer.note = "kept"
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    before = {k: (v, v.device, v.dtype) for k, v in layer.state_dict(keep_vars=True).items()}
    assert syncbn.convert_model(layer) is layer
    for name, value in layer.state_dict(keep_vars=True).items():
        old, old_device, old_dtype = before[name]
        assert value is old
        assert (value.device, value.dtype) == (old_device, old_dtype)
    assert layer.num_batches_tracked == 1
    assert not layer.training
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    assert layer.note == "kept"
    layer(batch((4, 5, 3, 3), device=device))
    assert calls == [1]


def test_back_to_batch_norm():
    """pytorch#41081"""
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))
    keys = list(model.state_dict())
    converted = syncbn.convert_model(copy.deepcopy(model))
    assert list(converted.state_dict()) == keys
    model.load_state_dict(converted.state_dict())
    converted.load_state_dict(model.state_dict())
    reverted = syncbn.revert_model(converted)
    assert type(reverted[1]) is nn.BatchNorm2d
    assert list(reverted.state_dict()) == keys


def test_deepcopy_and_save(device):
    """pytorch#76927, SynchronizedBatchNorm-PyTorch#9"""
    model = syncbn.convert_model(nn.Sequential(nn.BatchNorm2d(5))).to(device)
    model(batch((4, 5, 3, 3), torch.float32, device=device))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in copy.deepcopy(model), torch.load(file, weights_only=False):
        assert type(copied[0]) is syncbn.BatchNorm2d
        for a, b in zip(copied.state_dict().values(), model.state_dict().values(), strict=True):
            assert_same_bits(a, b)
            assert a is not b


def _layer_then_group(path):
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    x = torch.full((4, 3), float(rank), device=rank_device())
    dist.destroy_process_group()
    layer = syncbn.convert_model(nn.BatchNorm1d(3)).to(x.device)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    layer(x)
    return layer.running_mean


def test_a_layer_built_before_the_process_group(tmp_path):
    """mmdetection#6410"""
    for running_mean in run_ranks(2, _layer_then_group, str(tmp_path / "meet")):
        assert_near(running_mean, torch.full((3,), 0.05, dtype=torch.float64))


def _peak_memory():
    """Bytes, of the GPU or of the process. For the latter Linux counts in KiB, macOS in bytes."""
    if rank_device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _train_and_measure(steps):
    """Growth of the peak memory and of the number of tensors over ``steps``, after a warm-up."""
    on = {"device": rank_device()}
    many = syncbn.SyncBatchNorm(8192, **on)  # 64 KiB per saved vector
    image = syncbn.BatchNorm2d(64, **on)  # 1 MiB per saved tensor
    double_backward = syncbn.BatchNorm1d(64, **on)

    def step():
        many(torch.randn(4, 8192, requires_grad=True, **on)).sum().backward()
        image(torch.randn(4, 64, 32, 32, requires_grad=True, **on)).sum().backward()
        x = torch.randn(4, 64, requires_grad=True, **on)
        (dx,) = torch.autograd.grad(double_backward(x).sin().sum(), x, create_graph=True)
        dx.sum().backward()

    def tensors():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    for _ in range(30):
        step()
    memory, count = _peak_memory(), tensors()
    for _ in range(steps):
        step()
    return _peak_memory() - memory, tensors() - count


def test_memory_stays_flat():
    """pytorch-syncbn#1, #5, gluon-cv#1298: on two ranks

    One tensor left behind per step would be 300, and 19 MiB if it is the smallest vector; the
    allocator by itself takes up to 5 MiB.
    """
    for growth, tensors in run_ranks(2, _train_and_measure, 300):
        assert tensors < 10
        assert growth < 10 << 20, f"{growth / (1 << 20):.1f} MiB more after 300 steps"
