"""The short ways, alone and in a process group: bit by bit what the four ops give one by one."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from distributed import rank_device, run_ranks
from helpers import DTYPES, LAYOUTS, assert_same_bits, batch, vector
from syncbn import _C
from syncbn._workspace import memory_for
from syncbn.functional import batchnorm2d_sync
from syncbn.sync import Local, ProcessGroupExchange


class Alone(Local):
    """An exchange of one that is not known to be one."""


def results(exchange, x, dy, weight, bias, momentum):
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    statistics = torch.zeros(3, device=x.device), torch.ones(3, device=x.device)
    batches = torch.tensor(2, device=x.device)
    y = batchnorm2d_sync(
        *leaves, *statistics, exchange, momentum=momentum, num_batches_tracked=batches
    )
    y.backward(dy)
    return y, *(None if t is None else t.grad for t in leaves), *statistics, batches


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("absent", ["", "w", "b", "wb"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits(dtype, layout, absent, momentum, device):
    shape = (4, 3, 5, 6)
    x, dy = (batch(shape, dtype, layout, device, seed) for seed in range(2))
    weight, bias = (vector(3, device=device, seed=i).float() for i in range(2))
    weight, bias = (None if n in absent else v for n, v in zip("wb", (weight, bias), strict=True))
    arguments = x, dy, weight, bias, momentum
    for a, b in zip(results(Local(), *arguments), results(Alone(), *arguments), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(a, b)


def _in_a_group_as_by_itself():
    exchange = ProcessGroupExchange(dist.group.WORLD)
    for dtype, layout, absent in itertools.product(DTYPES, LAYOUTS, ("", "w", "b", "wb")):
        x, dy = (batch((4, 3, 5, 6), dtype, layout, rank_device(), seed) for seed in range(2))
        weight, bias = (
            None if n in absent else vector(3, torch.float32, rank_device(), i)
            for i, n in enumerate("wb")
        )
        arguments = x, dy, weight, bias, 0.1
        for a, b in zip(results(exchange, *arguments), results(Alone(), *arguments), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same_bits(a, b)


def test_the_same_bits_in_a_group():
    run_ranks(1, _in_a_group_as_by_itself)


def _backward_compiled(y, dy):
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: y.backward(dy), backend="eager")()


def _saved_among_others():
    """What is saved comes back as part of something larger."""

    def unpack(saved):
        larger = torch.cat([saved, torch.full_like(saved, torch.nan)], -1)
        return larger[..., : saved.shape[-1]]

    return torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack)


WAYS = {
    "anomaly mode": (torch.autograd.detect_anomaly, torch.Tensor.backward),
    "saved tensors elsewhere": (torch.autograd.graph.save_on_cpu, torch.Tensor.backward),
    "saved tensors with gaps": (_saved_among_others, torch.Tensor.backward),
    "compiled autograd": (contextlib.nullcontext, _backward_compiled),
}


def _gradients(exchange, around=contextlib.nullcontext, backward=torch.Tensor.backward):
    x, dy = (batch((4, 3, 5), torch.float32, device=rank_device(), seed=i) for i in range(2))
    leaves = [x, *(vector(3, torch.float32, rank_device(), seed=i) for i in range(2))]
    for leaf in leaves:
        leaf.requires_grad_()
    with around():
        backward(batchnorm2d_sync(*leaves, None, None, exchange), dy)
    return [leaf.grad for leaf in leaves]


def _in_every_way():
    for exchange in Local(), ProcessGroupExchange(dist.group.WORLD):
        expected = _gradients(exchange)
        for way in WAYS.values():
            for a, b in zip(_gradients(exchange, *way), expected, strict=True):
                assert_same_bits(a, b)


def test_what_autograd_does_around_a_backward():
    """It calls ours without the Python of PyTorch's that is usually in between."""
    run_ranks(1, _in_every_way)


def _spare_vectors(x):
    return {key: len(spare) for key, spare in memory_for(x).spare.items()}


