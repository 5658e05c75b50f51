"""syncbn: synchronized batch normalization for PyTorch at the price of local batch normalization.

model = syncbn.convert_model(model)
"""

from typing import TYPE_CHECKING

from . import _requirements  # first: it says what is missing

# isort: split

from . import functional, sync
from ._version import __version__
from .convert import convert_model, revert_model
from .modules import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    LazyBatchNorm1d,
    LazyBatchNorm2d,
    LazyBatchNorm3d,
    SyncBatchNorm,
)
from .parallel import ModelDataParallel, scatter
from .sync import create_process_group

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "ModelDataParallel",
    "SyncBatchNorm",
    "__version__",
    "convert_model",
    "create_process_group",
    "functional",
    "revert_model",
    "scatter",
    "sync",
]

if not TYPE_CHECKING:  # where it would give every name a type

    def __getattr__(name: str) -> object:
        """apex calls this package where it means an extension module of its own."""
        if name in _requirements.APEX:
            raise AttributeError(_requirements.apex_attribute(name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
