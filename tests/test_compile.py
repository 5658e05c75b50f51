"""torch.compile with fullgraph=True on one rank: equal to eager, one graph for every batch size."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import compiled
import syncbn
from compiled import Graphs, network
from helpers import DTYPES, LAYOUTS, assert_near, batch, vector
from syncbn.functional import batchnorm2d_sync
from syncbn.sync import Exchange

OPS = torch.ops.syncbn


def batches(*sizes, device="cpu"):
    return [batch((n, 3, 8, 8), torch.float32, device=device, seed=n) for n in sizes]


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_a_network_equals_eager(options, device):
    compiled.compare(network(**options).to(device), batches(4, 4, device=device), "aot_eager")


def test_inductor_equals_eager(device):
    compiled.compare(network().to(device), batches(4, 4, device=device), "inductor")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype, device):
    compiled.compare(
        network().to(device), batches(4, 4, device=device), "aot_eager", autocast=dtype
    )


@pytest.mark.parametrize("absent", ["weight", "bias"])
def test_a_layer_without(absent):
    layer = syncbn.BatchNorm2d(3)
    setattr(layer, absent, None)
    compiled.compare(layer, batches(4, 4), "aot_eager")


def test_channels_last():
    inputs = [x.to(memory_format=torch.channels_last) for x in batches(4, 5)]
    compiled.compare(network().to(memory_format=torch.channels_last), inputs, "aot_eager")


def test_strided_arguments():
    def normalize(x, weight, bias):
        return batchnorm2d_sync(x[:, ::2, :, ::2], weight[::2], bias[::2], None, None)

    arguments = batch((4, 6, 3, 6), torch.float32), vector(6).float(), vector(6, seed=1).float()
    results = []
    torch._dynamo.reset()
    for f in normalize, torch.compile(normalize, fullgraph=True, backend="aot_eager"):
        leaves = [t.clone().requires_grad_() for t in arguments]
        y = f(*leaves)
        results.append((y, *torch.autograd.grad(y.sin().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        assert_near(b, a.double(), 10.0)
    assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.parametrize(("dynamic", "first"), [(None, (4, 5)), (True, (4,))], ids=str)
def test_batch_sizes_do_not_recompile(dynamic, first):
    """By default the second size makes the dimension a symbol, with dynamic=True the first."""
    model = network()
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend=counter, dynamic=dynamic)
    compiled.train(run, model, batches(*first))
    before = counter.frame_count
    compiled.train(run, model, batches(6, 7, 9))
    assert counter.frame_count == before


def test_eval_and_frozen_layers():
    model = network()
    x = batches(4)[0]
    model(x)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for m in model, eager:
        m[1].frozen, m[4].sync = True, False
    assert_near(run(x), eager(x).double(), 10.0)
    model.eval(), eager.eval()
    assert_near(run(x), eager(x).double(), 10.0)
    for a, b in zip(model.buffers(), eager.buffers(), strict=True):
        assert_near(a.double(), b.double())


def test_one_call_of_each_op_and_no_collective_on_one_rank():
    graphs = Graphs()
    compiled.compare(network(), batches(4), graphs)
    for text, forward, backward in [
        ("syncbn.statistics", 2, 0),
        ("syncbn.normalize", 2, 0),
        ("syncbn.backward_reduce", 0, 2),
        ("syncbn.backward_input", 0, 2),
        ("all_reduce", 0, 0),
    ]:
        assert graphs.count(graphs.forward, text) == [forward]
        assert graphs.count(graphs.backward, text) == [backward]


class Doubling(Exchange):
    """Two participants with the same batch."""

    size = 2

    def all_reduce(self, values):
        return values * 2


def test_an_exchange_of_ones_own():
    model = syncbn.convert_model(network(), Doubling())
    compiled.compare(model, batches(4, 4), "aot_eager")


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_blocks_inside_a_checkpoint(reentrant):
    compiled.compare_inside_a_checkpoint(batches(4, 4), reentrant)


def test_checkpoints_inside_a_compiled_model():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = network()

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=False)

    compiled.compare(Checkpointed(), batches(4, 4), "aot_eager")


def test_an_error_of_a_shape_names_the_argument():
    torch._dynamo.reset()
    run = torch.compile(batchnorm2d_sync, backend="aot_eager")
    with pytest.raises(Exception, match=r"expected weight of shape \[3\]"):
        run(batches(4)[0], torch.ones(4), None, None, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype, layout, device):
    shape = (4, 3, 5, 6)
    x, dy = (batch(shape, dtype, layout, device, seed) for seed in range(2))
    weight, bias = (vector(3, device=device, seed=i).float() for i in range(2))
    sums = OPS.statistics(x)
    running = torch.zeros(3, device=device), torch.ones(3, device=device)
    tracked = torch.tensor(0, device=device)
    full = x, weight, bias, sums, *running, tracked, 0.1, 1e-5
    _, moments = OPS.normalize(*full)
    sums_dy, _, _ = OPS.backward_reduce(dy, x, moments, weight, bias)
    for op, arguments in [
        (OPS.statistics, (x,)),
        (OPS.normalize, full),
        (OPS.normalize, (x, None, None, sums, None, None, None, None, 1e-5)),
        (OPS.normalize, (x, weight, None, sums, *running, tracked, None, 1e-5)),
        (OPS.backward_reduce, (dy, x, moments, weight, bias)),
        (OPS.backward_reduce, (dy, x, moments, None, None)),
        (OPS.backward_input, (dy, x, weight, moments, sums_dy)),
        (OPS.backward_input, (dy, x, None, moments, sums_dy)),
    ]:
        opcheck(op.default, arguments)


@pytest.mark.cuda
def test_reduce_overhead():
    """CUDA graphs by the compiler."""
    model = network().cuda()
    compiled.compare(model, batches(4, 4, 4, 4, device="cuda"), "inductor", mode="reduce-overhead")
