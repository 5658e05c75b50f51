"""``convert_model`` and ``revert_model``: what changes class, what is left, what is refused."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import syncbn
from helpers import assert_near, batch, vector

KINDS = {
    nn.BatchNorm1d: syncbn.BatchNorm1d,
    nn.BatchNorm2d: syncbn.BatchNorm2d,
    nn.BatchNorm3d: syncbn.BatchNorm3d,
    nn.SyncBatchNorm: syncbn.SyncBatchNorm,
}
LAZY = {
    nn.LazyBatchNorm1d: syncbn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d: syncbn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d: syncbn.LazyBatchNorm3d,
}


class Named(nn.BatchNorm2d):
    """Adds a method, an attribute and an input check, and keeps the forward."""

    def __init__(self, num_features, tag="none"):
        super().__init__(num_features)
        self.tag = tag

    def described(self):
        return f"{self.tag} {self.num_features}"

    def _check_input_dim(self, input):
        if input.dim() != 4 or input.shape[2] > 8:
            raise ValueError("at most 8 rows")


class NamedAgain(Named):
    pass


class Activated(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


class Scaled(nn.BatchNorm1d):
    def forward(self, input):
        return 2 * super().forward(input)


class Own(nn.modules.batchnorm._BatchNorm):
    """Derived from the base of all, with the stock forward."""

    def _check_input_dim(self, input):
        pass


class Square(nn.Module):
    def forward(self, weight):
        return weight.square()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = self.b = nn.BatchNorm2d(3)
        self.list = [self.a]

    def forward(self, x):
        return self.b(self.a(x))


def inputs(layer):
    dims = {"1": (4, 3), "2": (4, 3, 5, 5), "3": (4, 3, 2, 3, 2)}
    shape = next((s for d, s in dims.items() if f"{d}d" in type(layer).__name__), (4, 3, 7))
    return batch(shape, torch.float32)


def converts_silently(module, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return syncbn.convert_model(module, *args)


@pytest.mark.parametrize(("stock", "ours"), KINDS.items(), ids=lambda c: c.__module__ + c.__name__)
def test_every_kind_at_the_root_and_below(stock, ours):
    root, nested = stock(3), nn.Sequential(nn.ModuleDict({"bn": stock(3)}), nn.ReLU())
    inner = nested[0]["bn"]
    assert converts_silently(root) is root
    assert converts_silently(nested) is nested
    assert type(root) is type(inner) is ours
    assert nested[0]["bn"] is inner
    y = root(inputs(root))
    expected = nn.functional.batch_norm(inputs(root).double(), None, None, None, None, True)
    assert_near(y, expected)
    assert type(syncbn.revert_model(root)) is stock
    assert syncbn.revert_model(nested) is nested
    assert type(inner) is stock


@pytest.mark.parametrize(("stock", "ours"), LAZY.items(), ids=lambda c: c.__module__ + c.__name__)
def test_lazy_kinds(stock, ours):
    layer = converts_silently(stock(momentum=0.3))
    assert type(layer) is ours
    assert type(syncbn.revert_model(layer)) is stock
    layer(x := inputs(converts_silently(layer)))
    assert type(layer) is ours.cls_to_become
    plain = stock(momentum=0.3)
    plain(x)
    assert type(syncbn.revert_model(layer)) is type(plain)
    assert_near(layer.running_var, plain.running_var.double())


def test_a_lazy_layer_already_in_use():
    layer = nn.LazyBatchNorm2d()
    layer(batch((4, 3, 5, 5), torch.float32))
    assert type(converts_silently(layer)) is syncbn.BatchNorm2d


def test_a_layer_under_two_names_stays_one():
    model = converts_silently(Shared())
    assert model.a is model.b is model.list[0]
    assert type(model.a) is syncbn.BatchNorm2d
    model(batch((4, 3, 5, 5), torch.float32))
    assert model.a.num_batches_tracked == 2
    assert type(syncbn.revert_model(model).b) is nn.BatchNorm2d


def test_other_normalizations_are_untouched():
    others = [
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        nn.InstanceNorm2d(3),
        nn.InstanceNorm3d(3),
        nn.LazyInstanceNorm2d(),
        nn.GroupNorm(1, 3),
        nn.LayerNorm(3),
        nn.LocalResponseNorm(3),
    ]
    classes = [type(m) for m in others]
    converts_silently(nn.ModuleList(others))
    assert [type(m) for m in others] == classes


@pytest.mark.parametrize("cls", [Named, NamedAgain])
def test_a_subclass_with_the_stock_forward_keeps_its_methods(cls):
    layer = cls(3, "second")
    converts_silently(layer)
    assert isinstance(layer, cls)
    assert isinstance(layer, syncbn.BatchNorm2d)
    assert type(layer).__name__ == cls.__name__
    assert layer.described() == "second 3"
    with pytest.raises(ValueError, match="at most 8 rows"):
        layer(torch.zeros(2, 3, 9, 9))
    assert type(converts_silently(cls(3))) is type(layer), "one class for all of its instances"
    x = batch((4, 3, 5, 5), torch.float32)
    expected = cls(3)(x)
    for copied in copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer:
        assert copied.described() == "second 3"
        assert_near(copied(x), expected.double())
        assert type(syncbn.revert_model(copied)) is cls


def test_a_subclass_of_the_base_of_all():
    layer = converts_silently(Own(3))
    x = batch((4, 3, 2, 2, 2, 2), torch.float32)
    assert_near(layer(x), Own(3)(x).double())
    assert type(syncbn.revert_model(layer)) is Own


def test_subclasses_with_a_forward_of_their_own_are_named_in_one_warning():
    model = nn.Sequential(Activated(3), Scaled(3), Activated(3), nn.BatchNorm2d(3), Named(3))
    with pytest.warns(UserWarning, match="left .* alone") as caught:
        syncbn.convert_model(model)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.count("Activated") == text.count("Scaled") == 1
    assert "Named" not in text
    assert caught[0].filename == __file__
    assert [type(m) for m in model[:3]] == [Activated, Scaled, Activated]
    assert type(model[3]) is syncbn.BatchNorm2d
    assert isinstance(model[4], syncbn.BatchNorm2d)
    x = batch((4, 3, 5, 5), torch.float32)
    assert_near(model[0](x), nn.BatchNorm2d(3)(x).relu().double())


def test_a_forward_replaced_on_the_instance_is_kept():
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda x: x + 1
    with pytest.warns(UserWarning, match="BatchNorm2d"):
        syncbn.convert_model(layer)
    assert layer(torch.zeros(1)) == 1


@pytest.mark.parametrize("first", ["parametrize", "convert"])
def test_parametrized_layers(first):
    layer, stock = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    for m in layer, stock:
        m.weight.data = vector(3, torch.float32)
    if first == "convert":
        converts_silently(layer)
    for m in layer, stock:
        parametrize.register_parametrization(m, "weight", Square())
    if first == "parametrize":
        converts_silently(layer)
    x = batch((4, 3, 5, 5), torch.float32)
    assert isinstance(layer, syncbn.BatchNorm2d)
    y, expected = layer(x), stock(x)
    assert_near(y, expected.double())
    y.square().sum().backward()
    expected.square().sum().backward()
    original = layer.parametrizations.weight.original
    assert_near(original.grad, stock.parametrizations.weight.original.grad.double(), 1e3)
    parametrize.remove_parametrizations(layer, "weight")
    assert_near(layer.weight, vector(3, torch.float32).double().square())
    assert_near(layer(x), expected.double())


def test_parametrized_layers_are_copied_with_their_group():
    layer = nn.BatchNorm2d(3)
    parametrize.register_parametrization(layer, "weight", Square())
    group = syncbn.sync.Local()
    syncbn.convert_model(layer, group)
    copied = copy.deepcopy(layer)
    assert copied.process_group is group
    assert copied.parametrizations.weight.original is not layer.parametrizations.weight.original
    x = batch((4, 3, 5, 5), torch.float32)
    assert_near(copied(x), layer(x).double())


@pytest.mark.parametrize("order", ["pc", "cp", "pcp", "cpp"])
def test_parametrized_layers_go_back(order):
    """p: parametrize weight, then bias; c: convert; and at the end revert."""
    layer, stock = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    names = iter(["weight", "bias"])
    for act in order:
        if act == "c":
            converts_silently(layer)
        else:
            name = next(names)
            for m in layer, stock:
                parametrize.register_parametrization(m, name, Square())
    assert isinstance(layer, syncbn.BatchNorm2d)
    syncbn.revert_model(layer)
    assert not isinstance(layer, syncbn.BatchNorm2d)
    x = batch((4, 3, 5, 5), torch.float32)
    for m in layer, copy.deepcopy(layer):
        assert_near(m(x), stock(x).double())
    parametrize.remove_parametrizations(layer, "weight")
    if order.count("p") == 2:
        parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is nn.BatchNorm2d


class ZeroWeight(nn.BatchNorm2d):
    """Starts as a residual branch does."""

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def extra_repr(self):
        return "zero, " + super().extra_repr()

    def _forward(self, x):
        return "the user's"

    forward = nn.BatchNorm2d.forward

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        replica.tag = "replica"
        return replica


def test_methods_of_a_subclass_come_before_ours():
    layer = ZeroWeight(3)
    text = repr(layer)
    converts_silently(layer)
    with torch.no_grad():
        layer.weight.fill_(1)
    layer.reset_parameters()
    assert layer.weight.tolist() == [0, 0, 0]
    assert repr(layer) == text
    assert layer._forward(None) == "the user's"
    assert not layer(batch((4, 3, 5, 5), torch.float32)).any()
    assert int(layer.num_batches_tracked) == 1
    x = batch((5, 3, 5, 5), torch.float32)
    with torch.no_grad():
        layer.weight.fill_(1)
    net = syncbn.ModelDataParallel(layer, ["cpu", "cpu"])
    y = torch.cat(net(syncbn.scatter(x, net.devices)))
    assert_near(y, nn.BatchNorm2d(3)(x).double())
    assert layer._replicate_for_data_parallel().tag == "replica"


class LazyNamed(nn.LazyBatchNorm2d):
    cls_to_become = Named


class LazyActivated(nn.LazyBatchNorm2d):
    cls_to_become = Activated


def test_a_lazy_layer_becomes_the_subclass_that_it_names():
    layer = LazyNamed()
    layer.tag = "lazy"
    converts_silently(layer)
    x = batch((4, 3, 5, 5), torch.float32)
    assert_near(layer(x), nn.BatchNorm2d(3)(x).double())
    assert isinstance(layer, syncbn.BatchNorm2d)
    assert layer.described() == "lazy 3"
    assert type(syncbn.revert_model(layer)) is Named
    with pytest.warns(UserWarning, match="LazyActivated"):
        syncbn.convert_model(LazyActivated())


class Locked(nn.BatchNorm2d):
    """Holds what can be neither pickled nor copied."""

    def __init__(self, tag):
        super().__init__(3, eps=0.5)
        self.tag = tag
        self.lock = threading.Lock()

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()


class Cloning(nn.BatchNorm2d):
    def __deepcopy__(self, memo):
        twin = type(self)(self.num_features)
        twin.load_state_dict(self.state_dict())
        twin.tag = "deep"
        return twin

    def __copy__(self):
        twin = type(self)(self.num_features)
        twin.tag = "shallow"
        return twin


def test_a_subclass_copies_and_pickles_as_it_did():
    group = syncbn.sync.Local()
    layer = converts_silently(Locked("tag"), group)
    for twin in copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)):
        assert type(twin) is type(layer)
        assert (twin.tag, twin.eps) == ("tag", 0.5)
        assert twin.lock is not layer.lock
    assert copy.deepcopy(layer).process_group is group
    assert pickle.loads(pickle.dumps(layer)).process_group is None
    again = type(layer)("another")
    assert (again.tag, again.eps, again.num_features) == ("another", 0.5, 3)

    layer = converts_silently(Cloning(3), group)
    layer(batch((4, 3, 5, 5), torch.float32))
    twin = copy.deepcopy(layer)
    assert twin.tag == "deep"
    assert twin.process_group is group
    assert twin.running_mean.tolist() == layer.running_mean.tolist()
    assert copy.copy(layer).tag == "shallow"


def test_a_class_derived_from_a_converted_one():
    layer = converts_silently(Named(3, "tag"))
    parametrize.register_parametrization(layer, "weight", Square())
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(layer)
    assert copy.deepcopy(layer).described() == "tag 3"


class LazyFilled(nn.LazyBatchNorm2d):
    cls_to_become = Named

    def initialize_parameters(self, input):
        super().initialize_parameters(input)
        nn.init.constant_(self.weight, 2)


class Synchronizing(nn.SyncBatchNorm):
    def _check_input_dim(self, input):
        if input.dim() != 3:
            raise ValueError("only 3 dimensions")


def test_methods_that_only_some_of_our_classes_have():
    layer = converts_silently(LazyFilled())
    layer(batch((4, 3, 5, 5), torch.float32))
    assert layer.weight.tolist() == [2, 2, 2]
    layer = converts_silently(Synchronizing(3))
    with pytest.raises(ValueError, match="only 3 dimensions"):
        layer(batch((4, 3, 5, 5), torch.float32))
    assert layer(batch((4, 3, 5), torch.float32)).shape == (4, 3, 5)


def test_pruned_layers():
    """Pruning moves the parameter to weight_orig and leaves a plain tensor as weight."""
    layer, stock = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    for m in layer, stock:
        m.weight.data = torch.tensor([0.1, 2.0, 3.0])
        prune.l1_unstructured(m, "weight", amount=1)
    x = batch((4, 3, 5, 5), torch.float32)
    y = converts_silently(layer)(x)
    assert (y[:, 0] == 0).all()
    assert_near(y, stock(x).double())


class NotBatchNorm2d(nn.Module):
    """As torchvision's FrozenBatchNorm2d: the name contains that of another."""

    def forward(self, x):
        return x + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("compile", ["script", "trace"])
