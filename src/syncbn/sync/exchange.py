"""What an exchange between the participants of a mini-batch is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class Exchange(ABC):
    """A way for the ``size`` participants that share a mini-batch to add up small vectors.

    A participant is a rank of a process group, or a replica in a thread. Implement this class to
    synchronize over something new; pass an instance wherever a ``group`` is taken.

    Every participant must make the same calls in the same order with tensors of the same shape and
    dtype.
    """

    #: Number of participants.
    size: int

    #: Whether the participants share one autograd graph. Then ``batch_norm`` of the exchange, which
    #: puts nodes of its own into it, takes the place of ``all_reduce`` each way.
    joins: bool = False

    @abstractmethod
    def all_reduce(self, values: Tensor) -> Tensor:
        """Sums over all participants.

        Args:
            values: [K], floating point, this participant's addend. May be overwritten.

        Returns:
            [K], the same dtype and device: the sum, bitwise equal on every participant.
        """

    def batch_norm(self, ops: Any, x: Tensor, *rest: Any) -> Tensor:
        """Where ``joins``: ``y`` from the checked arguments of ``batchnorm2d_sync``."""
        raise NotImplementedError
