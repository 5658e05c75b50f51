"""The options of Gluon's BatchNorm on the layers here."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import syncbn
from helpers import assert_near, assert_same_bits, batch, vector

LAZY = {
    syncbn.LazyBatchNorm1d: (syncbn.BatchNorm1d, (4, 5)),
    syncbn.LazyBatchNorm2d: (syncbn.BatchNorm2d, (4, 5, 3, 2)),
    syncbn.LazyBatchNorm3d: (syncbn.BatchNorm3d, (4, 5, 3, 2, 2)),
}


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval", "frozen", "not sync"])
def test_center_and_scale(center, scale, mode, device):
    layer = syncbn.BatchNorm2d(5, center=center, scale=scale, dtype=torch.float64, device=device)
    assert (layer.weight is None, layer.bias is None) == (not scale, not center)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(vector(5))
    layer.train(mode != "eval")
    layer.frozen, layer.sync = mode == "frozen", mode != "not sync"
    x = batch((4, 5, 3, 2), device=device).requires_grad_()
    whole = x.detach().clone().requires_grad_()
    running = torch.zeros(5).to(x), torch.ones(5).to(x)
    training = mode in ("train", "not sync")
    weight, bias = (None if p is None else p.detach() for p in (layer.weight, layer.bias))
    expected = F.batch_norm(whole, *running, weight, bias, training)
    y = layer(x)
    dy = batch(y.shape, device=device, seed=1)
    y.backward(dy)
    expected.backward(dy)
    assert_near(y, expected)
    assert_near(x.grad, whole.grad, 10.0)
    assert all(p.grad is not None for p in layer.parameters())
    layer.reset_parameters()
    assert_same_bits(layer.running_var, torch.ones(5).to(x))


@pytest.mark.parametrize("axis", [-1, 3, 0, 2, -3])
@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
def test_channel_axis(axis, mode, device):
    x = batch((3, 4, 5, 6), device=device).requires_grad_()
    layer = syncbn.BatchNorm2d(x.shape[axis], channel_axis=axis, dtype=torch.float64, device=device)
    reference = nn.BatchNorm2d(x.shape[axis], dtype=torch.float64, device=device)
    for m in (layer, reference):
        m.train(mode != "eval")
    layer.frozen = mode == "frozen"
    reference.train(mode == "train")
    dy = batch(x.shape, device=device, seed=1)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = reference(x.movedim(axis, 1)).movedim(1, axis)
    assert_near(y, expected)
    assert_near(dx, torch.autograd.grad(expected, x, dy)[0], 10.0)
    assert_near(layer.running_var, reference.running_var)
    assert y.stride() == x.stride() or mode != "train"


def test_channels_at_the_end_are_not_copied(monkeypatch):
    """The kernels see the memory of x itself."""
    seen = []
    forward = syncbn._C.forward
    monkeypatch.setattr(
        syncbn._C, "forward", lambda x, *rest: seen.append(x.data_ptr()) or forward(x, *rest)
    )
    for shape in ((4, 3, 2, 5), (4, 3, 5), (4, 5)):
        x = torch.randn(shape)
        layer = {4: syncbn.BatchNorm2d, 3: syncbn.BatchNorm1d, 2: syncbn.BatchNorm1d}[len(shape)]
        y = layer(5, channel_axis=-1)(x)
        assert seen.pop() == x.data_ptr()
        assert y.is_contiguous()


def test_wrong_channel_axis():
    with pytest.raises(ValueError, match=r"expected a dimension of x \[2, 3\], got 2"):
        syncbn.BatchNorm1d(3, channel_axis=2)(torch.randn(2, 3))
    model = nn.Sequential(syncbn.BatchNorm1d(3), syncbn.BatchNorm1d(3, channel_axis=-1))
    with pytest.raises(ValueError, match="revert_model: expected channel_axis=1, got -1 in 1"):
        syncbn.revert_model(model)
    assert type(model[0]) is syncbn.BatchNorm1d


def test_use_global_stats():
    layer = syncbn.BatchNorm2d(5, use_global_stats=True)
    assert layer.frozen
    x = batch((4, 5, 3, 2), torch.float32)
    assert_near(layer(x), x / (1 + 1e-5) ** 0.5)
    assert_same_bits(layer.running_mean, torch.zeros(5))
    with pytest.raises(ValueError, match="use_global_stats: expected running statistics"):
        syncbn.BatchNorm2d(5, use_global_stats=True, track_running_stats=False)


def test_initializers():
    layer = syncbn.BatchNorm2d(
        3,
        weight_init=partial(nn.init.constant_, val=2.0),
        bias_init=nn.init.ones_,
        running_mean_init=lambda t: t.copy_(torch.arange(3.0)),
        running_var_init=partial(nn.init.constant_, val=4.0),
    )

    def values():
        return [
            t.tolist() for t in (layer.weight, layer.bias, layer.running_mean, layer.running_var)
        ]

    expected = [[2.0] * 3, [1.0] * 3, [0.0, 1.0, 2.0], [4.0] * 3]
    assert values() == expected
    assert layer.weight.requires_grad
    layer(batch((4, 3, 2, 2), torch.float32))
    layer.reset_running_stats()
    assert values() == expected
    with torch.no_grad():
        layer.weight.zero_()
    layer.reset_parameters()
    assert values() == expected
    layer = syncbn.BatchNorm2d(3, scale=False, weight_init=nn.init.ones_)
    assert layer.weight is None
    assert pickle.loads(pickle.dumps(layer)).weight_init is nn.init.ones_


@pytest.mark.parametrize(("lazy", "kind"), LAZY.items())
def test_lazy_layers_take_the_options(lazy, kind):
    cls, shape = kind
    layer = lazy(
        momentum=0.3,
        scale=False,
        channel_axis=-1,
        keep_fp32=True,
        bias_init=nn.init.ones_,
        running_var_init=partial(nn.init.constant_, val=4.0),
    )
    layer.half()
    x = batch(shape, torch.float32).movedim(1, -1)
    y = layer(x)
    assert type(layer) is cls
    assert layer.num_features == 5
    assert layer.weight is None
    assert layer.bias.tolist() == [1.0] * 5
    assert layer.bias.dtype == torch.float32
    same = cls(5, momentum=0.3, channel_axis=-1)
    assert_near(y, same(x) + 1)
    assert_near(layer.running_var, same.running_var + 0.7 * 3)
    layer.reset_parameters()
    assert layer.running_var.tolist() == [4.0] * 5


@pytest.mark.parametrize("options", [{}, {"affine": False, "track_running_stats": False}])
def test_lazy_layers_without_options_are_torchs(options):
    x = batch((4, 5, 3, 2), torch.float32)
    ours, stock = syncbn.LazyBatchNorm2d(**options), nn.LazyBatchNorm2d(**options)
    converted = syncbn.convert_model(nn.LazyBatchNorm2d(**options))
    expected = stock(x)
    for layer in (ours, converted):
        assert_near(layer(x), expected)
        assert type(layer) is syncbn.BatchNorm2d
        assert layer.num_features == 5
        for (name, a), b in zip(
            layer.state_dict().items(), stock.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("convert", ["before", "after", "never"])
def test_lazy_layers_keep_what_was_loaded(convert):
    trained = nn.BatchNorm2d(5)
    for i, v in enumerate([*trained.parameters(), *trained.buffers()], start=2):
        v.data.fill_(i)
    layer = syncbn.LazyBatchNorm2d() if convert == "never" else nn.LazyBatchNorm2d()
    if convert == "before":
        syncbn.convert_model(layer)
    layer.load_state_dict(trained.state_dict())
    if convert == "after":
        syncbn.convert_model(layer)
    x = batch((4, 5, 3, 2), torch.float32)
    assert_same_bits(layer.eval()(input=x), trained.eval()(x))
    assert layer.num_features == 5
    for name, v in trained.state_dict().items():
        assert_same_bits(layer.state_dict()[name], v)


@pytest.mark.parametrize(
    "cast",
    [
        nn.Module.half,
        nn.Module.bfloat16,
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.double().half(),
    ],
)
def test_keep_fp32(cast):
    model = nn.Sequential(nn.Linear(5, 5), syncbn.BatchNorm1d(5, keep_fp32=True))
    with torch.no_grad():
        model[1].weight.fill_(1 + 2**-20)
    cast(model)
    reduced = model[0].weight.dtype
    assert reduced in (torch.float16, torch.bfloat16)
    assert {v.dtype for v in model[1].state_dict().values()} == {torch.float32, torch.int64}
    assert (model[1].weight == 1 + 2**-20).all()
    for training in (True, False):
        y = model.train(training)(torch.randn(4, 5, dtype=reduced))
        assert y.dtype == reduced
    y.sum().backward()
    assert model[1].weight.grad.dtype == torch.float32
    assert copy.deepcopy(model)[1].keep_fp32


def test_keep_fp32_otherwise():
    layer = syncbn.BatchNorm1d(5, keep_fp32=True, dtype=torch.float16)
    assert layer.weight.dtype == torch.float32
    assert layer.double().weight.dtype == torch.float64
    assert layer.float().running_mean.dtype == torch.float32
    assert layer.to("meta").weight.is_meta
    assert syncbn.BatchNorm1d(5).half().weight.dtype == torch.float16
    converted = syncbn.convert_model(nn.BatchNorm1d(5))
    converted.keep_fp32 = True
    assert converted.half().weight.dtype == torch.float32


def test_repr_shows_what_is_set():
    plain = repr(syncbn.BatchNorm2d(3))[:-1]
    for options, text in (
        ({"scale": False}, "scale=False"),
        ({"channel_axis": -1}, "channel_axis=-1"),
        ({"use_global_stats": True}, "frozen=True"),
        ({"keep_fp32": True}, "keep_fp32=True"),
        ({"weight_init": nn.init.ones_}, "weight_init=ones_"),
    ):
        assert repr(syncbn.BatchNorm2d(3, **options)) == f"{plain}, {text})"
    assert "center=False" in repr(syncbn.BatchNorm2d(3, center=False))


def test_revert_drops_the_options():
    layer = syncbn.BatchNorm2d(
        5, scale=False, keep_fp32=True, use_global_stats=True, bias_init=nn.init.ones_
    )
    keys = [*layer.state_dict()]
    syncbn.revert_model(layer)
    assert type(layer) is nn.BatchNorm2d
    assert layer.__dict__.keys() == nn.BatchNorm2d(5).__dict__.keys()
    assert [*layer.state_dict()] == keys
    layer(batch((4, 5, 3, 2), torch.float32))
