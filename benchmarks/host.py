"""Host time of a layer: 20 small layers in a row, forward + backward.

    python benchmarks/host.py

The tensors are so small that what is measured is the way to the kernels. On a GPU the queue never
fills, so that the host's clock sees the host's work alone.

First one rank beside nn.BatchNorm2d. Then ranks that exchange (two over gloo; one over NCCL, which
communicates all the same) beside one that does not, and beside the two collectives of a layer
called alone, as directly as they can be. A collective between layers also waits for the other rank
to get there, which is the scheduler's time and none of the layer's; so the ratio is (collectives
alone + what exchanging takes outside of collectives) / collectives alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from timing import alternate
from torch import nn

import syncbn
from syncbn.sync import ProcessGroupExchange

LAYERS = 20
SHAPE = (2, 16, 4, 4)


def step(layers: nn.Sequential, x: torch.Tensor, dy: torch.Tensor) -> None:
    layers(x).backward(dy)


def stack(layer: type[nn.BatchNorm2d], device: str = "cpu", **options: object) -> nn.Sequential:
    return nn.Sequential(*(layer(SHAPE[1], **options) for _ in range(LAYERS))).to(device)


def has_cuda() -> bool:
    return syncbn._C.build_info()["cuda"] is not None and torch.cuda.is_available()


def one_rank() -> None:
    devices = ["cpu"] + ["cuda"] * has_cuda()
    print("device  nn.BatchNorm2d us/layer  syncbn us/layer  ratio")
    for device in devices:
        x = torch.randn(SHAPE, device=device, requires_grad=True)
        dy = torch.randn(SHAPE, device=device)
        stacks = [stack(cls, device) for cls in (nn.BatchNorm2d, syncbn.BatchNorm2d)]
        nn_us, syncbn_us = (
            t / LAYERS for t in alternate([partial(step, s, x, dy) for s in stacks])
        )
        print(f"{device:<7} {nn_us:>23.1f} {syncbn_us:>16.1f} {syncbn_us / nn_us:>6.2f}")


class Timed(ProcessGroupExchange):
    """The exchange over the default process group, and the seconds spent in it."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD)
        self.seconds = 0.0

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        values = super().all_reduce(values)
        self.seconds += time.perf_counter() - start
        return values


def collectives(forward: torch.Tensor, backward: torch.Tensor) -> None:
    """Those of a step, without layers."""
    group, options = dist.group.WORLD, dist.AllreduceOptions()
    options.asyncOp = False
    for values in forward, backward:
        for _ in range(LAYERS):
            work = group.allreduce([values], options)
            if work is not None:
                work.wait()


def exchanging(rank: int, ranks: int, backend: str, device: str, meeting_point: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{meeting_point}", rank=rank, world_size=ranks
    )
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    dy = torch.randn(SHAPE, device=device)
    channels = SHAPE[1]
    sums = (
        torch.zeros(2 * channels + 1, dtype=torch.float64, device=device),
        torch.zeros(2 * channels, device=device),
    )
    exchange = Timed()
    group, alone = (
        stack(syncbn.BatchNorm2d, device, process_group=e) for e in (exchange, syncbn.sync.Local())
    )
    inside: list[float] = []

    def in_group() -> None:
        exchange.seconds = 0.0
        step(group, x, dy)
        inside.append(exchange.seconds * 1e6)

    group_us, alone_us, collectives_us = (
        t / LAYERS
        for t in alternate(
            [in_group, partial(step, alone, x, dy), partial(collectives, *sums)], rounds=30
        )
    )
    inside_us = statistics.median(inside) / LAYERS
    if rank == 0:
        ratio = 1 + (group_us - inside_us - alone_us) / collectives_us
        print(
            f"{backend:<8} {group_us:>11.1f} {inside_us:>18.1f} {alone_us:>9.1f} "
            f"{collectives_us:>18.1f} {ratio:>6.2f}"
        )
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; {LAYERS} layers of {SHAPE}, forward + backward")
    one_rank()
    print(
        "\nus/layer  exchanging  of it collectives  one rank  collectives alone  ratio", flush=True
    )
    groups = [(2, "gloo", "cpu")] + [(1, "nccl", "cuda")] * has_cuda()
    for ranks, backend, device in groups:
        with tempfile.TemporaryDirectory() as folder:
            meeting_point = str(Path(folder) / "meet")
            torch.multiprocessing.spawn(
                exchanging, (ranks, backend, device, meeting_point), nprocs=ranks
            )


if __name__ == "__main__":
    main()
