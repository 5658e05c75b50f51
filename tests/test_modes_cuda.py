"""A whole training step as a CUDA graph, collectives included."""

import copy

import pytest
import torch
import torch.distributed as dist

import syncbn
from compiled import network
from distributed import run_ranks
from helpers import assert_near, batch
from syncbn.sync import ProcessGroupExchange

pytestmark = pytest.mark.cuda


def _step(model, optimizer, x):
    optimizer.zero_grad(set_to_none=False)
    y = model(x)
    (y.square().mean() if y.numel() else y.sum()).backward()
    optimizer.step()


def _on_a_side_stream(run):
    """Before a capture: libraries set themselves up, gradients get their memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)


def _capture_and_compare(sizes):
    """The same steps in eager and as a graph, over a group of one rank that does communicate."""
    exchange = ProcessGroupExchange(dist.group.WORLD)
    model = syncbn.convert_model(network(momentum=None).cuda(), exchange)
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, eager)]
    xs = [batch((sizes, 3, 8, 8), torch.float32, device="cuda", seed=i) for i in range(4)]
    static = xs[0].clone()
    _on_a_side_stream(lambda: _step(model, optimizers[0], static))
    for _ in range(3):
        _step(eager, optimizers[1], xs[0])
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread may ask for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _step(model, optimizers[0], static)
    for x in xs:
        static.copy_(x)
        graph.replay()
        _step(eager, optimizers[1], x)
    torch.cuda.synchronize()
    for (name, a), b in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        assert a.isfinite().all(), name
        assert_near(a.float(), b.double(), max(1.0, float(b.abs().max())), message=name)
    return int(model[1].num_batches_tracked)


@pytest.mark.parametrize(("size", "steps"), [(4, 7), (0, 0)])
def test_a_training_step_as_a_graph(size, steps):
    """Without a batch nothing moves, and nothing becomes NaN."""
    assert run_ranks(1, _capture_and_compare, size, backend="nccl") == [steps]


def test_a_training_step_of_two_ranks_as_a_graph():
    assert run_ranks(2, _capture_and_compare, 4, backend="nccl") == [7, 7]


def _train_without_waiting():
    exchange = ProcessGroupExchange(dist.group.WORLD)
    model = syncbn.convert_model(network().cuda(), exchange)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = batch((4, 3, 8, 8), torch.float32, device="cuda")
    for _ in range(2):
        _step(model, optimizer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_never_waits_for_nccl(ranks):
    run_ranks(ranks, _train_without_waiting, backend="nccl")
