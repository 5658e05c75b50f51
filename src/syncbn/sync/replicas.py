"""The exchange between replicas: copies of a model in the threads of one process.

``torch.nn.parallel.replicate`` and ``ModelDataParallel`` make replicas on one thread: of each
module all of them, one after another, and only then their parameters. So each replica of a layer
learns here which replication it is of, and which replica; how many take part is known before the
first one runs.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .exchange import Exchange
from .joined import Addend, batch_norm
from .rendezvous import Rendezvous

if TYPE_CHECKING:
    from .._ops import Ops

_DISTRIBUTED = dist.is_available()
_thread = threading.local()  # .last: the replica made last on this thread, and its place; both weak


class Replica(Exchange):
    """The place of one layer of one replica; the ``process_group`` of that layer.

    Attributes:
        rendezvous: where the replicas of this replication meet.
        layer: the number of the layer among the synchronized layers of the model.
        index: the number of the replica.
        group: the ``process_group`` of the original layer.
    """

    def __init__(
        self, rendezvous: Rendezvous, layer: int, index: int, original: nn.Module, group: Any
    ) -> None:
        self.rendezvous = rendezvous
        self.layer = layer
        self.index = index
        self.group = group
        self._original = id(original)
        self._parameters = tuple(original._parameters)  # their names
        self._children = {name: id(child) for name, child in original._modules.items()}
        self._calls = 0
        self._kept: tuple[Tensor, bool] | None = None  # the last sums, and whether grad mode was on

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.rendezvous.size

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return self.rendezvous.size > 1

    def all_reduce(self, values: Tensor) -> Tensor:
        if not self.joins:
            return values
        return self.meet(Addend(values, None)).sums.clone()  # replicas on the CPU share the total

    def batch_norm(
        self,
        ops: Ops,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float | None,
        eps: float,
    ) -> Tensor:
        """``batchnorm2d_sync`` over the replicas, after its checks; only the first replica, which
        has the original's running statistics, moves them."""
        running = running_mean, running_var, num_batches_tracked
        if self.index != 0 or self.rendezvous.recomputes:
            running = None, None, None
        return batch_norm(self, ops, x, weight, bias, (*running, momentum, eps))

    def meet(self, addend: Addend) -> Addend:
        """``addend`` with the total, once every replica has made this call of this layer."""
        call, self._calls = self._calls, self._calls + 1
        if call == 0 and (self.group is not None or (_DISTRIBUTED and dist.is_initialized())):
            self._check_group()
        self.rendezvous.meet(self, (self.layer, call), addend)
        # Detached: a replica must not hold the graph that may hold it, by checkpointing.
        self._kept = addend.sums.detach(), torch.is_grad_enabled()
        return addend

    def _check_group(self) -> None:
        from . import exchange_for

        exchange = exchange_for(self.group)
        if isinstance(exchange, Replica):
            raise RuntimeError("expected replicas of one model, got replicas inside of replicas")
        if exchange.size > 1:
            raise RuntimeError(
                "replicas in threads and a process group cannot share one mini-batch: expected one "
                "replica per process, or process_group=syncbn.sync.Local() to synchronize the "
                f"replicas of each process alone, got {self.size} replicas and {exchange!r}"
            )

    def recall(self) -> Tensor:
        """The sums of the forward pass, for its recomputation inside a backward pass.

        Raises:
            RuntimeError: the recomputation cannot be told from others, or its gradients could not
                reach the other replicas.
        """
        if self._kept is None or self._calls != 1:
            raise RuntimeError(
                "expected a synchronized layer inside activation checkpointing under replicas to "
                f"be called once per forward, got {self._calls} calls"
            )
        sums, with_grad = self._kept
        if torch.is_grad_enabled() and not with_grad:
            raise RuntimeError(
                "expected activation checkpointing under replicas with use_reentrant=False, got "
                "the reentrant kind, which differentiates each replica apart from the others"
            )
        return sums

    def fail(self, error: BaseException) -> None:
        """Lets the other replicas know that this one raised."""
        # Inside a backward pass nobody waits, and checkpointing ends recomputations by exceptions.
        if torch._C._current_graph_task_id() == -1:
            self.rendezvous.fail(self.index, error)

    def __repr__(self) -> str:
        return f"replica {self.index}"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a replica belongs to its threads and cannot be pickled")


def take_part(original: nn.Module, replica: nn.Module, group: Any) -> Replica:
    """The place of ``replica``, made just now of the layer ``original``, among its replicas."""
    last, place = (ref() for ref in getattr(_thread, "last", (_nothing, _nothing)))
    rendezvous, layer, index = None, 0, 0
    if last is not None and place is not None and not _is_complete(last, place):
        if place._original == id(original):
            rendezvous, layer, index = place.rendezvous, place.layer, place.index + 1
        elif id(original) not in place.rendezvous.layers:
            rendezvous, layer = place.rendezvous, place.layer + 1
    if rendezvous is None:
        rendezvous = Rendezvous()
    if index == 0:
        rendezvous.layers.append(id(original))
    if layer == 0:
        rendezvous.add(replica)
    place = Replica(rendezvous, layer, index, original, group)
    _thread.last = weakref.ref(replica), weakref.ref(place)
    return place


def _nothing() -> None:
    return None


def _is_complete(replica: nn.Module, place: Replica) -> bool:
    """Whether the replication that made ``replica`` is over.

    Its last act is to give each replica what stands for the original's children, then for its
    parameters, None included. A parametrized layer has no parameters of its own, but children.
    """
    return (
        place.rendezvous.started
        or any(
            name in replica.__dict__ or name in replica._parameters for name in place._parameters
        )
        or any(id(replica._modules[name]) != child for name, child in place._children.items())
    )
