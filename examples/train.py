"""Trains a ResNet-18 three ways and shows that synchronized batch norm reproduces the whole batch.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/train.py

From the same weights and the same mini-batches it trains
  1. one process that sees the whole mini-batch, with nn.BatchNorm2d;
  2. several processes that see a part each (DistributedDataParallel), with nn.BatchNorm2d;
  3. the same, after syncbn.convert_model.
It prints a table, draws the loss curves, and fails unless the third curve lies on the first while
the second does not. GPUs are used where there are any and syncbn was built for them. On two CPU
cores it takes one to two minutes.

Needs torchvision, scikit-learn, matplotlib and tqdm.
"""

import argparse
import gc
import os
import statistics
import sys
import time

import matplotlib
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18
from tqdm import tqdm

import syncbn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The curves are compared over the first steps. Later on, training multiplies the rounding
# differences of float32: a ReLU that switches in one run and not in the other is enough. (In
# float64 the first and the third curve agree to 1e-13 for 60 steps.)
COMPARED = 20
TOLERANCE = 1e-4


def load_data(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 digits, enlarged to 16 x 16: images and labels to train on, and to test on."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device)[:, None] / 8 - 1
    images = F.interpolate(images, scale_factor=2, mode="bilinear")
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def make_batches(examples: int, batch: int, steps: int) -> Tensor:
    """[steps, batch] indices of examples: whole mini-batches, every epoch in another order."""
    generator = torch.Generator().manual_seed(0)
    per_epoch = examples // batch
    epochs = [
        torch.randperm(examples, generator=generator)[: per_epoch * batch].view(per_epoch, batch)
        for _ in range(-(-steps // per_epoch))
    ]
    return torch.cat(epochs)[:steps]


def make_model(device: torch.device) -> nn.Module:
    """torchvision's ResNet-18 with a stem for small images, always with the same weights."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10, zero_init_residual=True)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.to(device)


def train(
    model: nn.Module, images: Tensor, labels: Tensor, batches: Tensor, name: str
) -> tuple[Tensor, float]:
    """Trains on the examples ``batches`` [steps, batch]; returns losses, seconds per step."""
    steps = len(batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    # The learning rate rises slowly: large first steps would multiply rounding differences.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.05, total_steps=max(steps, 150), pct_start=0.4, cycle_momentum=False
    )
    model.train()
    losses, seconds = [], []
    for indices in tqdm(batches, desc=name, unit="step", disable=dist.get_rank() != 0):
        start = time.perf_counter()
        loss = F.cross_entropy(model(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return torch.tensor(losses), statistics.median(seconds)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def draw(path: str, curves: dict[str, Tensor]) -> None:
    """Writes the loss curves, and below them their distance to the first one."""
    styles = [
        {"color": "#9ecae1", "linewidth": 6},
        {"color": "#e6550d", "linewidth": 1.2},
        {"color": "#08306b", "linewidth": 1.6, "linestyle": "--"},
    ]
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(9, 7), height_ratios=[3, 2])
    whole = next(iter(curves.values()))
    steps = range(1, len(whole) + 1)
    for (name, losses), style in zip(curves.items(), styles, strict=True):
        top.plot(steps, losses, label=name, **style)
        if losses is not whole:
            # A difference of exactly 0 has no place on a logarithmic axis.
            bottom.plot(steps, (losses - whole).abs().clamp(min=1e-8), label=name, **style)
    top.set(ylabel="training loss", title="ResNet-18 on scikit-learn's digits: loss of each step")
    top.legend()
    bottom.axvspan(1, COMPARED, color="#eeeeee")
    bottom.hlines(TOLERANCE, 1, COMPARED, color="black", label="syncbn must stay below")
    bottom.set(yscale="log", xlim=(1, len(whole)), ylabel="|loss - whole batch's|")
    bottom.set_xlabel("step (after the grey ones, float32 rounding grows by itself)")
    bottom.legend(loc="lower right")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> str | None:
    """Returns what went wrong, if anything."""
    parser = argparse.ArgumentParser(
        description="Train a ResNet-18 with the whole batch, with local and with synchronized BN.",
        epilog="Start it with: torchrun --nproc-per-node 2 examples/train.py",
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps, at least 20 (150)")
    parser.add_argument("--batch", type=int, default=8, help="images per process and step (8)")
    parser.add_argument("--output", default="demo.png", help="the picture to write (demo.png)")
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 2:
        parser.error("expected two or more processes; " + parser.epilog)
    if args.steps < COMPARED:
        parser.error(f"--steps: expected at least {COMPARED}, got {args.steps}")

    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available() and syncbn._C.build_info()["cuda"]:
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
        # NCCL wants a GPU for each process; gloo lets them share one.
        backend = "nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"
        # Convolutions in float32: TF32 would round differently for another batch size.
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(backend)
    rank = dist.get_rank()

    images, labels, test_images, test_labels = load_data(device)
    batches = make_batches(len(images), args.batch * world_size, args.steps)
    part = batches.chunk(world_size, dim=1)[rank]
    if rank == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(
            f"{world_size} processes on {where} ({backend}), {args.batch} images each, "
            f"{args.steps} steps",
            flush=True,
        )

    curves: dict[str, Tensor] = {}
    rows = []
    whole_name = "whole batch, 1 process"
    local_name = f"local BN, {world_size} processes"
    syncbn_name = f"syncbn, {world_size} processes"

    def record(name: str, model: nn.Module, losses: Tensor, seconds: float) -> None:
        curves[name] = losses
        difference = (losses - curves[whole_name])[:COMPARED].abs().max().item()
        rows.append((name, difference, accuracy(model, test_images, test_labels), seconds))

    # 1. Rank 0 trains alone; the others wait for it where DistributedDataParallel is made.
    if rank == 0:
        model = make_model(device)
        record(whole_name, model, *train(model, images, labels, batches, whole_name))

    # 2. and 3. Each process sees its part; a step's loss is the mean of the equal parts' losses.
    for name in (local_name, syncbn_name):
        model = make_model(device)
        if name == syncbn_name:
            model = syncbn.convert_model(model)  # all that it takes
        ddp = DistributedDataParallel(model)
        losses, seconds = train(ddp, images, labels, part, name)
        losses = losses.to(device)
        dist.all_reduce(losses)
        if rank == 0:
            record(name, model, losses.cpu() / world_size, seconds)
    # PyTorch 2.14 sometimes aborts at the end of a process in which a DistributedDataParallel,
    # which is part of reference cycles, outlives its gloo group.
    del ddp
    gc.collect()
    dist.destroy_process_group()
    if rank != 0:
        return None

    draw(args.output, curves)
    print(f"\n| {'':22} | max loss difference, {COMPARED} steps | test accuracy | time per step |")
    print(f"| {'-' * 22} | {'-' * 29} | {'-' * 13} | {'-' * 13} |")
    for name, difference, correct, seconds in rows:
        text = "-" if name == whole_name else f"{difference:.1e}"
        print(f"| {name:22} | {text:29} | {correct:13.1%} | {1e3 * seconds:10.0f} ms |")
    print(f"\nLoss curves: {args.output}")

    (_, local, *_), (_, synchronized, *_) = rows[1:]
    # "not <" rather than ">=", so that NaN fails too.
    if not synchronized < TOLERANCE:
        return (
            f"syncbn's loss is {synchronized:.1e} off the whole batch's, not within {TOLERANCE:g}."
        )
    if not local > TOLERANCE:
        return f"Local BN's loss, too, is within {TOLERANCE:g} of the whole batch's: nothing shown."
    print(
        f"syncbn's curve lies on the whole batch's (within {TOLERANCE:g} over {COMPARED} steps), "
        "local BN's does not."
    )
    return None


if __name__ == "__main__":
    sys.exit(main())
