"""Memory that the ops use and do not return, kept for the next call."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from . import _C


class StreamMemory:
    """Memory for one device and stream, or for all calls on the CPU.

    Attributes:
        capture: the graph capture that the memory is of, 0 for none.
        workspace: scratch memory of the CUDA reductions, [WORKSPACE_BYTES] uint8, zero at first.
            The ops leave its counters at zero. None on the CPU.
        spare: by size and dtype, vectors that nobody uses. Who needs one takes it, and appends it
            when it has been read: what runs in one stream runs in order. An allocation on CUDA
            costs the host 4 us.
    """

    __slots__ = ("capture", "spare", "workspace")

    def __init__(self, capture: int, workspace: Tensor | None) -> None:
        self.capture = capture
        self.workspace = workspace
        self.spare: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)


_on_cpu = StreamMemory(0, None)
_of_streams: dict[tuple[int, int], StreamMemory] = {}


def memory_for(x: Tensor) -> StreamMemory:
    """The memory for an op on ``x`` in the current stream.

    Launches that could overlap must not share it. Those of one stream cannot; those of a CUDA graph
    could overlap with what its capture stream runs later, so each capture gets memory of its own,
    whose workspace the graph zeroes whenever it is replayed.
    """
    if not x.is_cuda:
        return _on_cpu
    device, stream, capture = _C.launch_context(x)
    memory = _of_streams.get((device, stream))
    if memory is None or memory.capture != capture:
        workspace = torch.zeros(_C.WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
        _of_streams[device, stream] = memory = StreamMemory(capture, workspace)
    return memory


def take(spare: list[Tensor], x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """One of the ``spare`` [size] of ``dtype``, or a new one on the device of ``x``."""
    try:
        return spare.pop()
    except IndexError:
        # No inference tensor and none of a subclass, as x.new_empty() may be: it will be used by
        # other calls.
        with torch.inference_mode(False):
            return torch.empty(size, dtype=dtype, device=x.device)
