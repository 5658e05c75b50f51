"""Batch normalization over replicas: three autograd nodes, of which one joins the replicas.

    x ── statistics ── join ── normalize ── y        one row per replica, through the same join
     └───────────────────────────┘

Forward, only [2C + 1] sums pass the join; the replicas' threads wait for each other there.
Backward, nothing waits: normalize reduces dy to [2C] sums, which carry dy as an attribute, join
adds the sums up, and statistics computes dx. Where the loss does not use a replica's y, normalize
does not run, and dy is 0.

Two tensors go from node to node: the sums, and a link without values, whose gradient is what is
said above. With ``create_graph=True``, or for a batch of gradients, the nodes instead give the
gradients of what they compute, in PyTorch's own operations and by way of the sums, so that all of
it can be differentiated again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import reference
from .._function import direct, is_batched
from .._ops import KERNELS, alike, sums_dy_for

if TYPE_CHECKING:
    from .._ops import Ops
    from .replicas import Replica


class Addend:
    """What a replica brings to the join, and takes from it.

    ``sums`` [K]: its own, then the total. ``link`` [2C], or None without autograd.
    """

    __slots__ = ("event", "link", "stream", "sums")

    def __init__(self, sums: Tensor, link: Tensor | None) -> None:
        self.sums = sums
        self.link = link
        self.stream = torch.cuda.current_stream(sums.device) if sums.is_cuda else None
        self.event = None if self.stream is None else self.stream.record_event()


class _Call:
    """What the two nodes of one call share."""

    __slots__ = ("moments", "ops", "weight")

    def __init__(self, ops: Ops, weight: Tensor | None) -> None:
        self.ops = ops
        self.weight = weight  # no input of the statistics, which need it for dx alone
        self.moments: Tensor | None = None


def batch_norm(
    replica: Replica,
    ops: Ops,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    """y [N, C, ...] of one replica. ``options``: the rest of the arguments of ``ops.normalize``."""
    call = _Call(ops, weight)
    if torch._C._current_graph_task_id() != -1:
        # A recomputation, of one replica. The same nodes as before, for checkpointing counts what
        # they save.
        sums = replica.recall()
        _, link = _apply_statistics(x, call, sums)
    else:
        addend = replica.meet(Addend(*_apply_statistics(x, call, None)))
        sums, link = addend.sums, addend.link
    y: Tensor = _apply_normalize(x, weight, bias, sums, link, call, options)
    return y


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, sums: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, call.weight)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.ops.statistics(x) if sums is None else sums.clone(), sums_dy_for(x)

    @staticmethod
    def backward(ctx: Any, dsums: Tensor | None, sums_dy: Tensor | None) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        call: _Call = ctx.call
        dx = None if dsums is None else reference.backward_statistics(dsums, x)
        if sums_dy is not None:
            if not hasattr(sums_dy, "dy"):
                raise RuntimeError(
                    "expected autograd's own engine under replicas, got one that copies gradients "
                    "on their way (compiled autograd)"
                )
            dy = torch.zeros_like(x) if sums_dy.dy is None else sums_dy.dy
            if call.ops is KERNELS:
                x, dy = alike(x, dy)
            assert call.moments is not None
            through = call.ops.backward_input(dy, x, weight, call.moments, sums_dy)
            dx = through if dx is None else dx + through
        return dx, None, None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        sums: Tensor,
        link: Tensor,
        call: _Call,
        options: tuple[Any, ...],
    ) -> Tensor:
        y, call.moments = call.ops.normalize(x, weight, bias, sums, *options)
        ctx.save_for_backward(x, weight, sums)
        ctx.call = call
        ctx.bias = bias
        ctx.eps = options[-1]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sums = ctx.saved_tensors
        call: _Call = ctx.call
        need_dx, need_dweight, need_dbias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_batched(dy):
            dx, dweight, dsums = reference.backward_normalize(dy, x, weight, sums, ctx.eps)
            dbias = reference.sum_per_channel(dy, ctx.bias.dtype) if need_dbias else None
            return dx, dweight, dbias, dsums, None, None, None
        if call.ops is KERNELS:
            x, dy = alike(x, dy)
        assert call.moments is not None
        sums_dy, dweight, dbias = call.ops.backward_reduce(
            dy,
            x,
            call.moments,
            weight if need_dweight else None,
            ctx.bias if need_dbias else None,
        )
        sums_dy.dy = dy if need_dx else None  # type: ignore[attr-defined]
        return None, dweight, dbias, None, sums_dy, None, None


class _Join(torch.autograd.Function):
    """All sums, then all links, to as many totals and links: the node that all replicas share."""

    @staticmethod
    def forward(ctx: Any, addends: list[Addend], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.places = [(t.device, t.dtype) for t in tensors]
        ctx.set_materialize_grads(False)
        links = [link.detach() for link in tensors[len(addends) :]]
        return *_totals(addends), *links

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # By autograd's rule the gradients are ready on this node's stream, which is the first
        # replica's; copies between devices are ordered with the current streams of both.
        n = len(ctx.places) // 2
        results: list[Tensor | None] = [None]
        for half in (slice(0, n), slice(n, 2 * n)):
            places = ctx.places[half]
            total = add_up([v for v in gradients[half] if v is not None], places[0][0])
            results += [
                _copy(total, *place) if needed and total is not None else None
                for place, needed in zip(places, ctx.needs_input_grad[1:][half], strict=True)
            ]
        for i, sums_dy in enumerate(gradients[n:], start=n + 1):
            result = results[i]
            if result is not None:
                results[i] = _carrying(sums_dy, result)
        return tuple(results)


def _carrying(sums_dy: Tensor | None, total: Tensor) -> Tensor:
    """``total`` as a tensor of its own, with the dy that came with ``sums_dy``."""
    total = total.detach()
    if sums_dy is None:
        total.dy = None  # type: ignore[attr-defined]
    elif hasattr(sums_dy, "dy"):
        total.dy = sums_dy.dy  # type: ignore[attr-defined]
    return total


_apply_statistics = direct(_Statistics)
_apply_normalize = direct(_Normalize)
_apply_join = direct(_Join)


def join(addends: list[Addend]) -> None:
    """Puts the total into every replica's addend, and the join into their graph.

    Called by one thread while the others wait. The sum is taken on the first replica's device and
    stream, in the order of the replicas; each replica's copy is made on its own device and stream.
    """
    if all(a.stream is None for a in addends):
        _join(addends)
        return
    with contextlib.ExitStack() as stack:
        # Each replica's stream is the current one of its device, and at last the first's of all.
        for a in reversed(addends):
            if a.stream is not None:
                stack.enter_context(torch.cuda.stream(a.stream))
        _join(addends)


def _join(addends: list[Addend]) -> None:
    totals: Sequence[Tensor]
    if any(a.link is not None and a.link.requires_grad for a in addends):
        tensors = [a.sums for a in addends] + [a.link for a in addends]
        # The thread that came last may be in another mode than those whose x need gradients.
        with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            joined = _apply_join(addends, *tensors)
        totals = joined[: len(addends)]
        for a, link in zip(addends, joined[len(addends) :], strict=True):
            a.link = link
    else:
        totals = _totals(addends)
    for a, total in zip(addends, totals, strict=True):
        a.sums = total


def _totals(addends: list[Addend]) -> list[Tensor]:
    """The total, for each replica on its device."""
    first = addends[0]
    for a in addends:
        if first.stream is not None and a.event is not None:
            first.stream.wait_event(a.event)
    total = add_up([a.sums for a in addends], first.sums.device)
    ready = None if first.stream is None else first.stream.record_event()
    totals = [total]
    for a in addends[1:]:
        if a.stream is None:
            shared = a.sums.device == total.device  # nobody writes to it
            totals.append(total.detach() if shared else total.to(a.sums.device))
            continue
        with torch.cuda.stream(a.stream):
            if ready is not None and a.stream != first.stream:
                a.stream.wait_event(ready)
            totals.append(total.to(a.sums.device, non_blocking=True, copy=True))
        if total.device == a.sums.device and a.stream != first.stream:
            total.record_stream(a.stream)
    return totals


def add_up(values: list[Tensor], device: torch.device) -> Any:
    """The sum on ``device``, in the order of the list; None of none."""
    total = None
    for v in values:
        v = _copy(v, device, values[0].dtype)
        total = v if total is None else total + v
    return total


def _copy(v: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if v.device == device and v.dtype is dtype:
        return v
    # Towards the CPU, a copy that does not block would be read before it has arrived.
    return v.to(device, dtype, non_blocking=device.type != "cpu")
