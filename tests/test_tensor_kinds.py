"""Tensors that are no plain memory: they go through the dispatcher, or get a clear error."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import syncbn
from helpers import assert_near, batch, vector
from syncbn.functional import batchnorm2d_sync


class Logging(torch.Tensor):
    """A wrapper whose own memory is empty; the values are in ``inner``."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(t):
            return t.inner if isinstance(t, cls) else t

        tree = torch.utils._pytree
        result = func(*tree.tree_map(unwrap, args), **tree.tree_map(unwrap, kwargs or {}))
        return tree.tree_map(lambda t: cls(t) if isinstance(t, torch.Tensor) else t, result)


class Named(torch.Tensor):
    """A subclass that adds nothing to the dispatch."""


def step(layer, x):
    y = layer(x)
    y.sum().backward()
    return y


def test_meta_tensors_keep_their_shapes():
    layer = syncbn.BatchNorm2d(3, device="meta")
    x = torch.zeros(4, 3, 5, 5, device="meta", requires_grad=True)
    y = step(layer, x)
    assert y.is_meta
    assert y.shape == x.grad.shape == x.shape
    assert layer.weight.grad.is_meta
    assert layer.weight.grad.shape == (3,)


@pytest.mark.parametrize("on", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_tensors(dtype, on):
    """A fake CUDA tensor needs no GPU, but for autograd's own backward."""
    if on == "cuda" and torch.version.cuda is None:
        pytest.skip("a CPU build of PyTorch aborts on fake CUDA tensors that need gradients")
    with FakeTensorMode():
        layer = syncbn.BatchNorm2d(3, dtype=dtype, device=on)
        x = torch.zeros(4, 3, 5, 5, dtype=dtype, device=on).to(memory_format=torch.channels_last)
        x.requires_grad_()
        y = layer(x)
        assert (y.shape, y.dtype, y.device.type) == (x.shape, dtype, on)
        if on == "cpu" or torch.cuda.is_available():
            y.sum().backward()
            assert x.grad.shape == x.shape
            assert layer.weight.grad.shape == (3,)


@pytest.mark.skipif(syncbn._C.build_info()["cuda"] is not None, reason="a build with CUDA kernels")
def test_a_cuda_tensor_meets_a_cpu_only_build():
    """A tensor that says it is on CUDA and has no memory: a wrapper, stripped of its dispatch."""

    class OnCuda(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} before any check")

    x = torch.Tensor._make_wrapper_subclass(OnCuda, (4, 3, 5, 5), device="cuda:0")
    del OnCuda.__torch_dispatch__
    sentence = (
        r"^batchnorm2d_sync: x is on cuda:0, but this syncbn was built without CUDA kernels; build "
        r"it where nvcc and a CUDA build of PyTorch are: SYNCBN_CUDA=1 python -m pip install "
        r"\S[^;]* syncbn$"
    )
    for training in True, False:
        with pytest.raises(RuntimeError, match=sentence):
            batchnorm2d_sync(x, None, None, None, None, training=training)
    with pytest.raises(RuntimeError, match=sentence):
        syncbn.BatchNorm2d(3)(x)


def test_a_wrapper_goes_through_the_dispatcher():
    x = batch((4, 3, 5, 5))
    weight, bias = vector(3), vector(3, seed=1)
    y = batchnorm2d_sync(Logging(x), weight, bias, None, None)
    assert isinstance(y, Logging)
    assert_near(y.inner, batchnorm2d_sync(x, weight, bias, None, None))


def test_a_wrapper_among_the_vectors_is_refused_by_name():
    x = batch((4, 3, 5, 5))
    with pytest.raises(TypeError, match=r"weight to be a plain torch.Tensor, got .*Logging"):
        batchnorm2d_sync(x, Logging(vector(3)), None, None, None)


def test_a_wrapper_cannot_be_exchanged():
    class Two(syncbn.sync.Exchange):
        size = 2

        def all_reduce(self, values):
            raise AssertionError("an error is raised before any collective")

    with pytest.raises(TypeError, match=r"plain torch.Tensor, got Logging"):
        batchnorm2d_sync(Logging(batch((4, 3, 5, 5))), None, None, None, None, Two())


def test_a_subclass_with_plain_memory(device):
    x = batch((4, 3, 5, 5), device=device)
    y = batchnorm2d_sync(x.as_subclass(Named), None, None, None, None)
    assert_near(y, batchnorm2d_sync(x, None, None, None, None))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.Tensor.to_sparse, "x to be a plain torch.Tensor, got torch.sparse_coo"),
        (torch.Tensor.to_sparse_csr, "x to be a plain torch.Tensor, got torch.sparse_csr"),
        (
            lambda x: torch.nested.nested_tensor([x, x]),
            "x to be a plain torch.Tensor, got a nested tensor",
        ),
        (
            lambda x: torch.quantize_per_tensor(x.cpu(), 1.0, 0, torch.quint8),
            "x to be a plain torch.Tensor, got torch.quint8",
        ),
        (
            torch.Tensor.cfloat,
            "x of dtype float32, float16, bfloat16 or float64, got complex64",
        ),
    ],
    ids=["coo", "csr", "nested", "quantized", "complex"],
)
@pytest.mark.filterwarnings("ignore")  # of features in beta, and of those that go
def test_what_is_no_plain_memory_is_refused(make, expected, device):
    with pytest.raises(TypeError) as error:
        batchnorm2d_sync(make(torch.eye(4, device=device)), None, None, None, None)
    assert str(error.value) == f"batchnorm2d_sync: expected {expected}"


def test_the_reference_runs_where_there_are_no_kernels(monkeypatch):
    """What an MPS or XPU tensor meets, played on the CPU."""
    x = batch((4, 3, 5, 5)).requires_grad_()
    weight, bias = (vector(3, seed=i).requires_grad_() for i in range(2))
    dy = batch(x.shape, seed=1)

    def result():
        running = torch.zeros(3).double(), torch.ones(3).double()
        y = batchnorm2d_sync(x, weight, bias, *running)
        return y, *torch.autograd.grad(y, (x, weight, bias), dy), *running

    expected = result()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    refused = AssertionError("the kernels must not be called")
    for op in ("statistics", "normalize", "backward_reduce", "backward_input"):
        monkeypatch.setattr(syncbn._C, op, lambda *a, **k: (_ for _ in ()).throw(refused))
    for a, b in zip(result(), expected, strict=True):
        assert_near(a, b, 10.0)
