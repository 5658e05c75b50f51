"""The exchange of a participant that is alone."""

from __future__ import annotations

from torch import Tensor

from .exchange import Exchange


class Local(Exchange):
    """One participant: the sum is its own addend."""

    size = 1

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def __repr__(self) -> str:
        return "Local()"


LOCAL = Local()
