"""One layer, forward + backward: GPU time and host time beside PyTorch's layers and the limit.

    python benchmarks/gpu.py [--json FILE] [--png FILE] [--quick]

GPU time: the steps of 8 to 64 different inputs, which overflow the L2 cache unless they are tiny,
are captured in a CUDA graph, so that the host is out of the picture. The layers take turns, replay
by replay; medians.
The limit is 8 passes over the tensor (forward: read x, read x, write y; backward: read dy, x, read
dy, x, write dx) at the speed of a large device-to-device copy in the same run, bytes read plus
bytes written.

Host time: 20 small layers in a row, so that what is measured is the way to the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from timing import alternate
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

import syncbn
from syncbn.functional import batchnorm2d_sync
from syncbn.sync import ProcessGroupExchange

SHAPES = [
    (32, 64, 112, 112),
    (32, 256, 56, 56),
    (32, 512, 28, 28),
    (32, 1024, 14, 14),
    (32, 2048, 7, 7),
    (4, 256, 128, 128),
    (2, 64, 512, 512),
    (128, 256, 56, 56),
    (2, 3, 512, 512),
    (16, 1024, 1, 1),
]
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
ROWS = [
    *((s, d, f) for d in (torch.float32, torch.float16) for f in FORMATS for s in SHAPES),
    *((s, torch.bfloat16, f) for f in FORMATS for s in SHAPES[:2]),
]
Layer = Callable[[Tensor], Tensor]


class TorchSync(nn.BatchNorm2d):
    """The function of torch.nn.SyncBatchNorm, which the module itself leaves out with one rank."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        running = self.running_mean, self.running_var
        rest = self.eps, self.momentum, dist.group.WORLD, 1
        return TorchSyncBatchNorm.apply(x, self.weight, self.bias, *running, *rest)


class SyncbnExchanging(nn.BatchNorm2d):
    """syncbn with its two collectives, which it leaves out with one rank."""

    def forward(self, x: Tensor) -> Tensor:
        exchange = ProcessGroupExchange(dist.group.WORLD)
        running = self.running_mean, self.running_var
        rest = exchange, True, self.momentum, self.eps, self.num_batches_tracked
        return batchnorm2d_sync(x, self.weight, self.bias, *running, *rest)


def copy_speed() -> float:
    """Bytes read plus bytes written per second, of a copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = [elapsed(lambda: target.copy_(source)) for _ in range(20)]
    return 2 * source.numel() / statistics.median(times) * 1e6


def elapsed(work: Callable[[], object]) -> float:
    """Microseconds between events around ``work``."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def captured(layer: nn.Module, xs: list[Tensor], dys: list[Tensor]) -> torch.cuda.CUDAGraph:
    def step(x: Tensor, dy: Tensor) -> None:
        torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(xs[0], dys[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, dy in zip(xs, dys, strict=True):
            step(x, dy)
    return graph


def gpu_times(
    shape: tuple[int, ...], dtype: torch.dtype, fmt: str, layers: dict[str, type], replays: int
) -> dict[str, float]:
    """Microseconds of forward + backward of each layer."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    # A step touches x, y, dy and dx; the same tensor comes back after four times the cache. Eight
    # at least: the first also waits until what the layer before has left in the cache is written.
    inputs = max(8, min(64, -(-4 * l2 // (4 * size))))

    def some() -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype, memory_format=FORMATS[fmt])

    xs = [some().requires_grad_() for _ in range(inputs)]
    dys = [some() for _ in range(inputs)]
    graphs = {
        name: captured(layer(shape[1], device="cuda"), xs, dys) for name, layer in layers.items()
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(replays + 2):
        for name, graph in graphs.items():
            t = elapsed(graph.replay) / inputs
            if turn >= 2:
                times[name].append(t)
    return {name: statistics.median(t) for name, t in times.items()}


def host_times(
    layers: dict[str, type], count: int = 20, rounds: int | None = None
) -> dict[str, float]:
    """Microseconds of forward + backward per small layer, on the host's clock. ``rounds``: for
    ranks, which have to agree on how often."""
    x = torch.randn(2, 16, 4, 4, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)

    def step(stack: nn.Sequential) -> None:
        stack(x).backward(dy)

    stacks = [
        nn.Sequential(*(layer(16, device="cuda") for _ in range(count)))
        for layer in layers.values()
    ]
    times = alternate([partial(step, stack) for stack in stacks], seconds=4, rounds=rounds)
    return {name: t / count for name, t in zip(layers, times, strict=True)}


def draw(rows: list[dict], path: str) -> None:
    """Time over limit, one bar per layer and shape; rows of 3 MB and more."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["megabytes"] >= 3]
    names = list(rows[0]["us"])
    fig, ax = plt.subplots(figsize=(16, 6), layout="constrained")
    for i, name in enumerate(names):
        at = [k + (i - (len(names) - 1) / 2) * 0.27 for k in range(len(rows))]
        ax.bar(at, [row["us"][name] / row["limit_us"] for row in rows], 0.27, label=name)
    labels = [f"{tuple(row['shape'])}\n{row['dtype']} {row['layout']}" for row in rows]
    ax.set_xticks(range(len(rows)), labels, rotation=90, fontsize=7)
    ax.axhline(1, color="black", linewidth=1)
    ax.set_yscale("log")
    ax.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    ax.set_ylabel("GPU time over the 8-pass limit")
    ax.set_title(f"One layer, forward + backward, {torch.cuda.get_device_name()}")
    ax.legend()
    fig.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="gpu.json")
    parser.add_argument("--png", default="gpu.png")
    parser.add_argument("--quick", action="store_true", help="fewer rows and replays")
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    torch.cuda.set_device(0)

    speed = copy_speed()
    machine = (
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, "
        f"syncbn {syncbn.__version__}, copy {speed / 1e12:.2f} TB/s"
    )
    print(machine)
    layers: dict[str, type] = {
        "syncbn": syncbn.BatchNorm2d,
        "nn.BatchNorm2d": nn.BatchNorm2d,
        "nn.SyncBatchNorm": TorchSync,
    }
    # First: NCCL's calls cost more once CUDA graphs have held some.
    host = host_times({**layers, "syncbn, exchanging": SyncbnExchanging})
    print("host us per layer, forward + backward:")
    for name, t in host.items():
        print(f"  {name:20} {t:7.1f}")
    names = "".join(f"{name:>18}" for name in layers)
    print(f"{'shape':20} {'dtype':8} {'':4} {'MB':>6} {'limit us':>9}{names}   over the limit")
    rows = []
    for shape, dtype, fmt in ROWS[::5] if options.quick else ROWS:
        us = gpu_times(shape, dtype, fmt, layers, 5 if options.quick else 15)
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        row = {
            "shape": shape,
            "dtype": str(dtype).removeprefix("torch."),
            "layout": fmt,
            "megabytes": size / 1e6,
            "limit_us": 8 * size / speed * 1e6,
            "us": us,
        }
        rows.append(row)
        cells = "".join(f"{t:18.1f}" for t in us.values())
        slower = " SLOWER" if us["syncbn"] > min(us.values()) else ""
        print(
            f"{shape!s:20} {row['dtype']:8} {fmt} {row['megabytes']:6.1f} {row['limit_us']:9.1f}"
            f"{cells}   {us['syncbn'] / row['limit_us']:.2f}{slower}",
            flush=True,
        )
        torch.cuda.empty_cache()

    with open(options.json, "w") as file:
        json.dump({"machine": machine, "rows": rows, "host_us": host}, file, indent=1)
    draw(rows, options.png)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
