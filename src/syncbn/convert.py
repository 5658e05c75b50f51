"""From PyTorch's BatchNorm modules to synchronized ones and back, by a swap of classes in place."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from . import modules
from ._options import INITIALIZERS, Options
from .sync import Exchange

__all__ = ["convert_model", "revert_model"]

_M = TypeVar("_M", bound=nn.Module)

_SYNCHRONIZED: dict[type[nn.Module], type[modules.Synchronized]] = {
    nn.BatchNorm1d: modules.BatchNorm1d,
    nn.BatchNorm2d: modules.BatchNorm2d,
    nn.BatchNorm3d: modules.BatchNorm3d,
    nn.LazyBatchNorm1d: modules.LazyBatchNorm1d,
    nn.LazyBatchNorm2d: modules.LazyBatchNorm2d,
    nn.LazyBatchNorm3d: modules.LazyBatchNorm3d,
    nn.SyncBatchNorm: modules.SyncBatchNorm,
}
_STOCK: dict[type[nn.Module], type[nn.Module]] = {v: k for k, v in _SYNCHRONIZED.items()}
_NAMES = frozenset(c.__name__ for c in _SYNCHRONIZED)


def convert_model(module: _M, process_group: dist.ProcessGroup | Exchange | None = None) -> _M:
    """Makes every BatchNorm of a model synchronized, in place, and returns the model.

    Each ``nn.BatchNorm1d/2d/3d``, their lazy forms and ``nn.SyncBatchNorm``, at any depth or at the
    root, changes its class. The module object stays, and with it parameters, buffers, hooks, flags,
    attributes, shared references, and what an optimizer or DistributedDataParallel knows of it; so
    it can be called before or after either is made. A subclass keeps its methods and is converted
    if its forward is the stock one; subclasses with a forward of their own are left alone and named
    in one warning.

    Args:
        module: any module.
        process_group: who shares the mini-batch; ``None`` for the default process group, looked up
            at each forward. Modules that have one already keep it unless another is given here.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: ``module`` is not a module, or holds a BatchNorm compiled by
            ``torch.jit.script``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"convert_model: expected module to be a torch.nn.Module, got {type(module).__name__}"
        )
    left_alone: dict[str, None] = {}  # an ordered set
    found: list[tuple[nn.Module, type[modules.Synchronized]]] = []
    for name, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule):
            if m.original_name in _NAMES:
                raise TypeError(
                    "convert_model: expected modules, got the TorchScript module "
                    f"{name or 'at the root'!r}; convert the model before torch.jit.script"
                )
        elif isinstance(m, modules.Synchronized):
            found.append((m, type(m)))
        elif isinstance(m, _BatchNorm):
            if _has_stock_forward(m):
                found.append((m, _synchronized_class(m)))
            else:
                left_alone[type(m).__qualname__] = None
    # Nothing above changed anything: an error leaves the model as it was.
    for m, cls in found:
        m.__class__ = cls
        if process_group is not None:
            m.process_group = process_group  # type: ignore[assignment]
    if left_alone:
        warnings.warn(
            "syncbn.convert_model left these subclasses of BatchNorm alone, because they have a "
            f"forward of their own: {', '.join(left_alone)}. They use local statistics.",
            stacklevel=2,
        )
    return module


def revert_model(module: _M) -> _M:
    """Undoes ``convert_model``: every synchronized BatchNorm gets its PyTorch class back, in place.

    For deployment, or for tools that look for exact classes. Parameters, buffers and everything
    else stay; ``process_group``, ``sync`` and the options that PyTorch's layers do not have are
    dropped, except that ``nn.SyncBatchNorm`` keeps its group.

    Args:
        module: any module.

    Returns:
        ``module`` itself.

    Raises:
        ValueError: a layer's ``channel_axis`` is not 1, the only one that PyTorch's layers know.
    """
    for name, m in module.named_modules():
        if getattr(m, "channel_axis", 1) != 1 and _stock_class(m) is not None:
            raise ValueError(
                f"revert_model: expected channel_axis=1, got {m.channel_axis} in {name or type(m)}"
            )
    for m in module.modules():
        # A class that a user derived from one of ours has no PyTorch class to go back to.
        stock = _stock_class(m)
        if stock is not None:
            group = m.__dict__.pop("process_group", None)
            for name in ("sync", "frozen", "channel_axis", "keep_fp32", *INITIALIZERS):
                m.__dict__.pop(name, None)
            m.__class__ = stock
            if isinstance(m, nn.SyncBatchNorm):
                m.process_group = group
    return module


