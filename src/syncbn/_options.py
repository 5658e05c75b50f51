"""What the layers here can be told beyond PyTorch's: the options of Gluon's BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Initializer = Callable[[Tensor], object]

_REDUCED = frozenset({torch.float16, torch.bfloat16})
INITIALIZERS = ("weight_init", "bias_init", "running_mean_init", "running_var_init")
OPTIONS = frozenset(
    {"center", "scale", "channel_axis", "use_global_stats", "keep_fp32", *INITIALIZERS}
)


class Options(_BatchNorm):
    """The attributes that the options set, at their defaults, and what follows from them.

    Attributes:
        channel_axis: the dimension of the channels, also counted from the end; -1 for [N, ..., C].
        frozen: True normalizes by the running statistics and leaves them alone, also in training.
        keep_fp32: parameters and running statistics that would become float16 or bfloat16, by
            ``.half()``, ``.bfloat16()`` or ``.to(dtype)``, are float32 instead. The input may be
            of another dtype than they are.
        weight_init, bias_init, running_mean_init, running_var_init: None for 1, 0, 0, 1; or a
            callable that fills a tensor in place, as those of ``torch.nn.init``.
    """

    channel_axis: int = 1
    frozen: bool = False
    keep_fp32: bool = False
    weight_init: Initializer | None = None
    bias_init: Initializer | None = None
    running_mean_init: Initializer | None = None
    running_var_init: Initializer | None = None

    def _set_options(
        self,
        *,
        center: bool = True,
        scale: bool = True,
        channel_axis: int = 1,
        use_global_stats: bool = False,
        keep_fp32: bool = False,
        **initializers: Initializer | None,
    ) -> None:
        """Applies constructor arguments to a layer that PyTorch's constructor has made."""
        if not scale:
            self.register_parameter("weight", None)
        if not center:
            self.register_parameter("bias", None)
        # Class attributes are the defaults: what is not set takes no place in the instance.
        if channel_axis != 1:
            self.channel_axis = channel_axis
        if use_global_stats:
            if not self.track_running_stats:
                raise ValueError(
                    "use_global_stats: expected running statistics, got track_running_stats=False"
                )
            self.frozen = True
        if keep_fp32:
            self.keep_fp32 = True
            self._apply(lambda t: t)
        given = {k: v for k, v in initializers.items() if v is not None}
        for name, initializer in given.items():
            setattr(self, name, initializer)
        if given:
            self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Running statistics as at the start."""
        super().reset_running_stats()
        if self.track_running_stats:
            _fill(self.running_mean, self.running_mean_init)
            _fill(self.running_var, self.running_var_init)

    def reset_parameters(self) -> None:
        """Parameters and running statistics as at the start."""
        self.reset_running_stats()
        _fill(self.weight, self.weight_init or nn.init.ones_)
        _fill(self.bias, self.bias_init or nn.init.zeros_)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if not self.keep_fp32:
            return super()._apply(fn, recurse)

        def keep(t: Tensor) -> Tensor:
            result = fn(t)
            if result.dtype in _REDUCED:
                return t.to(device=result.device, dtype=torch.float32)
            return result

        return super()._apply(keep, recurse)

    def _options_repr(self) -> str:
        text = ""
        if self.affine and self.weight is None:
            text += ", scale=False"
        if self.affine and self.bias is None:
            text += ", center=False"
        if self.channel_axis != 1:
            text += f", channel_axis={self.channel_axis}"
        if self.frozen:
            text += ", frozen=True"
        if self.keep_fp32:
            text += ", keep_fp32=True"
        for name in INITIALIZERS:
            initializer = getattr(self, name)
            if initializer is not None:
                text += f", {name}={getattr(initializer, '__name__', initializer)}"
        return text


def channels_second(x: Tensor, axis: int) -> Tensor:
    """A view of ``x`` with dimension ``axis`` as dimension 1."""
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"channel_axis: expected a dimension of x {list(x.shape)}, got {axis}")
    return x.movedim(axis, 1)


def _fill(t: Tensor | None, initializer: Initializer | None) -> None:
    if t is not None and initializer is not None:
        with torch.no_grad():
            initializer(t)
