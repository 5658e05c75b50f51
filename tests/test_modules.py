"""The modules: constructors, flags, and what a user does with a BatchNorm."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import syncbn
from helpers import DTYPES, assert_near, assert_same_bits, batch, vector

KINDS = [
    (syncbn.BatchNorm1d, nn.BatchNorm1d, (4, 3)),
    (syncbn.BatchNorm1d, nn.BatchNorm1d, (4, 3, 7)),
    (syncbn.BatchNorm2d, nn.BatchNorm2d, (4, 3, 5, 6)),
    (syncbn.BatchNorm3d, nn.BatchNorm3d, (4, 3, 2, 3, 4)),
    (syncbn.SyncBatchNorm, nn.BatchNorm1d, (4, 3)),
    (syncbn.SyncBatchNorm, nn.BatchNorm2d, (4, 3, 5, 6)),
]

over_kinds = pytest.mark.parametrize(("ours", "stock", "shape"), KINDS)
OPTIONS = [
    {},
    {"eps": 0.1, "momentum": 0.7},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
]


class NoExchange(syncbn.sync.Exchange):
    """Two participants that must not communicate."""

    size = 2

    def all_reduce(self, values):
        raise AssertionError("a collective")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@over_kinds
def test_trains_and_evaluates_as_batch_norm(ours, stock, shape, options, device):
    layer = ours(3, **options, device=device, dtype=torch.float64)
    plain = stock(3, **options, dtype=torch.float64)
    if layer.affine:
        for m in layer, plain:
            m.weight.data.copy_(vector(3))
            m.bias.data.copy_(vector(3, seed=1))
    for step in range(3):
        b = batch(shape, seed=step).requires_grad_()
        a = b.detach().clone().to(device).requires_grad_()
        y, expected = layer(a), plain(b)
        assert_near(y, expected)
        y.sin().sum().backward()
        expected.sin().sum().backward()
        assert_near(a.grad, b.grad, 10.0)
    x = batch(shape, seed=9)
    assert_near(layer.eval()(x.to(device)), plain.eval()(x))
    assert list(layer.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert_near(layer.state_dict()[name].double(), value.double(), message=name)
    for name, p in plain.named_parameters():
        assert_near(layer.get_parameter(name).grad, p.grad, 100.0, message=name)


@pytest.mark.parametrize("kind", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"])
def test_is_a_kind_of_the_stock_class(kind):
    ours, stock = getattr(syncbn, kind), getattr(nn, kind)
    assert issubclass(ours, stock)
    assert isinstance(ours(3), nn.modules.batchnorm._BatchNorm)


def positional(cls):
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_arguments_are_those_of_the_stock_class_and_a_group():
    names = positional(syncbn.SyncBatchNorm)
    assert names == positional(nn.SyncBatchNorm)
    assert names == positional(syncbn.BatchNorm2d)
    layer, stock = syncbn.BatchNorm2d(3), nn.BatchNorm2d(3)
    for name in names[:5]:
        assert getattr(layer, name) == getattr(stock, name)
    assert layer.process_group is None
    assert layer.sync
    assert not layer.frozen
    layer = syncbn.BatchNorm2d(3, 1e-5, 0.1, True, True, None, "meta", torch.float16)
    assert layer.weight.is_meta
    assert layer.running_var.dtype == torch.float16


@pytest.mark.skipif(
    "bias" not in inspect.signature(nn.BatchNorm2d).parameters,
    reason="this PyTorch has no bias argument",
)
def test_without_a_bias_alone(device):
    layer, stock = syncbn.BatchNorm2d(3, bias=False, device=device), nn.BatchNorm2d(3, bias=False)
    x = batch((4, 3, 5, 6), torch.float32)
    assert layer.bias is None
    assert_near(layer(x.to(device)), stock(x).double())


@pytest.mark.parametrize(
    ("kind", "bad", "text"),
    [
        (syncbn.BatchNorm1d, (4, 3, 5, 5), "expected 2D or 3D input"),
        (syncbn.BatchNorm2d, (4, 3), "expected 4D input"),
        (syncbn.BatchNorm3d, (4, 3, 5, 5), "expected 5D input"),
        (syncbn.SyncBatchNorm, (3,), "expected at least 2D input"),
    ],
)
def test_wrong_number_of_dimensions(kind, bad, text):
    for training in True, False:
        with pytest.raises(ValueError, match=text):
            kind(3).train(training)(torch.zeros(bad))


def test_wrong_number_of_channels(device):
    layer = syncbn.BatchNorm2d(3, device=device)
    with pytest.raises(ValueError, match=r"expected weight of shape \[4\].*, got \[3\]"):
        layer(torch.zeros(2, 4, 5, 5, device=device))
    assert layer.num_batches_tracked == 0
    assert (layer.running_mean == 0).all()


def test_sync_off_behaves_as_the_stock_class(device):
    layer = syncbn.BatchNorm2d(3, process_group=NoExchange(), device=device)
    layer.sync = False
    stock = nn.BatchNorm2d(3, device=device)
    x = batch((4, 3, 5, 6), torch.float32, device=device)
    assert_same_bits(layer(x), stock(x))
    for a, b in zip(layer.buffers(), stock.buffers(), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frozen_normalizes_by_the_running_statistics(dtype, device):
    layer = syncbn.BatchNorm2d(3, process_group=NoExchange(), device=device, dtype=dtype)
    layer.running_mean.copy_(vector(3))
    layer.running_var.copy_(vector(3).abs())
    layer.frozen = True
    before = [b.clone() for b in layer.buffers()]
    x = batch((4, 3, 5, 6), dtype, device=device).requires_grad_()
    y = layer.train()(x)
    y.sum().backward()
    leaf = x.detach().clone().requires_grad_()
    expected = nn.functional.batch_norm(leaf, *before[:2], layer.weight, layer.bias)
    assert_same_bits(y, expected)
    expected.sum().backward()
    assert_same_bits(x.grad, leaf.grad)
    for a, b in zip(layer.buffers(), before, strict=True):
        assert_same_bits(a, b)


def test_frozen_needs_running_statistics():
    layer = syncbn.BatchNorm2d(3, track_running_stats=False)
    layer.frozen = True
    with pytest.raises(ValueError, match="frozen: expected running statistics"):
        layer(torch.zeros(2, 3, 4, 4))


def test_eval_does_not_communicate(device):
    for tracks in True, False:
        layer = syncbn.BatchNorm2d(
            3, track_running_stats=tracks, process_group=NoExchange(), device=device
        ).eval()
        stock = nn.BatchNorm2d(3, track_running_stats=tracks, device=device).eval()
        x = batch((4, 3, 5, 6), torch.float32, device=device)
        assert_same_bits(layer(x), stock(x))


def test_training_communicates():
    with pytest.raises(AssertionError, match="a collective"):
        syncbn.BatchNorm2d(3, process_group=NoExchange())(torch.zeros(2, 3, 4, 4))


def test_repr():
    layer, stock = syncbn.BatchNorm2d(3), nn.BatchNorm2d(3)
    assert repr(layer) == repr(stock)
    layer.sync, layer.frozen = False, True
    assert repr(layer) == repr(stock)[:-1] + ", sync=False, frozen=True)"
    layer.process_group = syncbn.sync.Local()
    assert "process_group=Local()" in repr(layer)


def test_deep_copies_share_the_group_and_nothing_else():
    layer = syncbn.BatchNorm2d(3, process_group=NoExchange())
    layer.note = ["a list"]
    layer.sync = False
    copied = copy.deepcopy(nn.ModuleList([layer, layer]))
    assert copied[0] is copied[1]
    assert copied[0] is not layer
    assert type(copied[0]) is syncbn.BatchNorm2d
    assert copied[0].process_group is layer.process_group
    assert not copied[0].sync
    assert copied[0].note == ["a list"]
    assert copied[0].note is not layer.note
    for (name, a), b in zip(
        copied[0].state_dict().items(), layer.state_dict().values(), strict=True
    ):
        assert a.equal(b), name
        assert a.data_ptr() != b.data_ptr()


def test_a_pickle_leaves_the_group_out_and_the_layer_as_it_was():
    layer = syncbn.BatchNorm2d(3, process_group=(group := NoExchange()))
    layer.frozen = True
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for copied in pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False):
        assert copied.process_group is None
        assert "process_group" not in copied.__dict__
        assert copied.frozen
        assert_same_bits(copied.weight, layer.weight)
    assert layer.process_group is group


def test_state_dicts_load_both_ways(device):
    layer, stock = syncbn.BatchNorm2d(3, device=device), nn.BatchNorm2d(3)
    stock(batch((4, 3, 5, 6), torch.float32))
    layer.load_state_dict(stock.state_dict())
    back = nn.BatchNorm2d(3)
    back.load_state_dict(layer.state_dict())
    for a, b in zip(back.state_dict().values(), stock.state_dict().values(), strict=True):
        assert a.equal(b)


def test_lazy_layers_take_a_group(device):
    group = syncbn.sync.Local()
    layer = syncbn.LazyBatchNorm2d(momentum=0.3, process_group=group).to(device)
    layer(batch((4, 3, 5, 6), torch.float32, device=device))
    assert type(layer) is syncbn.BatchNorm2d
    assert layer.process_group is group
    assert layer.momentum == 0.3
    assert layer.weight.shape == (3,)
    assert layer.num_batches_tracked == 1


def test_functional_call_puts_other_tensors_in(device):
    layer = syncbn.BatchNorm2d(3, device=device, dtype=torch.float64)
    x = batch((4, 3, 5, 6), device=device)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    state["weight"] = vector(3, device=device).requires_grad_()
    y = torch.func.functional_call(layer, state, x)
    y.square().sum().backward()
    plain = nn.functional.batch_norm(x, None, None, state["weight"].detach(), None, True)
    assert_near(y, plain)
    assert state["weight"].grad is not None
    assert state["num_batches_tracked"] == 1
    assert layer.num_batches_tracked == 0
    assert layer.weight.grad is None


def test_statistics_of_an_averaged_model(device):
    """torch.optim.swa_utils.update_bn sets momentum to None for one pass over the data."""
    layer, stock = syncbn.BatchNorm2d(3, device=device), nn.BatchNorm2d(3)
    loader = [batch((4, 3, 5, 6), torch.float32, seed=i) for i in range(4)]
    update_bn(loader, nn.Sequential(stock))
    update_bn(loader, nn.Sequential(layer), device)
    assert_near(layer.running_mean, stock.running_mean.double())
    assert_near(layer.running_var, stock.running_var.double())
    assert layer.momentum == 0.1


def test_fusion_into_a_convolution():
    conv, layer = nn.Conv2d(3, 4, 1).eval(), syncbn.BatchNorm2d(4)
    layer(batch((4, 4, 5, 6), torch.float32))
    fused = nn.utils.fuse_conv_bn_eval(conv, layer.eval())
    x = batch((4, 3, 5, 6), torch.float32)
    assert_near(fused(x), layer(conv(x)).double(), 10.0)


def test_reset_running_stats_and_casts(device):
    layer = syncbn.BatchNorm2d(3, device=device)
    layer(batch((4, 3, 5, 6), torch.float32, device=device))
    layer.half()
    y = layer(batch((4, 3, 5, 6), torch.float16, device=device))
    assert y.dtype == torch.float16
    assert layer.num_batches_tracked == 2
    layer.reset_running_stats()
    assert layer.num_batches_tracked == 0
    assert (layer.running_var == 1).all()


def test_the_input_may_be_named(device):
    layer = syncbn.BatchNorm1d(3, device=device)
    x = batch((4, 3), torch.float32, device=device)
    assert_same_bits(layer(input=x), copy.deepcopy(layer)(x))


def test_a_shallow_copy_shares_the_group():
    layer = syncbn.BatchNorm2d(3, process_group=NoExchange())
    copied = copy.copy(layer)
    assert copied.process_group is layer.process_group
    assert copied.weight is layer.weight
    copied.process_group = None
    assert isinstance(layer.process_group, NoExchange)


def _parametrized(layer):
    nn.utils.parametrize.register_parametrization(layer, "running_var", nn.Softplus())


def _as_attributes(layer):
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        value = getattr(layer, name)
        delattr(layer, name)
        setattr(layer, name, value)


def _without_a_count(layer):
    del layer.num_batches_tracked


def _without_any(layer):
    layer.track_running_stats = False
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        delattr(layer, name)
    layer.running_mean = layer.running_var = None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", [_parametrized, _as_attributes, _without_a_count, _without_any])
def test_statistics_that_are_not_buffers(change, frozen):
    layer, stock = syncbn.BatchNorm2d(3), nn.BatchNorm2d(3)
    for m in layer, stock:
        m.running_mean.copy_(vector(3))
        change(m)
        m.eval()
    layer.frozen = frozen and change is not _without_any
    x = batch((4, 3, 5, 6), torch.float32)
    assert_near(layer(x), stock(x).double())


def test_skip_init():
    layer = nn.utils.skip_init(syncbn.BatchNorm2d, 3, dtype=torch.float64)
    assert layer.running_mean.dtype is torch.float64
