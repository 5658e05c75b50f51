"""Two GPUs (or more): layers and a ResNet-50 step under DDP and nn.DataParallel, beside one GPU.

    python benchmarks/two_gpus.py [--json FILE] [--png FILE] [--batches N ...] [--quick]

One process per GPU, NCCL between them. Layers: GPU time (as in gpu.py, by CUDA graphs) and host
time of forward + backward. Steps: as in step.py, in milliseconds; `batch` is per GPU, and the
efficiency is the images per second of all GPUs over those of as many single GPUs with local BN.
"""

from __future__ import annotations

import argparse
import json

import processes
import torch
import torchvision
from gpu import ROWS, gpu_times, host_times
from step import BATCHES, make_step, milliseconds
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import syncbn

LAYERS: dict[str, type] = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "nn.SyncBatchNorm": nn.SyncBatchNorm,
    "syncbn": syncbn.BatchNorm2d,
}
CONVERT = {
    "nn.BatchNorm2d": lambda m: m,
    "nn.SyncBatchNorm": nn.SyncBatchNorm.convert_sync_batchnorm,
    "syncbn": syncbn.convert_model,
}


def measure_layers(quick: bool) -> dict:
    host_us = host_times(LAYERS, rounds=40)  # before CUDA graphs: NCCL's calls cost more after them
    rows = []
    for shape, dtype, fmt in ROWS[::5] if quick else ROWS:
        us = gpu_times(shape, dtype, fmt, LAYERS, 5 if quick else 15)
        rows.append(
            {
                "shape": shape,
                "dtype": str(dtype).removeprefix("torch."),
                "layout": fmt,
                "us": us,
            }
        )
        torch.cuda.empty_cache()
    return {"rows": rows, "host_us": host_us}


def on_gpu(model: nn.Module) -> nn.Module:
    return model.cuda().to(memory_format=torch.channels_last)


def measure_steps(batches: list[int]) -> dict[int, dict[str, float]]:
    """Milliseconds of a step under DDP with each layer, by batch size. Every rank calls this."""
    torch.backends.cudnn.benchmark = True

    def wrapped(name: str, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(on_gpu(CONVERT[name](model)), gradient_as_bucket_view=True)

    return {
        batch: milliseconds(
            {name: make_step(lambda m, name=name: wrapped(name, m), batch) for name in CONVERT}
        )
        for batch in batches
    }


def measure_one_process(batch: int, gpus: int) -> dict[str, float]:
    """Milliseconds of a step on one GPU, and of nn.DataParallel over all.

    The latter's threads live for one forward, and would benchmark all convolutions anew. So it runs
    without cuDNN's benchmarks, and is compared with one GPU without them.
    """
    one = {"one GPU": make_step(lambda m: m, batch)}
    devices = list(range(gpus))
    steps = {
        "one GPU, no cuDNN benchmark": one["one GPU"],
        "DataParallel, nn.BatchNorm2d": make_step(
            lambda m: DataParallel(on_gpu(m), devices), batch * gpus
        ),
        "DataParallel, syncbn": make_step(
            lambda m: DataParallel(on_gpu(syncbn.convert_model(m)), devices), batch * gpus
        ),
    }
    results = {}
    for group, benchmark in (one, True), (steps, False):
        torch.backends.cudnn.benchmark = benchmark
        results |= milliseconds(group)
    return results


def efficiency(steps: dict[str, float], name: str) -> float:
    one = "one GPU, no cuDNN benchmark" if name.startswith("DataParallel") else "one GPU"
    return steps[one] / steps[name]


def report(results: dict) -> None:
    names = "".join(f"{name:>18}" for name in LAYERS)
    print(f"\n{'shape':20} {'dtype':8} {'':4}{names}   us, forward + backward")
    for row in results["layers"]["rows"]:
        us = row["us"]
        slower = " SLOWER" if us["syncbn"] > us["nn.SyncBatchNorm"] else ""
        cells = "".join(f"{t:18.1f}" for t in us.values())
        print(f"{tuple(row['shape'])!s:20} {row['dtype']:8} {row['layout']}{cells}{slower}")
    host = "".join(f"{t:18.1f}" for t in results["layers"]["host_us"].values())
    print(f"{'host':34}{host}")
    print("\nbatch  ms per step                           x local BN  efficiency")
    for batch, steps in results["steps"].items():
        for name, ms in steps.items():
            local = steps.get(f"{name.split(',')[0]}, nn.BatchNorm2d", ms)
            print(
                f"{batch:>5}  {name:30} {ms:8.2f} {ms / local:11.2f} "
                f"{efficiency(steps, name):11.2f}"
            )


def draw(results: dict, path: str, gpus: int) -> None:
    """Efficiency against as many single GPUs with local BN."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = list(results["steps"])
    names = [name for name in results["steps"][batches[0]] if not name.startswith("one GPU")]
    fig, ax = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for i, name in enumerate(names):
        at = [k + (i - (len(names) - 1) / 2) * 0.16 for k in range(len(batches))]
        heights = [efficiency(s, name) for s in results["steps"].values()]
        bars = ax.bar(at, heights, 0.16, label=name)
        ax.bar_label(bars, fmt="%.2f", fontsize=8)
    ax.set_xticks(range(len(batches)), [f"batch {batch} per GPU" for batch in batches])
    ax.axhline(1, color="black", linewidth=1)
    ax.set_ylabel(f"images per second of {gpus} GPUs\nover {gpus} x one GPU with local BN")
    ax.set_title(f"ResNet-50 step, {results['machine']}")
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    fig.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="two_gpus.json")
    parser.add_argument("--png", default="two_gpus.png")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--quick", action="store_true", help="fewer rows and replays")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        parser.error(f"expected two or more GPUs, got {gpus}")
    machine = f"{gpus} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    print(f"{machine}, torchvision {torchvision.__version__}, syncbn {syncbn.__version__}")
    layers = processes.run(gpus, "nccl", measure_layers, options.quick)
    ddp = processes.run(gpus, "nccl", measure_steps, options.batches)
    steps = {}
    for batch in options.batches:
        one_process = measure_one_process(batch, gpus)
        steps[batch] = {f"DDP, {name}": ms for name, ms in ddp[batch].items()} | one_process
        torch.cuda.empty_cache()
    results = {"machine": machine, "layers": layers, "steps": steps}
    report(results)
    with open(options.json, "w") as file:
        json.dump(results, file, indent=1)
    draw(results, options.png, gpus)


if __name__ == "__main__":
    main()
