"""Export, tracing, functional calls, pickles, profiles and CUDA graphs of converted models."""

import copy
import io
import pickle

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import syncbn
from compiled import network
from helpers import Recorded, assert_near, assert_same_bits, batch


@pytest.fixture
def trained(device):
    """A converted network that has seen a batch, in eval, and an input."""
    model = network().to(device)
    x = batch((4, 3, 8, 8), torch.float32, device=device)
    model(x)
    return model.eval(), x


def stock(model):
    return syncbn.revert_model(copy.deepcopy(model))


def targets(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_export_in_eval_gives_the_stock_operator(trained):
    model, x = trained
    dynamic = {0: torch.export.Dim("n", min=2, max=1024)}
    exported = torch.export.export(model, (x,), dynamic_shapes=(dynamic,))
    assert not [t for t in targets(exported.graph) if "syncbn" in t]
    assert sum("batch_norm" in t for t in targets(exported.graph)) == 2
    bigger = torch.cat([x, x])
    assert_near(exported.module()(bigger), stock(model)(bigger).double(), 10.0)


def test_export_survives_a_file(trained):
    model, x = trained
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    assert_near(torch.export.load(file).module()(x), stock(model)(x).double(), 10.0)


def test_export_in_training_keeps_the_ops(device):
    model = network().to(device)
    x = batch((4, 3, 8, 8), torch.float32, device=device)
    exported = torch.export.export(model, (x,))
    assert sum("syncbn.statistics" in t for t in targets(exported.graph)) == 2
    trained = exported.module()
    assert_near(trained(x), model(x).double(), 10.0)
    assert_near(trained.state_dict()["1.running_var"], model[1].running_var.double())


def test_jit_trace_in_eval(trained):
    model, x = trained
    traced = torch.jit.trace(model, x)
    assert "syncbn::" not in str(traced.inlined_graph)
    assert str(traced.inlined_graph).count("aten::batch_norm") == 2
    assert_near(traced(torch.cat([x, x])), stock(model)(torch.cat([x, x])).double(), 10.0)


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_has_the_stock_operator(trained, dynamo, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model, x = trained
    # Otherwise the layers are folded into the convolutions before them.
    if dynamo:
        unfolded = {"optimize": False}
    else:
        training = torch.onnx.TrainingMode.PRESERVE
        unfolded = {"training": training, "do_constant_folding": False}
    graphs = []
    for name, m in ("ours", model), ("stock", stock(model)):
        path = tmp_path / f"{name}.onnx"
        torch.onnx.export(m, (x,), path, dynamo=dynamo, **unfolded)
        exported = onnx.load(path)
        onnx.checker.check_model(exported)
        graphs.append([(n.domain, n.op_type, n.attribute) for n in exported.graph.node])
        inputs = {exported.graph.input[0].name: x.numpy(force=True)}
        (y,) = ReferenceEvaluator(exported).run(None, inputs)
        assert_near(torch.from_numpy(y), m(x).double(), 10.0)
    assert graphs[0] == graphs[1]
    assert [op for _, op, _ in graphs[0]].count("BatchNormalization") == 2


def test_jit_script_says_what_to_do(trained):
    model, x = trained
    with pytest.raises(RuntimeError, match="revert_model"):
        torch.jit.script(model)
    scripted = torch.jit.script(stock(model))
    assert_near(scripted(x), stock(model)(x).double(), 10.0)


def test_fx_symbolic_trace(device):
    """The layers are leaves: traced once, run in training and in eval."""
    model = network().to(device)
    eager = copy.deepcopy(model)
    traced = torch.fx.symbolic_trace(model)
    x = batch((4, 3, 8, 8), torch.float32, device=device)
    assert isinstance(traced.get_submodule("1"), syncbn.BatchNorm2d)
    assert_near(traced(x), eager(x).double(), 10.0)
    assert traced.get_submodule("1").num_batches_tracked == 1
    assert_near(traced.eval()(x), eager.eval()(x).double(), 10.0)


def test_functional_call(device):
    model = network().to(device)
    x = batch((4, 3, 8, 8), torch.float32, device=device)
    tensors = {
        name: v.detach().clone() for name, v in (*model.named_parameters(), *model.named_buffers())
    }
    for name, _ in model.named_parameters():
        tensors[name].mul_(1.5).requires_grad_()
    other = copy.deepcopy(model)
    other.load_state_dict(tensors)
    before = copy.deepcopy(model.state_dict())
    y = torch.func.functional_call(model, tensors, x)
    expected = other(x)
    assert_near(y, expected.double(), 10.0)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert_near(tensors["1.weight"].grad, other[1].weight.grad.double(), 1000.0)
    assert_near(tensors["1.running_var"], other[1].running_var.double())
    for name, v in model.state_dict().items():
        assert torch.equal(v, before[name])


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_of_torch_func(transform, trained):
    model, x = trained
    if transform == "vmap":
        xs = torch.stack([x, x + 1])
        run = torch.func.vmap(model)
        expected = torch.stack([model(x), model(x + 1)])
    else:
        xs = x
        run = torch.func.grad(lambda x: model(x).square().sum())
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(model(leaf).square().sum(), leaf)
    assert_near(run(xs), expected.double(), 100.0)
    model.train()
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        run(xs)


def test_pickle_round_trip(trained):
    model, x = trained
    loaded = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for m in loaded, torch.load(file, weights_only=False):
        assert isinstance(m[1], syncbn.BatchNorm2d)
        assert_near(m(x), model(x).double(), 10.0)


def test_package_round_trip(trained):
    from torch.package import PackageExporter, PackageImporter

    model, x = trained
    file = io.BytesIO()
    with PackageExporter(file) as exporter:
        exporter.extern(["syncbn.**", "torch.**"])
        exporter.save_pickle("models", "model.pkl", model)
    file.seek(0)
    loaded = PackageImporter(file).load_pickle("models", "model.pkl")
    assert type(loaded[1]) is syncbn.BatchNorm2d
    assert_near(loaded(x), model(x).double(), 10.0)


def test_profiler_names_the_ops(device):
    """In eager; and the profiled step computes what others do."""
    model, plain = network().to(device), network().to(device)
    x = batch((4, 3, 8, 8), torch.float32, device=device)
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, record_shapes=True) as profiled:
        y = model(x)
        y.square().sum().backward()
    counts = {event.key: event.count for event in profiled.key_averages()}
    for op in "statistics", "normalize", "backward_reduce", "backward_input":
        assert counts[f"syncbn::{op}"] == 2
    expected = plain(x)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(model[1].weight.grad, plain[1].weight.grad)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)


def test_dispatch_modes_see_the_ops(device):
    """FlopCounterMode, for one, and the policies of selective checkpointing."""
    x = batch((4, 3, 5, 6), torch.float32, device=device).requires_grad_()
    layers = [syncbn.BatchNorm2d(3).to(device) for _ in range(2)]
    expected = layers[0](x)
    with Recorded() as recorded:
        y = layers[1](x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
    ops = [name for name in recorded.names if name.startswith("syncbn.")]
    assert ops == [
        f"syncbn.{name}.default"
        for name in ("statistics", "normalize", "backward_reduce", "backward_input")
    ]
    assert_same_bits(y, expected)
    assert_same_bits(dx, torch.autograd.grad(expected.square().sum(), x)[0])
    assert_same_bits(layers[1].running_var, layers[0].running_var)


def test_a_profile_that_ends_between_forward_and_backward(device):
    model = network().to(device)
    x = batch((4, 3, 8, 8), torch.float32, device=device)
    with profile(activities=[ProfilerActivity.CPU]):
        y = model(x)
    y.sum().backward()
    y = model(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        y.sum().backward()
    assert "syncbn::normalize" not in {event.key for event in profiled.key_averages()}
