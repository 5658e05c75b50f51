"""Batch normalization over replicas: three autograd nodes, of which one joins the replicas.

    x ── statistics ── join ── normalize ── y        one row per replica, through the same join
     └───────────────────────────┘

Forward, only [2C + 1] sums pass the join; the replicas' threads wait for each other there.
Backward, nothing waits: normalize reduces dy to [2C] sums and leaves dy for the statistics node of
its own replica, join adds the sums up, and statistics computes dx. Where the loss does not use a
replica's y, normalize does not run, and dy is 0.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._ops import KERNELS, link_for, with_layout_of

if TYPE_CHECKING:
    from .._ops import Ops
    from .replicas import Replica


class Addend:
    """What a replica brings to the join, and takes from it.

    ``sums`` [K]: its own, then the total. ``link`` [2C] or None: no values, the gradient's way.
    """

    __slots__ = ("event", "link", "stream", "sums")

    def __init__(self, sums: Tensor, link: Tensor | None) -> None:
        self.sums = sums
        self.link = link
        self.stream = torch.cuda.current_stream(sums.device) if sums.is_cuda else None
        self.event = None if self.stream is None else self.stream.record_event()


class _Call:
    """What the two nodes of one call share."""

    __slots__ = ("dy", "eps", "graph_task", "moments", "ops")

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.moments: Tensor | None = None
        self.dy: Tensor | None = None
        self.graph_task = -1  # the backward pass that dy is of


def batch_norm(
    replica: Replica,
    ops: Ops,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    """y [N, C, ...] of one replica. ``options``: the rest of the arguments of ``ops.normalize``."""
    call = _Call(ops)
    # For dx alone, also where the weight needs a gradient and x does not.
    constant = None if weight is None else weight.detach()
    if torch._C._current_graph_task_id() != -1:
        # A recomputation, of one replica. The same nodes as before, for checkpointing counts what
        # they save.
        sums = replica.recall()
        _, link = _Statistics.apply(x, constant, call, sums)
    else:
        addend = replica.meet(Addend(*_Statistics.apply(x, constant, call, None)))
        sums, link = addend.sums, addend.link
    y: Tensor = _Normalize.apply(x, weight, bias, link, call, sums, options)
    return y


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, call: _Call, sums: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.call = call
        ctx.set_materialize_grads(False)
        sums = call.ops.statistics(x) if sums is None else sums.clone()
        ctx.mark_non_differentiable(sums)
        return sums, link_for(x)

    @staticmethod
    def backward(ctx: Any, _: None, sums_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if sums_dy is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        call: _Call = ctx.call
        dy, call.dy = call.dy, None
        if dy is None or call.graph_task != torch._C._current_graph_task_id():
            dy = torch.zeros_like(x)
        assert call.moments is not None
        return call.ops.backward_input(dy, x, weight, call.moments, sums_dy), None, None, None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        link: Tensor,
        call: _Call,
        sums: Tensor,
        options: tuple[Any, ...],
    ) -> Tensor:
        y, call.moments = call.ops.normalize(x, weight, bias, sums, *options)
        ctx.save_for_backward(x, weight)
        ctx.call = call
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: expected one participant or a process group, got replicas, "
                "whose gradients cannot be differentiated again"
            )
        x, weight = ctx.saved_tensors
        call: _Call = ctx.call
        _, need_dweight, need_dbias, need_sums, *_ = ctx.needs_input_grad
        if call.ops is KERNELS:
            dy = with_layout_of(x, dy)
        assert call.moments is not None
        sums_dy, dweight, dbias = call.ops.backward_reduce(
            dy,
            x,
            call.moments,
            weight.dtype if need_dweight else None,
            ctx.bias_dtype if need_dbias else None,
        )
        if need_sums and ctx.needs_input_grad[0]:
            call.dy, call.graph_task = dy, torch._C._current_graph_task_id()
        return None, dweight, dbias, sums_dy, None, None, None


class _Join(torch.autograd.Function):
    """Links to links: the one node that all replicas share."""

    @staticmethod
    def forward(ctx: Any, *links: Tensor) -> tuple[Tensor, ...]:
        ctx.places = [(link.device, link.dtype) for link in links]
        ctx.set_materialize_grads(False)
        return tuple(torch.empty_like(link) for link in links)

    @staticmethod
    def backward(ctx: Any, *sums_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        # By autograd's rule the gradients are ready on this node's stream, which is the first
        # replica's; copies between devices are ordered with the current streams of both.
        device, _ = ctx.places[0]
        total = add_up([v for v in sums_dy if v is not None], device)
        if total is None:
            return (None,) * len(sums_dy)
        return tuple(
            _copy(total, *place) if needed else None
            for place, needed in zip(ctx.places, ctx.needs_input_grad, strict=True)
        )


def join(addends: list[Addend]) -> None:
    """Puts the total into every replica's addend, and the join into their graph.

    Called by one thread while the others wait. The sum is taken on the first replica's device and
    stream, in the order of the replicas; each replica's copy is made on its own device and stream.
    """
    if any(a.stream is not None for a in addends):
        _join_on_streams(addends)
        return
    total = add_up([a.sums for a in addends], addends[0].sums.device)
    _link(addends)
    for a in addends:
        a.sums = _copy(total, a.sums.device, total.dtype)


def _join_on_streams(addends: list[Addend]) -> None:
    first = addends[0]
    with contextlib.ExitStack() as stack:
        # Each replica's stream is the current one of its device, and at last the first's of all.
        for a in reversed(addends):
            if a.stream is not None:
                stack.enter_context(torch.cuda.stream(a.stream))
        for a in addends:
            if first.stream is not None and a.event is not None:
                first.stream.wait_event(a.event)
        total = add_up([a.sums for a in addends], first.sums.device)
        ready = None if first.stream is None else first.stream.record_event()
        _link(addends)
        for a in addends:
            if a.stream == first.stream or a.stream is None:
                a.sums = _copy(total, a.sums.device, total.dtype)
                continue
            with torch.cuda.stream(a.stream):
                if ready is not None:
                    a.stream.wait_event(ready)
                a.sums = total.to(a.sums.device, non_blocking=True, copy=True)
            if total.device == a.sums.device:
                total.record_stream(a.stream)


def _link(addends: list[Addend]) -> None:
    links = [a.link for a in addends if a.link is not None]
    if any(link.requires_grad for link in links):
        # The thread that came last may be in another mode than those whose inputs need gradients.
        with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            joined = _Join.apply(*links)
        for a, link in zip(addends, joined, strict=True):
            a.link = link


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
