"""One call of each op with outputs that are poisoned beforehand and guarded on both sides.

``ops`` is ``syncbn._C`` or ``syncbn.reference``: their signatures are the same. A result is a
dictionary of outputs.
"""

import torch

from helpers import double
from syncbn import reference
from syncbn._workspace import memory_for

GUARD = 3  # elements before and after each output: an odd number, so that outputs are unaligned too


def output(like, dtype=None):
    """NaN in the shape, strides and device of ``like``, between guards."""
    dtype = dtype or like.dtype
    memory = torch.full((like.numel() + 2 * GUARD,), 7, dtype=dtype, device=like.device)
    view = memory.as_strided(like.shape, like.stride(), GUARD)
    return view.fill_(torch.nan)


def checked(**outputs):
    """The outputs, once their guards are found untouched."""
    for name, view in outputs.items():
        if view is not None:
            memory = view._base
            guards = torch.cat([memory[:GUARD], memory[GUARD + view.numel() :]])
            assert bool((guards == 7).all()), f"{name} was written outside its memory"
    return outputs


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def channel_output(x, dtype, values=None):
    """Guarded [values], by default [C]."""
    return output(x.new_empty(values or x.shape[1], dtype=dtype))


def workspace(x):
    return memory_for(x).workspace


def guarded_copy(v):
    """A guarded copy of a [C] tensor that an op updates in place."""
    return None if v is None else output(v).copy_(v)


def statistics(ops, x):
    sums = channel_output(x, torch.float64, 2 * x.shape[1] + 1)
    ops.statistics(x, sums, workspace(x))
    return checked(sums=sums)


def normalize(ops, x, sums, vectors=(None,) * 4, batches=None, momentum=0.1, eps=1e-5):
    """``vectors``: weight, bias, running_mean, running_var."""
    weight, bias, running_mean, running_var = vectors
    running_mean, running_var = guarded_copy(running_mean), guarded_copy(running_var)
    batches = None if batches is None else torch.tensor(batches, device=x.device)
    y = output(x)
    moments = channel_output(x, torch.float64, 2 * x.shape[1] + 1)
    ops.normalize(
        x, weight, bias, sums, running_mean, running_var, batches, y, moments, momentum, eps
    )
    outputs = checked(y=y, moments=moments, running_mean=running_mean, running_var=running_var)
    return outputs | {"num_batches_tracked": batches}


def backward_reduce(ops, dy, x, moments, dweight_dtype=None, dbias_dtype=None):
    """dweight and dbias are wanted where they have a dtype."""
    sums_dy = channel_output(x, accumulator(x.dtype), 2 * x.shape[1])
    dweight = dweight_dtype and channel_output(x, dweight_dtype)
    dbias = dbias_dtype and channel_output(x, dbias_dtype)
    ops.backward_reduce(dy, x, moments, sums_dy, dweight, dbias, workspace(x))
    return checked(sums_dy=sums_dy, dweight=dweight, dbias=dbias)


def backward_input(ops, dy, x, weight, moments, sums_dy):
    dx = output(x)
    ops.backward_input(dy, x, weight, moments, sums_dy, dx)
    return checked(dx=dx)


def exact_sums(x):
    return statistics(reference, double(x))["sums"]


def exact_moments(x, eps=1e-5):
    return normalize(reference, double(x), exact_sums(x), eps=eps)["moments"]
