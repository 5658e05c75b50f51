"""How participants of a mini-batch exchange sums: one small interface, one file per way."""

from __future__ import annotations

import torch.distributed as dist
from torch.compiler import is_compiling

from .exchange import Exchange
from .local import LOCAL, Local
from .process_group import ProcessGroupExchange, create_process_group
from .rendezvous import ReplicaError, set_replica_timeout
from .replicas import Replica

__all__ = [
    "Exchange",
    "Local",
    "ProcessGroupExchange",
    "Replica",
    "ReplicaError",
    "create_process_group",
    "exchange_for",
    "set_replica_timeout",
]

_AVAILABLE = dist.is_available()


def exchange_for(group: dist.ProcessGroup | Exchange | None) -> Exchange:
    """The exchange that a ``group`` argument stands for.

    Args:
        group: ``None`` for the default process group, or no exchange where none is initialized; a
            ``ProcessGroup``; or an ``Exchange``, returned as it is. A process group of one rank
            exchanges nothing.

    Returns:
        The exchange of this participant.

    Raises:
        ValueError: this rank is not a member of ``group``.
        TypeError: ``group`` is something else.
    """
    if group is None:
        group = dist.GroupMember.WORLD if _AVAILABLE else None
        # A compiler guards its graph by what it read of WORLD, which to that of PyTorch 2.11 is a
        # process group even where there is none.
        if group is None or (is_compiling() and not dist.is_initialized()):
            return LOCAL
    elif isinstance(group, Exchange):
        return group
    elif not _AVAILABLE or not isinstance(group, dist.ProcessGroup):
        # new_group gives this mark to the ranks that it leaves out.
        if _AVAILABLE and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: expected a process group that this rank is a member of")
        raise TypeError(
            "group: expected None, a torch.distributed.ProcessGroup or a syncbn.sync.Exchange, "
            f"got {type(group).__name__}"
        )
    exchange = ProcessGroupExchange(group)
    return exchange if exchange.size > 1 else LOCAL
