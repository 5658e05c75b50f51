"""Host time of a layer: 20 small layers in a row, forward + backward.

    python benchmarks/host.py

The tensors are so small that what is measured is the way to the kernels. On a GPU the queue never
fills, so that the host's clock sees the host's work alone.

First one rank beside nn.BatchNorm2d. Then ranks that exchange (two over gloo; one over NCCL, which
communicates all the same) beside layers that do not, and beside the latter with a layer's two
collectives called bare, one by a hook in the forward pass and one in the backward pass. Between
layers a collective costs more than in a row of collectives, for the caches' sake and for the other
rank's, which is awaited. The ratio is what exchanging adds to a layer over what the bare
collectives add to one with hooks that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import processes
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


def hooked(
    layers: nn.Sequential, forward: Callable[[], None], backward: Callable[[], None]
) -> None:
    """Calls ``forward`` after the forward pass of each layer, ``backward`` before its backward."""

    def hook(_module: nn.Module, _args: object, y: torch.Tensor) -> None:
        forward()
        y.register_hook(lambda _: backward())

    for layer in layers:
        layer.register_forward_hook(hook)


def nothing() -> None:
    pass


def exchanging(device: str) -> tuple[float, ...]:
    """Microseconds of a layer: exchanging, not exchanging, with hooks, with bare collectives."""
    torch.set_num_threads(1)
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    dy = torch.randn(SHAPE, device=device)
    group, options = dist.group.WORLD, dist.AllreduceOptions()
    options.asyncOp = False
    bare_group = group._get_backend(x.device)

    def collective(values: torch.Tensor) -> None:
        work = bare_group.allreduce([values], options)
        if work is not None:
            work.wait()

    exchange, local = ProcessGroupExchange(group), syncbn.sync.Local()
    stacks = [
        stack(syncbn.BatchNorm2d, device, process_group=e) for e in (exchange, local, local, local)
    ]
    channels = SHAPE[1]
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=device)
    sums_dy = torch.zeros(2 * channels, device=device)
    hooked(stacks[2], nothing, nothing)
    hooked(stacks[3], partial(collective, sums), partial(collective, sums_dy))
    times = alternate([partial(step, s, x, dy) for s in stacks], rounds=30)
    return tuple(t / LAYERS for t in times)


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; {LAYERS} layers of {SHAPE}, forward + backward")
    one_rank()
    print("\nus/layer  exchanging  one rank  added  bare collectives  ratio", flush=True)
    groups = [(2, "gloo", "cpu")] + [(1, "nccl", "cuda")] * has_cuda()
    for ranks, backend, device in groups:
        times = processes.run(ranks, backend, exchanging, device)
        exchanging_us, local_us, hooks_us, bare_us = times
        added, bare = exchanging_us - local_us, bare_us - hooks_us
        print(
            f"{backend:<8} {exchanging_us:>11.1f} {local_us:>9.1f} {added:>6.1f} {bare:>17.1f} "
            f"{added / bare:>6.2f}"
        )


if __name__ == "__main__":
    main()
