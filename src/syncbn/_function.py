"""Custom autograd functions at the host's pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import Function


def direct(function: type[Function]) -> Callable[..., Any]:
    """``function.apply`` in eager mode, without the Python that PyTorch runs around it.

    Forward that is what serves ``torch.func``, backward the choice between ``backward`` and
    ``vjp``: 3 us of the 30 that a small layer takes.

    Args:
        function: has a ``backward`` and no ``vjp``. Its own ``apply`` gets the faster backward too.
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return super(Function, function).apply  # type: ignore[misc,no-any-return]


def is_batched(dy: Tensor) -> bool:
    """Whether ``dy`` stands for a batch of gradients, or for another tensor of ``torch.func``:
    without memory for kernels, but not a subclass."""
    return is_legacy_batchedtensor(dy) or is_functorch_wrapped_tensor(dy)
