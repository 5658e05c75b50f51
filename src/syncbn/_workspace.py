"""Scratch memory of the CUDA reductions: one small tensor per device and stream."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C

# (device, stream) to (graph capture, workspace).
_workspaces: dict[tuple[int, int], tuple[int, Tensor]] = {}


def workspace_for(x: Tensor) -> Tensor:
    """The workspace for an op on ``x``: [WORKSPACE_BYTES] uint8, zero at first.

    The ops leave its counters at zero. Launches that could overlap must not share one. Those of one
    stream cannot; those of a CUDA graph could overlap with what its capture stream runs later, so
    each capture gets a workspace of its own, which the graph zeroes whenever it is replayed.
    """
    device, stream, capture = _C.launch_context(x)
    entry = _workspaces.get((device, stream))
    if entry is None or entry[0] != capture:
        workspace = torch.zeros(_C.WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
        _workspaces[device, stream] = entry = (capture, workspace)
    return entry[1]