def _layers_of_one_width_in_threads():
    exchange = ProcessGroupExchange(dist.group.WORLD)

    def run(seed):
        x, dy = (batch((4, 3, 5), torch.float32, device=rank_device(), seed=i) for i in (seed, 9))
        expected = results(Alone(), x, dy, None, None, 0.1)
        for _ in range(50):
            got = results(exchange, x, dy, None, None, 0.1)
            for a, b in zip(got, expected, strict=True):
                if a is not None:
                    assert_same_bits(a, b)

    threads = 4
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
    spare = _spare_vectors(torch.empty(0, 1, device=rank_device()))
    assert spare.keys() == {(7, torch.float64), (6, torch.float32)}
    assert all(0 < kept <= threads for kept in spare.values())


def test_threads_do_not_share_sums():
    """Each call has its own while it runs, and what it leaves is used again."""
    run_ranks(1, _layers_of_one_width_in_threads)


class Subclass(torch.Tensor):
    pass


def _leave_spare_vectors(kind):
    x, dy = (batch((4, 3, 5), torch.float32, device=rank_device(), seed=i) for i in range(2))
    exchange = ProcessGroupExchange(dist.group.WORLD)
    memory_for(x).spare.clear()
    if kind == "inference mode":
        with torch.inference_mode():
            batchnorm2d_sync(x, None, None, None, None, exchange)
    else:
        results(exchange, x.as_subclass(Subclass), dy, None, None, 0.1)
    vectors = [v for spare in memory_for(x).spare.values() for v in spare]
    assert vectors
    assert all(type(v) is torch.Tensor and not v.is_inference() for v in vectors)


@pytest.mark.parametrize("kind", ["inference mode", "a subclass"])
def test_what_is_left_serves_every_call(kind):
    run_ranks(1, _leave_spare_vectors, kind)


def test_more_channels_than_the_stack_holds():
    x, dy = (batch((4, 5000, 2), torch.float64, seed=seed) for seed in range(2))
    statistics = torch.zeros(5000), torch.ones(5000)
    gradients = []
    for exchange in Local(), Alone():
        leaf = x.clone().requires_grad_()
        batchnorm2d_sync(leaf, None, None, *statistics, exchange).backward(dy)
        gradients.append(leaf.grad)
    assert_same_bits(*gradients)


def test_gradients_that_are_not_needed():
    x, dy = (batch((4, 3, 5), torch.float32, seed=seed) for seed in range(2))
    for needed in range(3):
        leaves = [x.clone(), vector(3).float(), vector(3, seed=1).float()]
        leaves[needed].requires_grad_()
        batchnorm2d_sync(*leaves, None, None).backward(dy)
        assert [t.grad is not None for t in leaves] == [i == needed for i in range(3)]


def test_a_bad_argument_is_named():
    x = torch.randn(4, 3, 5)
    moments = torch.zeros(7, dtype=torch.float64)
    for dy, dx, given, text in [
        (x[:, :2], x.clone(), moments, r"dy of shape \[4, 3, 5\]"),
        (x, x[:1].clone(), moments, r"dx of shape \[4, 3, 5\]"),
        (x, x.clone(), moments[:6], r"moments of shape \[7\], got \[6\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            _C.backward(dy, x, None, given, None, None, dx)
    with pytest.raises(ValueError, match=r"moments of shape \[7\], got \[6\]"):
        _C.forward(x, None, None, None, None, None, x.clone(), moments[:6], 0.1, 1e-5)
    with pytest.raises(TypeError, match="x to be a tensor, got None"):
        _C.backward(x, None, None, moments, None, None, x.clone())


def test_a_gradient_that_lies_elsewhere_is_left_alone():
    x = torch.randn(2, 3, 4, 5)
    dx = torch.full_like(x, torch.nan)
    moments = torch.ones(7, dtype=torch.float64)
    dy = torch.randn_like(x).to(memory_format=torch.channels_last)
    assert not _C.backward(dy, x, None, moments, None, None, dx)
    assert dx.isnan().all()
    assert _C.backward(dy.contiguous(), x, None, moments, None, None, dx)
    assert dx.isfinite().all()
