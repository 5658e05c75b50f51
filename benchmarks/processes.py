"""Fresh processes with a process group between them, for all benchmarks that need one.

Fresh, because NCCL's calls cost more in a process where CUDA graphs have held some.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(ranks: int, backend: str, function: Callable[..., Any], *args: object) -> Any:
    """What ``function(*args)`` returns on rank 0; all ranks call it. Over NCCL each has a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        rest = ranks, backend, Path(folder), function, args
        torch.multiprocessing.spawn(_rank, rest, nprocs=ranks)
        return pickle.loads(Path(folder, "result").read_bytes())


def _rank(
    rank: int,
    ranks: int,
    backend: str,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'meet'}",
        rank=rank,
        world_size=ranks,
        device_id=device,
    )
    result = function(*args)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