def test_torchscript_is_refused_and_nothing_is_changed(compile):
    def compiled(m):
        if compile == "script":
            return torch.jit.script(m)
        return torch.jit.trace(m, torch.zeros(2, 3, 4, 4))

    model = nn.Sequential(nn.BatchNorm2d(3), compiled(nn.Sequential(nn.BatchNorm2d(3))))
    with pytest.raises(TypeError, match=r"TorchScript module '1\.0'.*before torch\.jit\.script"):
        syncbn.convert_model(model)
    assert type(model[0]) is nn.BatchNorm2d
    with pytest.raises(TypeError, match="TorchScript module 'at the root'"):
        syncbn.convert_model(compiled(nn.BatchNorm2d(3)))
    without = nn.Sequential(nn.BatchNorm2d(3), compiled(NotBatchNorm2d()))
    assert type(converts_silently(without)[0]) is syncbn.BatchNorm2d


@pytest.mark.parametrize("value", [None, "model", nn.BatchNorm2d, [nn.BatchNorm2d(3)]])
def test_only_modules(value):
    with pytest.raises(TypeError, match=r"expected module to be a torch\.nn\.Module, got "):
        syncbn.convert_model(value)


def test_hooks_of_every_sort_survive():
    layer = nn.BatchNorm2d(3)
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append("pre"))
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: calls.append("state"))
    layer.weight.register_hook(lambda _: calls.append("weight"))
    converts_silently(layer)
    layer(batch((4, 3, 5, 5), torch.float32).requires_grad_()).sum().backward()
    layer.state_dict()
    assert sorted(calls) == ["backward", "forward", "pre", "state", "weight"]


