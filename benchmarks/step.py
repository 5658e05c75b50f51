"""A training step of ResNet-50 with local BN, torch's SyncBatchNorm and syncbn.

    python benchmarks/step.py [--json FILE] [--batches N ...]

channels_last, bfloat16 autocast. Both synchronized layers communicate, through an NCCL group of one
rank: two collectives per layer; "syncbn alone" is the same layer with nobody to talk to. Eager, and
as a captured CUDA graph; milliseconds, medians; peak memory of an eager step beside model,
optimizer and input. Each batch size in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from functools import partial

import processes
import torch
import torch.distributed as dist
import torchvision
from gpu import TorchSync
from timing import alternate
from torch import nn

import syncbn
from syncbn.sync import Local, ProcessGroupExchange

BATCHES = [4, 32, 128]


def with_torch_sync(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = TorchSync
    return model


def with_syncbn(model: nn.Module) -> nn.Module:
    return syncbn.convert_model(model, ProcessGroupExchange(dist.group.WORLD))


LAYERS = {
    "nn.BatchNorm2d": lambda m: m,
    "nn.SyncBatchNorm": with_torch_sync,
    "syncbn": with_syncbn,
    "syncbn alone": lambda m: syncbn.convert_model(m, Local()),
}


def make_step(convert: Callable[[nn.Module], nn.Module], batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = convert(torchvision.models.resnet50()).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def milliseconds(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median time of each step until the GPU is done; each has turns of five."""

    def finished(step: Callable[[], object]) -> None:
        step()
        torch.cuda.synchronize()

    times = alternate([partial(finished, step) for step in steps.values()], turn=5, rounds=5)
    return {name: us / 1000 for name, us in zip(steps, times, strict=True)}


def peak_mib(step: Callable[[], object]) -> float:
    """What a step needs beside what is there before it."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(batch: int) -> list[dict]:
    torch.backends.cudnn.benchmark = True
    steps = {name: make_step(convert, batch) for name, convert in LAYERS.items()}
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in steps.values():
            for _ in range(4):
                step()
    torch.cuda.synchronize()
    peak = {name: peak_mib(step) for name, step in steps.items()}
    eager = milliseconds(steps)
    graphs = {}
    for name, step in steps.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            step()
        graphs[name].replay()
    graph = milliseconds({name: g.replay for name, g in graphs.items()})
    return [
        {
            "batch": batch,
            "layer": name,
            "eager_ms": eager[name],
            "graph_ms": graph[name],
            "peak_mib": peak[name],
        }
        for name in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="step.json")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, ResNet-50")
    print("batch  layer                eager ms   x   graph ms   x   peak MiB")
    results = []
    for batch in options.batches:
        rows = processes.run(1, "nccl", measure, batch)
        results += rows
        for row in rows:
            print(
                f"{batch:5}  {row['layer']:18} {row['eager_ms']:10.2f} "
                f"{row['eager_ms'] / rows[0]['eager_ms']:5.2f} {row['graph_ms']:8.2f} "
                f"{row['graph_ms'] / rows[0]['graph_ms']:5.2f} {row['peak_mib']:9.0f}",
                flush=True,
            )
    with open(options.json, "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
