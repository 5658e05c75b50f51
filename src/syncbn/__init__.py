"""syncbn: synchronized batch normalization for PyTorch at the price of local batch normalization.

model = syncbn.convert_model(model)
"""

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
