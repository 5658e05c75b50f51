"""What the ops of ``_C`` refuse: each message of csrc/bindings.cpp, and nothing is written."""

import pytest
import torch

import op_calls
from helpers import batch
from syncbn import _C

C, SIZE = 3, (4, 3, 5, 5)
FOUR_DTYPES = "of dtype float32, float16, bfloat16 or float64"


class Dispatching(torch.Tensor):
    """A tensor subclass that may keep its values elsewhere."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("an op must not get this far")


def arguments(op):
    """Valid arguments of an op."""
    x = batch(SIZE, torch.float32)
    sums = op_calls.exact_sums(x)
    moments = op_calls.exact_moments(x)
    vectors = {
        "weight": torch.ones(C),
        "bias": torch.zeros(C),
        "running_mean": torch.zeros(C),
        "running_var": torch.ones(C),
        "num_batches_tracked": torch.tensor(0),
    }
    options = {"momentum": 0.1, "eps": 1e-5}
    poisoned = {name: torch.full_like(x, torch.nan) for name in ("y", "dx")}
    sums_dy = torch.full((2 * C,), torch.nan)
    every = {
        "statistics": {"x": x, "sums": torch.full_like(sums, torch.nan)},
        "normalize": {"x": x, "sums": sums, **vectors, "y": poisoned["y"]}
        | {"moments": torch.full_like(moments, torch.nan), **options},
        "backward_reduce": {"dy": x * 2, "x": x, "moments": moments, "sums_dy": sums_dy}
        | {"dweight": torch.full((C,), torch.nan), "dbias": torch.full((C,), torch.nan)},
        "backward_input": {"dy": x * 2, "x": x, "weight": torch.ones(C), "moments": moments}
        | {"sums_dy": torch.ones(2 * C), "dx": poisoned["dx"]},
        "check": {"x": x, **vectors, **options},
    }
    return every[op]


OPS = ("statistics", "normalize", "backward_reduce", "backward_input", "check")


def without_memory():
    x = torch.zeros(SIZE)
    x.untyped_storage().resize_(0)
    return x


x = torch.zeros(SIZE)
v = torch.zeros(C)

# op, argument, bad value, error, text after "op: expected "
REFUSED = [
    *[(op, "x", None, TypeError, "x to be a tensor, got None") for op in OPS],
    *[(op, "x", x.long(), TypeError, f"x {FOUR_DTYPES}, got int64") for op in OPS],
    *[(op, "x", v, ValueError, "x with at least 2 dimensions, got 1") for op in OPS],
    *[
        (op, "x", x.as_subclass(Dispatching), TypeError, "x to be a plain torch.Tensor, got Dispat")
        for op in OPS
    ],
    *[
        (op, "x", torch.zeros(4, 3, 5, 10)[..., ::2], ValueError,
         "x without gaps or overlaps in memory, got a strided view")
        for op in OPS if op != "check"
    ],
    ("statistics", "x", x.bool(), TypeError, f"x {FOUR_DTYPES}, got bool"),
    ("statistics", "x", x.to(torch.uint8), TypeError, f"x {FOUR_DTYPES}, got uint8"),
    ("statistics", "x", x.cfloat(), TypeError, f"x {FOUR_DTYPES}, got "),
    ("statistics", "x", x[:1].expand(SIZE), ValueError, "x without gaps or overlaps in memory"),
    ("statistics", "x", without_memory(), ValueError, "x with memory behind it, got a null"),
    ("statistics", "sums", None, TypeError, "sums to be a tensor, got None"),
    ("statistics", "sums", torch.zeros(7), TypeError, "sums of dtype float64, got float32"),
    ("statistics", "sums", torch.zeros(6).double(), ValueError, "sums of shape [7], got [6]"),
    ("statistics", "sums", torch.zeros(7, 1).double(), ValueError, "sums of shape [7], got [7, 1]"),
    ("statistics", "sums", torch.zeros(14).double()[::2], ValueError, "sums contiguous, got a str"),
    ("normalize", "y", None, TypeError, "y to be a tensor, got None"),
    ("normalize", "y", x.half(), TypeError, "y of dtype float32, as x, got float16"),
    ("normalize", "y", x.int(), TypeError, f"y {FOUR_DTYPES}, got int32"),
    ("normalize", "y", x[:2], ValueError, "y of shape [4, 3, 5, 5], as x, got [2, 3, 5, 5]"),
    ("normalize", "y", x[0], ValueError, "y of shape [4, 3, 5, 5], as x, got [3, 5, 5]"),
    ("normalize", "y", x.transpose(2, 3), ValueError, "y with the strides of x, got others"),
    ("normalize", "weight", torch.ones(4), ValueError, "weight of shape [3], got [4]"),
    ("normalize", "weight", v.int(), TypeError, f"weight {FOUR_DTYPES}, got int32"),
    ("normalize", "bias", torch.ones(6)[::2], ValueError, "bias contiguous, got a strided view"),
    ("normalize", "running_mean", torch.ones(2), ValueError, "running_mean of shape [3], got [2]"),
    ("normalize", "running_var", v.view(3, 1), ValueError, "running_var of shape [3], got [3, 1]"),
    ("normalize", "running_var", None, ValueError, "running_mean and running_var both or neither"),
    ("normalize", "running_mean", None, ValueError, "running_mean and running_var both or neither"),
    ("normalize", "num_batches_tracked", torch.tensor(0.0), TypeError,
     "num_batches_tracked of dtype int64, got float32"),
    ("normalize", "num_batches_tracked", torch.zeros(2).long(), ValueError,
     "num_batches_tracked of shape [], got [2]"),
    ("normalize", "moments", torch.ones(5).double(), ValueError, "moments of shape [7], got [5]"),
    ("backward_reduce", "dy", x[:, :2], ValueError, "dy of shape [4, 3, 5, 5], as x, got [4, 2,"),
    ("backward_reduce", "dy", x.bfloat16(), TypeError, "dy of dtype float32, as x, got bfloat16"),
    ("backward_reduce", "dy", x[:1].expand(SIZE), ValueError, "dy with the strides of x, got oth"),
    ("backward_reduce", "sums_dy", torch.zeros(6).double(), TypeError,
     "sums_dy of dtype float32, got float64"),
    ("backward_reduce", "sums_dy", torch.zeros(7), ValueError, "sums_dy of shape [6], got [7]"),
    ("backward_reduce", "dweight", torch.ones(4), ValueError, "dweight of shape [3], got [4]"),
    ("backward_reduce", "dbias", v.long(), TypeError, f"dbias {FOUR_DTYPES}, got int64"),
    ("backward_input", "dx", x.double(), TypeError, "dx of dtype float32, as x, got float64"),
    ("backward_input", "dx", without_memory(), ValueError, "dx with memory behind it, got a null"),
    ("backward_input", "weight", v.as_subclass(Dispatching), TypeError,
     "weight to be a plain torch.Tensor, got Dispatching"),
    ("backward_input", "sums_dy", torch.ones(5), ValueError, "sums_dy of shape [6], got [5]"),
    ("check", "weight", torch.ones(2), ValueError, "weight of shape [3], got [2]"),
    ("check", "running_var", None, ValueError, "running_mean and running_var both or neither"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "argument", "value", "error", "text"),
    REFUSED,
    ids=[f"{row[0]}-{row[1]}-{i}" for i, row in enumerate(REFUSED)],
)
def test_refused(op, argument, value, error, text):
    good = arguments(op)
    before = {name: t.clone() for name, t in good.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(error) as raised:
        getattr(_C, op)(**good | {argument: value})
    name = "batchnorm2d_sync" if op == "check" else op
    assert str(raised.value).startswith(f"{name}: expected {text}")
    for name, t in before.items():
        assert torch.equal(good[name].nan_to_num(77), t.nan_to_num(77)), f"{name} was written"


@pytest.mark.parametrize("op", ["normalize", "check"])
def test_cumulative_average_needs_the_number_of_batches(op):
    bad = {"momentum": None, "num_batches_tracked": None}
    text = "expected num_batches_tracked for momentum=None, got None"
    with pytest.raises(ValueError, match=text):
        getattr(_C, op)(**arguments(op) | bad)


@pytest.mark.parametrize("op", OPS)
def test_good_arguments_pass(op):
    getattr(_C, op)(**arguments(op))


@pytest.mark.parametrize("value", [[1.0, 2.0], 3.0, "x"])
def test_not_a_tensor(value):
    with pytest.raises(TypeError, match="statistics"):
        _C.statistics(value, torch.zeros(7).double())


def test_meta_tensor_is_not_memory():
    good = arguments("statistics")
    with pytest.raises((TypeError, ValueError, RuntimeError, BufferError)):
        _C.statistics(torch.zeros(SIZE, device="meta"), good["sums"])
    assert good["sums"].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("op", "argument"),
    [("statistics", "sums"), ("normalize", "y"), ("normalize", "weight"), ("backward_input", "dy")],
)
def test_mixed_devices(op, argument):
    good = arguments(op)
    with pytest.raises(ValueError, match=rf"{op}: expected {argument} on cpu, as x, got cuda:0"):
        getattr(_C, op)(**good | {argument: good[argument].cuda()})


def test_parameters_and_tensors_that_require_grad_are_accepted():
    good = arguments("normalize")
    good["x"].requires_grad_()
    good["weight"] = torch.nn.Parameter(good["weight"])
    _C.normalize(**good)
    assert good["y"].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("op", ["statistics", "backward_reduce"])
def test_cuda_ops_need_a_workspace(op):
    good = {name: t.cuda() for name, t in arguments(op).items()}
    with pytest.raises(TypeError, match=f"{op}: expected workspace to be a tensor, got None"):
        getattr(_C, op)(**good)
    with pytest.raises(ValueError, match=f"{op}: expected workspace on cuda:0, as x, got cpu"):
        getattr(_C, op)(**good, workspace=torch.zeros(_C.WORKSPACE_BYTES, dtype=torch.uint8))
    memory = torch.zeros(_C.WORKSPACE_BYTES + 1, dtype=torch.uint8, device="cuda")
    for view in memory[:1].expand(_C.WORKSPACE_BYTES), memory[1:]:
        with pytest.raises(ValueError, match="expected workspace contiguous and aligned to 16"):
            getattr(_C, op)(**good, workspace=view)


def test_more_channels_than_fit():
    x = torch.zeros(1).expand(1, 2**31)
    with pytest.raises(ValueError, match=r"x with fewer than 2\^31 channels, got 2147483648"):
        _C.check(x, None, None, None, None, None, 0.1, 1e-5)