def _has_stock_forward(m: nn.Module) -> bool:
    """Whether calling ``m`` runs PyTorch's own forward."""
    stock = nn.SyncBatchNorm if isinstance(m, nn.SyncBatchNorm) else _BatchNorm
    classes = type(m), getattr(m, "cls_to_become", None) or type(m)  # a lazy one's at last
    return all(c.forward is stock.forward for c in classes) and "forward" not in m.__dict__


def _synchronized_class(m: nn.Module) -> type[modules.Synchronized]:
    """The synchronized class for a module whose forward is the stock one."""
    cls = type(m)
    if parametrize.is_parametrized(m):
        return _rebased(cls, _synchronized(cls.__bases__[0]))
    return _synchronized(cls)


def _stock_class(m: nn.Module) -> type[nn.Module] | None:
    """PyTorch's class, or the user's, for a synchronized module; None for others."""
    cls = type(m)
    if isinstance(m, modules.Synchronized) and parametrize.is_parametrized(m):
        stock = _STOCK.get(cls.__bases__[0])
        return None if stock is None else _rebased(cls, stock)
    return _STOCK.get(cls)


def _synchronized(cls: type[nn.Module]) -> type[modules.Synchronized]:
    """The synchronized class for a BatchNorm class whose forward is the stock one."""
    if cls not in _SYNCHRONIZED:
        # A subclass: our forward in front of it, everything else from it. Made once per class.
        base = next(
            (_SYNCHRONIZED[c] for c in cls.__mro__ if c in _SYNCHRONIZED), modules.Synchronized
        )
        namespace = _methods(cls, base)
        namespace |= {"__module__": cls.__module__, "__reduce_ex__": _reduce_converted}
        become = getattr(cls, "cls_to_become", None)  # of a lazy class
        if become is not None:
            namespace["cls_to_become"] = _synchronized(become)
        _SYNCHRONIZED[cls] = type(cls.__name__, (base, cls), namespace)
        _STOCK[_SYNCHRONIZED[cls]] = cls
    return _SYNCHRONIZED[cls]


# How the synchronized classes work; the last two build on a user's own.
_OURS_ALONE = frozenset(
    {"forward", "_synchronized_forward", "_replicate_for_data_parallel"}
    | {"__getstate__", "__deepcopy__"}
)


def _methods(cls: type[nn.Module], base: type[modules.Synchronized]) -> dict[str, Any]:
    """Methods of a user's class that ours would hide, ``reset_parameters`` for example."""
    hiding = [c for c in base.__mro__ if issubclass(c, Options)]
    ours = {k for c in hiding for k, v in vars(c).items() if callable(v)} - _OURS_ALONE
    methods: dict[str, Any] = {}
    for c in cls.__mro__:
        if c in _SYNCHRONIZED or c is _BatchNorm:
            break
        for name, value in vars(c).items():
            if name in ours and callable(value):
                methods.setdefault(name, value)
    return methods


def _rebased(cls: type[nn.Module], base: type[_M]) -> type[_M]:
    """The class of one parametrized module with another class as its only base: the class that
    ``remove_parametrizations`` gives back."""
    members = dict(vars(cls))
    for name in ("__dict__", "__weakref__", "__deepcopy__"):
        members.pop(name, None)
    if not hasattr(base, "__deepcopy__"):
        members["__deepcopy__"] = _deepcopy_parametrized  # they cannot be pickled
    return type(cls.__name__, (base,), members)


def _deepcopy_parametrized(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    copied: nn.Module = self.__class__.__new__(self.__class__)
    memo[id(self)] = copied
    copied.__dict__.update(deepcopy(self.__dict__, memo))
    return copied


def _reduce_converted(self: Any, protocol: int) -> str | tuple[Any, ...]:
    """Pickles an instance of a class made above by way of the class that it was made from."""
    stock = _STOCK.get(type(self))
    if stock is None:  # of a class derived from one made above
        return object.__reduce_ex__(self, protocol)
    return _new_converted, (stock,), self.__getstate__()


def _new_converted(cls: type[nn.Module]) -> nn.Module:
    synchronized = _synchronized(cls)
    return synchronized.__new__(synchronized)
