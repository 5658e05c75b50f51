"""What meeting costs two replicas in threads: 20 layers in a row, forward + backward.

    python benchmarks/replicas.py

Three ways to run two replicas of the same layers: in threads with synchronized layers; in the same
threads with layers that do not synchronize (each one participant by itself); and, for the scale,
one after another. docs/performance.md says what the difference of the first two is made of. They
take turns, step by step, and each is given by its tenth percentile: where other programs use the
same cores, waiting for a replica is waiting for a core. On the CPU, and where there are two GPUs on
these. Then eight replicas that synchronize: the processor time tells that those who wait do not
spin.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import syncbn

LAYERS = 20
SHAPES = ((2, 16, 4, 4), (4, 32, 8, 8), (8, 64, 16, 16))


class Alone(syncbn.BatchNorm2d):
    """Our layer, whose replicas do not know of each other."""

    _replicate_for_data_parallel = nn.Module._replicate_for_data_parallel


def step(model: syncbn.ModelDataParallel, xs: list[torch.Tensor], dys: list[torch.Tensor]) -> None:
    torch.autograd.backward(model(xs), dys)
    for device in model.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def tenth_percentiles(
    models: list[syncbn.ModelDataParallel],
    xs: list[torch.Tensor],
    dys: list[torch.Tensor],
    seconds: float = 6.0,
) -> list[float]:
    """Microseconds per layer and step of each model."""
    times: list[list[float]] = [[] for _ in models]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for model, mine in zip(models, times, strict=True):
            start = time.perf_counter()
            step(model, xs, dys)
            mine.append(time.perf_counter() - start)
    return [statistics.quantiles(mine, n=10)[0] * 1e6 / LAYERS for mine in times]


def two_replicas(devices: list[str]) -> None:
    print(f"\n{' and '.join(devices)}: us per layer and step")
    print("shape             synchronized  threads alone  difference  one after another")
    for shape in SHAPES:
        xs = [torch.randn(shape, device=device, requires_grad=True) for device in devices]
        dys = [torch.randn(shape, device=device) for device in devices]
        models = [
            syncbn.ModelDataParallel(
                nn.Sequential(*(cls(shape[1]) for _ in range(LAYERS))).to(devices[0]),
                devices,
                sync,
            )
            for cls, sync in ((syncbn.BatchNorm2d, True), (Alone, True), (Alone, False))
        ]
        together, alone, in_turn = tenth_percentiles(models, xs, dys)
        print(
            f"{shape!s:<17} {together:>12.1f} {alone:>14.1f} {together - alone:>11.1f} "
            f"{in_turn:>18.1f}"
        )


def eight_replicas() -> None:
    shape = SHAPES[-1]
    layers = nn.Sequential(*(syncbn.BatchNorm2d(shape[1]) for _ in range(LAYERS)))
    model = syncbn.ModelDataParallel(layers, ["cpu"] * 8)
    xs = [torch.randn(shape, requires_grad=True) for _ in range(8)]
    dys = [torch.randn(shape) for _ in range(8)]
    step(model, xs, dys)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(10):
        step(model, xs, dys)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"\n8 replicas of {shape}: {wall * 100:.1f} ms per step, {cpu * 100:.1f} ms of processor")


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; {LAYERS} layers, forward + backward")
    two_replicas(["cpu", "cpu"])
    if syncbn._C.build_info()["cuda"] is not None and torch.cuda.device_count() > 1:
        two_replicas(["cuda:0", "cuda:1"])
    eight_replicas()


if __name__ == "__main__":
    main()