def test_converting_twice_changes_the_group_alone():
    model = converts_silently(nn.Sequential(nn.BatchNorm2d(3)))
    group = syncbn.sync.Local()
    assert model[0].process_group is None
    converts_silently(model, group)
    assert type(model[0]) is syncbn.BatchNorm2d
    assert model[0].process_group is group
    converts_silently(model)
    assert model[0].process_group is group, "kept where no other one is given"


@pytest.mark.parametrize("kind", KINDS.values())
def test_revert_of_a_layer_that_was_never_converted(kind):
    layer = kind(3, process_group=syncbn.sync.Local())
    layer.sync, layer.frozen = False, True
    state = copy.deepcopy(layer.state_dict())
    stock = {ours: theirs for theirs, ours in KINDS.items()}[kind]
    assert type(syncbn.revert_model(layer)) is stock
    fresh = stock(3)
    extra = {"process_group"} if stock is nn.SyncBatchNorm else set()
    assert set(layer.__dict__) == set(fresh.__dict__) | extra
    for name, value in layer.state_dict().items():
        assert value.equal(state[name])
    assert repr(layer) == repr(fresh)


class Derived(syncbn.BatchNorm2d):
    """A user's class on ours."""

    def forward(self, x):
        return super().forward(x) + 1


def test_a_class_derived_from_ours_has_nothing_to_go_back_to():
    model = converts_silently(nn.Sequential(Derived(3), nn.BatchNorm2d(3)))
    assert type(model[0]) is Derived
    syncbn.revert_model(model)
    assert type(model[0]) is Derived
    assert type(model[1]) is nn.BatchNorm2d


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_of_another_dtype_or_device(device):
    model = nn.Sequential(nn.BatchNorm2d(3, device=device, dtype=torch.bfloat16))
    tensors = list(model.state_dict(keep_vars=True).values())
    converts_silently(model)
    for a, b in zip(model.state_dict(keep_vars=True).values(), tensors, strict=True):
        assert a is b


class Block(nn.Module):
    """A residual block as in a real network."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_real_network_trains_as_before(layout, device):
    stem = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    stock = nn.Sequential(*stem, Block(8), Block(8), nn.Flatten(), nn.LazyLinear(5)).double()
    stock(torch.zeros(2, 3, 8, 8).double())
    model = converts_silently(copy.deepcopy(stock)).to(device)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (stock, model)]
    for step in range(5):
        x = batch((4, 3, 8, 8), layout=layout, seed=step)
        for m, optimizer, at in zip((stock, model), optimizers, ("cpu", device), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(m(x.to(at)), torch.arange(4, device=at)).backward()
            optimizer.step()
    syncbn.revert_model(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    for (name, a), b in zip(model.state_dict().items(), stock.state_dict().values(), strict=True):
        assert_near(a.double(), b.double(), 1e3, message=name)
