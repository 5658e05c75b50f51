"""ModelDataParallel and scatter: lists in and lists out."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import syncbn
from helpers import assert_near, assert_same_bits, batch
from replication import compare_a_step, local_and_synchronized
from syncbn import ModelDataParallel, scatter
from test_training import assert_trains_as, batches, net, outcome

DEVICES = [
    pytest.param(["cpu", "cpu"], id="cpu"),
    pytest.param(["cuda:0", "cuda:0"], marks=pytest.mark.cuda, id="cuda"),
    pytest.param(["cuda", "cuda"], marks=pytest.mark.cuda, id="cuda without index"),
    pytest.param(
        ["cuda:0", "cuda:1"],
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
        ],
        id="two GPUs",
    ),
]


class Joined(nn.Module):
    """Lists to tensors, so that the training loop of one device serves."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        outputs = self.model(scatter(x, self.model.devices))
        return torch.cat([y.to(x.device) for y in outputs])


@pytest.mark.parametrize("devices", DEVICES)
def test_100_steps_of_sgd(devices):
    expected_model = net().to(devices[0])
    xs = [x.to(devices[0]) for x in batches(4)]
    model = syncbn.convert_model(copy.deepcopy(expected_model))
    assert_trains_as(expected_model, Joined(ModelDataParallel(model, devices)), model, xs)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_step(count):
    reference, model = local_and_synchronized(net())
    parallel = ModelDataParallel(model, ["cpu"] * 8)
    for seed in range(2):
        xs = batch((2 * count + 1, 3, 3, 3), seed=seed).tensor_split(count)
        compare_a_step(reference, model, xs, lambda _, xs: parallel(list(xs)))


def test_results_repeat_bit_for_bit():
    def step():
        torch.manual_seed(0)
        model = syncbn.convert_model(net())
        parallel = ModelDataParallel(model, ["cpu"] * 4)
        ys = parallel(scatter(batch((12, 3, 9, 9), torch.float32), parallel.devices))
        torch.cat(ys).square().sum().backward()
        return outcome(model)

    first = step()
    for _ in range(5):
        for name, value in step().items():
            assert_same_bits(value, first[name], name)


def test_a_tensor_or_one_entry_runs_the_module_itself():
    model = syncbn.convert_model(net())
    parallel = ModelDataParallel(model, ["cpu", "cpu"])
    threads = []
    model.register_forward_hook(lambda *_: threads.append(threading.current_thread()))
    x = batch((4, 3, 3, 3), torch.float32)
    y = parallel(x)
    (listed,) = parallel([x])
    assert_near(listed, y)
    assert threads == [threading.current_thread()] * 2
    parallel([x, x])
    assert threading.current_thread() not in threads[2:]


class Arguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = syncbn.BatchNorm1d(2)

    def forward(self, x, scale=1.0, shift=0.0):
        return {"y": self.norm(x) * scale + shift}


def test_entries_are_tensors_tuples_or_dicts():
    parallel = ModelDataParallel(Arguments(), ["cpu"] * 3)
    x = batch((4, 2), torch.float32)
    a, b, c = parallel([x, (x, 2.0), {"x": x, "shift": 1.0}])
    assert_near(b["y"], 2 * a["y"])
    assert_near(c["y"], a["y"] + 1)
    assert_near(parallel([(x, 2.0)])[0]["y"], b["y"])


def test_without_sync_replicas_run_one_after_another_with_local_statistics():
    model = syncbn.convert_model(net())
    local = copy.deepcopy(model)
    parallel = ModelDataParallel(model, ["cpu", "cpu"], sync=False)
    threads = []
    model.register_forward_hook(lambda *_: threads.append(threading.current_thread()))
    xs = list(batch((6, 3, 3, 3), torch.float32).split([2, 4]))
    ys = parallel(xs)
    assert threads == [threading.current_thread()] * 2
    sum(y.sum() for y in ys).backward()
    for i, x in enumerate(xs):
        alone = copy.deepcopy(local)
        assert_near(ys[i], alone(x))
        if i == 0:
            assert_near(model[1].running_mean, alone[1].running_mean)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("sync", [True, False])
def test_wrong_numbers_of_inputs(sync):
    parallel = ModelDataParallel(net(), ["cpu", "cpu"], sync)
    x = batch((4, 3, 3, 3), torch.float32)
    with pytest.raises(ValueError, match="list of 1 to 2 inputs, one per device, got 3"):
        parallel([x, x, x])
    with pytest.raises(ValueError, match="got 0"):
        parallel([])
    with pytest.raises(ValueError, match="got dict"):
        parallel({"x": x})
    with pytest.raises(ValueError, match="at least one device, got none"):
        ModelDataParallel(net(), [])


