"""Two replicas in the threads of one process train as one model that sees the whole batch.

    python examples/data_parallel.py                        # two replicas on the CPU
    python examples/data_parallel.py --devices cuda:0 cuda:1

From the same weights and the same mini-batches it trains
  1. one model with nn.BatchNorm2d;
  2. replicas of it under syncbn.ModelDataParallel, with nn.BatchNorm2d in each;
  3. the same after syncbn.convert_model.
It prints the losses side by side and fails unless the third equals the first while the second does
not. On two CPU cores it takes a few seconds.
"""

import argparse
import copy
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncbn

STEPS = 40
BATCH = 16
# Rounding differences of float32 grow in training; local statistics are far beyond.
TOLERANCE = 1e-3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Stripes in one of four directions, with noise. Sorted, so that the replicas' parts differ."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 4, (BATCH,), generator=generator).sort().values
    row, column = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    phases = torch.stack([row, column, row + column, row - column])[labels]
    images = torch.sin(phases * 1.3) * (1 + labels.view(-1, 1, 1))
    images += torch.randn(images.shape, generator=generator) / 2
    return images[:, None], labels


def train(model: nn.Module, devices: list[torch.device]) -> list[float]:
    """The loss of every step; under ModelDataParallel lists go in and come out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        images, labels = make_batch(step)
        outputs = model(syncbn.scatter(images, devices))
        output = torch.cat([y.to(devices[0]) for y in outputs])
        loss = F.cross_entropy(output, labels.to(devices[0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    devices = [torch.device(d) for d in parser.parse_args().devices]
    model = make_model()
    local, synchronized = copy.deepcopy(model), syncbn.convert_model(copy.deepcopy(model))
    whole = train(syncbn.ModelDataParallel(model, devices[:1]), devices[:1])
    apart = train(syncbn.ModelDataParallel(local, devices), devices)
    together = train(syncbn.ModelDataParallel(synchronized, devices), devices)

    print("step  one model  replicas, nn.BatchNorm2d  replicas, syncbn")
    for step in range(0, STEPS, 5):
        print(f"{step:>4} {whole[step]:>10.5f} {apart[step]:>25.5f} {together[step]:>17.5f}")
    far, near = (
        max(abs(a - b) for a, b in zip(whole, losses, strict=True)) for losses in (apart, together)
    )
    print(f"largest difference from one model: nn.BatchNorm2d {far:.1e}, syncbn {near:.1e}")
    passed = near < TOLERANCE < far
    print("synchronized replicas train as one model" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
