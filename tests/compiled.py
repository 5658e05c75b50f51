"""Networks, compiled and not, trained side by side; and the graphs that a compiler gets to see."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import syncbn
from distributed import rank_device
from helpers import assert_near, batch


def network(**options):
    """A convolution, a converted BatchNorm, an activation, twice; on a rank, where it computes."""
    torch.manual_seed(0)
    return syncbn.convert_model(
        nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6, **options),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3),
            nn.BatchNorm2d(4, **options),
        )
    ).to(rank_device())


def batches(*sizes, rank=None):
    """Batches for ``network``, of other values on each rank; this rank's by default."""
    rank = dist.get_rank() if rank is None else rank
    return [
        batch((n, 3, 8, 8), torch.float32, device=rank_device(), seed=n + 100 * rank) for n in sizes
    ]


def train(forward, model, batches, autocast=None):
    """A step of SGD per batch: the outputs, the last gradients, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    outputs = []
    for x in batches:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            y = forward(x)
        (y.float().square().mean() + y.float().sin().mean()).backward()
        optimizer.step()
        outputs.append(y.detach().clone())  # a CUDA graph writes over its outputs
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = {name: v.detach().clone() for name, v in model.state_dict().items()}
    return outputs, gradients, state


def assert_same_training(actual, expected):
    """Two results of ``train``: within 1e-5 of the largest value (halves: of their precision)."""
    for a, b in zip(actual[0], expected[0], strict=True):
        assert_near(a, b.double(), 10 * b.double().abs().max())
    for ours, theirs in zip(actual[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, b in theirs.items():
            scale = max(1.0, float(b.abs().max()))
            assert_near(ours[name].float(), b.double(), scale, message=name)


def compare(model, batches, backend, autocast=None, **options):
    """Trains ``model`` compiled and a copy of it in eager; ``options`` go to torch.compile."""
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, **options)
    assert_same_training(
        train(compiled, model, batches, autocast), train(eager, eager, batches, autocast)
    )


def compare_inside_a_checkpoint(inputs, reentrant):
    """The recomputation, a forward of the compiled block inside backward, counts nothing."""
    model, eager = (network().to(inputs[0].device) for _ in range(2))
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = [x.requires_grad_() for x in inputs]
    assert_same_training(
        train(partial(checkpoint, run, use_reentrant=reentrant), model, inputs),
        train(eager, eager, inputs),
    )
    assert model[1].num_batches_tracked == len(inputs) == 2


class Graphs:
    """A backend that runs what it is given and keeps it: ``forward`` and ``backward`` graphs."""

    def __init__(self):
        self.forward, self.backward = [], []
        self._backend = aot_autograd(
            fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward)
        )

    def __call__(self, graph, inputs):
        return self._backend(graph, inputs)

    @staticmethod
    def _keep(graphs):
        def compiler(graph, inputs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    @staticmethod
    def count(graphs, text):
        """Calls of ops whose name contains ``text``, per graph."""
        return [sum(text in name for name in map(_op, graph.graph.nodes)) for graph in graphs]


def _op(node):
    """The name of what a node calls; of an op that mutates, which stands in another's arguments."""
    if node.op != "call_function":
        return ""
    return str(node.args[0] if "auto_functionalized" in str(node.target) else node.target)