def test_modes_of_the_calling_thread_hold_in_the_replicas():
    seen = []

    class Modes(nn.Module):
        def forward(self, x):
            autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast))
            return x

    parallel = ModelDataParallel(nn.Sequential(Modes(), syncbn.BatchNorm1d(2)), ["cpu", "cpu"])
    x = batch((4, 2), torch.float32)
    with torch.autocast("cpu", torch.float16):
        parallel([x, x])
    with torch.no_grad():
        parallel([x, x])
    with torch.inference_mode():
        assert parallel([x, x])[0].is_inference()
    default = torch.get_autocast_dtype("cpu")
    assert seen[:2] == [(True, False, True, torch.float16)] * 2
    assert seen[2:4] == [(False, False, False, default)] * 2
    assert seen[4:] == [(False, True, False, default)] * 2


def test_the_wrapper_is_transparent():
    model = syncbn.convert_model(net())
    model.classes = 10
    parallel = ModelDataParallel(model, ["cpu", "cpu"])
    assert parallel.classes == 10
    assert parallel.module is model
    with pytest.raises(AttributeError):
        _ = parallel.nothing
    assert [*parallel.parameters()] == [*model.parameters()]
    assert [*parallel.state_dict()] == [f"module.{name}" for name in model.state_dict()]
    parallel.eval()
    assert not model[1].training
    parallel.double()
    x = batch((4, 3, 3, 3))
    assert_near(torch.cat(parallel([x[:2], x[2:]])), model(x))
    assert "devices=[cpu, cpu]" in repr(parallel)
    assert "sync=False" in repr(ModelDataParallel(model, ["cpu"], sync=False))
    for twin in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        assert_near(torch.cat(twin([x[:2], x[2:]])), model(x))
    with pytest.raises(RuntimeError, match="expected parameters and buffers on cpu"):
        parallel.to("meta")([x, x])


def test_layers_of_many_kinds_can_be_replicated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)
            self.tied = nn.Linear(4, 4)
            self.also_tied = self.tied
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.norm = nn.BatchNorm1d(4)
            self.weights = nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])
            self.absent = None
            self.register_buffer("nothing", None)

        def forward(self, x):
            y = self.also_tied(self.tied(self.rnn(x)[0][:, -1]))
            return self.norm(self.frozen(y)) * self.weights[0] * self.weights[1]

    reference, model = local_and_synchronized(Model())
    parallel = ModelDataParallel(model, ["cpu"] * 3)
    xs = batch((7, 5, 3)).tensor_split(3)
    ys = parallel([x.requires_grad_() for x in xs])
    expected = reference(torch.cat(xs))
    dy = batch(expected.shape)
    torch.cat(ys).backward(dy)
    expected.backward(dy)
    assert_near(torch.cat([y.detach() for y in ys]), expected)
    assert model.frozen.weight.grad is None
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        if q.requires_grad:
            assert_near(q.grad, p.grad, 10.0, message=name)


def test_scatter():
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    parts = scatter((x, {"y": y, "name": "a"}, [y]), ["cpu"] * 3)
    assert [len(p[0]) for p in parts] == [2, 2, 1]
    assert all(p[1]["name"] == "a" and type(p[2]) is list for p in parts)
    assert torch.equal(torch.cat([p[1]["y"] for p in parts]), y)
    assert len(scatter(y[:2], ["cpu"] * 3)) == 2
    assert [len(p) for p in scatter(y[:0], ["cpu"] * 3)] == [0]
    with pytest.raises(ValueError, match=r"got 2 devices and \[4, 5\] rows"):
        scatter((x, y[:4]), ["cpu"] * 2)
    with pytest.raises(ValueError, match="got 0 devices"):
        scatter(x, [])
    with pytest.raises(ValueError, match=r"and \[\] rows"):
        scatter("text", ["cpu"])


@pytest.mark.cuda
def test_replicas_on_two_streams_of_one_gpu():
    """The step of each replica runs on the calling thread's stream, whichever that is."""
    reference, model = local_and_synchronized(net())
    reference.cuda()
    parallel = ModelDataParallel(model, ["cuda:0"] * 3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = batch((9, 3, 33, 33), device="cuda").requires_grad_()
        y = torch.cat(parallel(scatter(x, parallel.devices)))
        y.square().sum().backward()
    stream.synchronize()
    whole = x.detach().requires_grad_()
    expected = reference(whole)
    expected.square().sum().backward()
    torch.cuda.synchronize()
    assert_near(y, expected)
    assert_near(x.grad, whole.grad, 10.0)
