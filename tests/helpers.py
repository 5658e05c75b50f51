"""Tensors in every memory layout, and comparison with float64."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Half the distance between neighbouring numbers, relative (normal) and absolute (subnormal).
_ROUNDING = {
    torch.float32: (2**-24, 2**-150),
    torch.float16: (2**-11, 2**-25),
    torch.bfloat16: (2**-8, 2**-134),
    torch.float64: (2**-53, 0.0),
}

# The order of dimensions in memory, slowest first.
_ORDERS = {
    "contiguous": lambda dims: [*range(dims)],
    "channels_last": lambda dims: [0, *range(2, dims), 1],
    "transposed": lambda dims: [0, 1, *reversed(range(2, dims))],
    "channel_outermost": lambda dims: [1, 0, *range(2, dims)],
    "channel_between": lambda dims: [*range(2, dims), 1, 0],
}
LAYOUTS = tuple(_ORDERS)


def in_layout(t, layout):
    """``t`` with its dimensions in another order in memory."""
    order = _ORDERS[layout](t.dim())
    back = sorted(range(t.dim()), key=order.__getitem__)
    return t.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def batch(shape, dtype=torch.float64, layout="contiguous", device="cpu", seed=0):
    """Random values whose mean and spread differ from channel to channel.

    Two values of a channel in a row lie on either side of its mean: few have a variance too.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    channel = torch.arange(shape[1]).view(per_channel(x))
    value = torch.arange(x.numel() // shape[1]).view(shape[0], 1, *shape[2:])
    x = x * (1 - (value + channel) % 2 * 2) * (1 + channel % 3) + channel % 5 - 2
    return in_layout(x.to(dtype), layout).to(device)


def vector(channels, dtype=torch.float64, device="cpu", seed=0):
    """[C], between 0.5 and 1.5 in size, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.rand(channels, generator=generator, dtype=torch.float64) + 0.5
    v[1::2] *= -1
    return v.to(dtype).to(device)


def per_channel(x):
    """The shape in which a [C] tensor broadcasts against ``x``."""
    return [-1 if i == 1 else 1 for i in range(x.dim())]


def values_dims(x):
    """All dimensions but the channels'."""
    return [0, *range(2, x.dim())]


def double(t):
    return None if t is None else t.detach().to(torch.float64)


def assert_near(actual, expected, scale=None, computed_in=None, message="", roundings=1):
    """``actual`` is the float64 ``expected``, rounded once to its dtype.

    Before that it was computed with an error of 1e-5 (1e-12 for float64) of ``scale``: the size of
    what was added up, by default the largest value. NaN and infinities are where they are expected.
    ``roundings`` is 2 where ``expected`` has been rounded to that dtype too.
    """
    assert actual.shape == expected.shape, f"{message}: {actual.shape}, not {expected.shape}"
    computed_in = computed_in or actual.dtype
    arithmetic = 1e-12 if computed_in == torch.float64 else 1e-5
    relative, smallest = _ROUNDING[actual.dtype]
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = e.isfinite()
    same = torch.where(finite, 0, e).nan_to_num(7) == torch.where(finite, 0, a).nan_to_num(7)
    assert bool(same.all()), f"{message}: NaN or infinity in other places"
    a, e = torch.where(finite, a, 0), torch.where(finite, e, 0)
    if scale is None:
        scale = e.abs().max() if e.numel() else 0.0
    scale = torch.as_tensor(scale, dtype=torch.float64).cpu()
    bound = roundings * (1.01 * relative * e.abs() + smallest) + arithmetic * scale
    excess = ((a - e).abs() - bound).nan_to_num(torch.inf)
    if bool((excess > 0).any()):
        worst = int(excess.argmax())
        raise AssertionError(
            f"{message}: {int((excess > 0).sum())} of {e.numel()} values are wrong; the worst is "
            f"{a.flatten()[worst].item()!r} instead of {e.flatten()[worst].item()!r}"
        )


def assert_same_bits(actual, expected, message=""):
    """Bitwise equal, NaN included."""
    assert actual.dtype == expected.dtype, message
    assert actual.shape == expected.shape, message
    same = [t.detach().cpu().reshape(-1).view(torch.uint8) for t in (actual, expected)]
    assert torch.equal(*same), message


class Recorded(TorchDispatchMode):
    """Names the ops that PyTorch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))
