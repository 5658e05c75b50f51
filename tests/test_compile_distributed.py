"""torch.compile with fullgraph=True on two ranks: one collective each way, equal to eager."""

import contextlib
import copy
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

import compiled
import syncbn
from compiled import Graphs, network
from distributed import BACKEND, Ranks, rank_device, run_ranks
from helpers import assert_near, assert_same_bits, batch


def batches(*sizes):
    """Of other sizes too on each rank."""
    return compiled.batches(*(n + dist.get_rank() for n in sizes))


def _compare(options, backend, autocast=None):
    compiled.compare(network(**options), batches(4, 4), backend, autocast)


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_a_network_equals_eager(options):
    run_ranks(2, _compare, options, "aot_eager")


def test_inductor_equals_eager():
    run_ranks(2, _compare, {}, "inductor", timeout=120)


def test_autocast():
    run_ranks(2, _compare, {}, "aot_eager", torch.bfloat16)


def _count_collectives():
    graphs = Graphs()
    compiled.compare(network(), batches(4), graphs)
    return [
        graphs.count(g, op)
        for op in ("_c10d_functional.all_reduce", "_c10d_functional")
        for g in (graphs.forward, graphs.backward)
    ]


def test_one_collective_each_way_per_layer():
    """Two layers. Each collective is the call and its wait."""
    for forward, backward, all_forward, all_backward in run_ranks(2, _count_collectives):
        assert forward == backward == [2]
        assert all_forward == all_backward == [4]


def _exported(x, strict):
    layer = syncbn.BatchNorm2d(3).to(x)
    part = x.split([3, 1])[dist.get_rank()]
    program = torch.export.export(layer, (part,), strict=strict)
    return program.module()(part)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_training_graph_exchanges(strict):
    x = batch((4, 3, 5, 5))
    y = torch.cat(run_ranks(2, _exported, x, strict, timeout=120))
    assert_near(y, torch.nn.functional.batch_norm(x, None, None, training=True))


def _count_graphs():
    model = network()
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend=counter)
    compiled.train(run, model, batches(4, 5))
    before = counter.frame_count
    compiled.train(run, model, batches(6, 7, 9))
    return counter.frame_count - before


def test_batch_sizes_do_not_recompile():
    assert run_ranks(2, _count_graphs) == [0, 0]


def _compare_inside_ddp(backend):
    """The model compiled inside DDP, DDP compiled as a whole, and eager DDP."""
    results = []
    for how in "inside", "around", "eager":
        torch._dynamo.reset()
        compiler = partial(torch.compile, fullgraph=how == "inside", backend=backend)
        model = network()
        ddp = DistributedDataParallel(compiler(model) if how == "inside" else model)
        forward = compiler(ddp) if how == "around" else ddp
        results.append(compiled.train(forward, model, batches(4, 4)))
    compiled.assert_same_training(results[0], results[2])
    compiled.assert_same_training(results[1], results[2])


def test_inside_ddp():
    run_ranks(2, _compare_inside_ddp, "aot_eager")


def _compare_checkpointed(reentrant):
    compiled.compare_inside_a_checkpoint(batches(4, 4), reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_blocks_inside_a_checkpoint(reentrant):
    run_ranks(2, _compare_checkpointed, reentrant)


def _compile_the_backward_pass(how):
    torch._dynamo.reset()
    (x,) = batches(4)
    results = []
    for compiled_ in False, True:
        model = network()
        loss = model(x).square().mean()
        run = torch.compile(loss.backward, backend="eager") if compiled_ else loss.backward
        with torch._dynamo.config.patch(compiled_autograd=how == "compiled autograd"):
            run()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("how", ["backward", "compiled autograd"])
def test_the_backward_pass_alone_is_compiled(how):
    run_ranks(2, _compile_the_backward_pass, how)


def _while_another_thread_compiles(x, dy, modules):
    results = []
    for compiling in False, True:
        layer, leaf = syncbn.BatchNorm2d(5, device=rank_device()), x.clone().requires_grad_()
        with contextlib.ExitStack() as stack:
            for module in modules if compiling else ():
                # PyTorch says so in every thread then.
                stack.enter_context(mock.patch(f"syncbn.{module}.is_compiling", return_value=True))
            layer(leaf).backward(dy)
        results.append([leaf.grad, layer.weight.grad, layer.running_var])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    "modules", [["sync.process_group"], ["functional", "sync.process_group"]], ids=str
)
def test_while_another_thread_compiles(modules):
    """From the start, or from the collective on."""
    x, dy = (batch((2, 5, 3, 4), torch.float32, seed=seed) for seed in range(2))
    run_ranks(2, _while_another_thread_compiles, x, dy, modules)


def _compile_before_the_group_exists(folder):
    rank, backend = dist.get_rank(), dist.get_backend()
    model, first = network(), compiled.batches(4, rank=0)
    eager = copy.deepcopy(model)
    dist.destroy_process_group()
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    alone = [compiled.train(f, m, first) for f, m in ((run, model), (eager, eager))]
    compiled.assert_same_training(*alone)
    dist.init_process_group(
        backend, init_method=f"file://{Path(folder) / 'again'}", rank=rank, world_size=2
    )
    together = [compiled.train(f, m, batches(4)) for f, m in ((run, model), (eager, eager))]
    compiled.assert_same_training(*together)
    return model[1].running_mean


def test_compiled_before_the_process_group_exists():
    """What was compiled for one rank is not used once there are two."""
    ranks = Ranks(2, BACKEND)
    try:
        with tempfile.TemporaryDirectory() as folder:
            a, b = ranks.run(_compile_before_the_group_exists, (folder,), 60)
    finally:
        ranks.close()
    # The first batch was the same on both ranks, and the second one was shared.
    assert torch.equal(a, b)
