"""Host time of a layer: 20 small layers in a row, forward + backward, one rank.

    python benchmarks/host.py

The tensors are so small that what is measured is the way to the kernels. On a GPU the queue never
fills, so that the host's clock sees the host's work alone.
"""

from __future__ import annotations

from functools import partial

import torch
from timing import alternate
from torch import nn

import syncbn

LAYERS = 20
SHAPE = (2, 16, 4, 4)


def step(layers: nn.Sequential, x: torch.Tensor, dy: torch.Tensor) -> None:
    layers(x).backward(dy)


def main() -> None:
    torch.set_num_threads(1)
    devices = ["cpu"] + (
        ["cuda"] if syncbn._C.build_info()["cuda"] and torch.cuda.is_available() else []
    )
    print(f"torch {torch.__version__}; {LAYERS} layers of {SHAPE}, forward + backward")
    print("device  nn.BatchNorm2d us/layer  syncbn us/layer  ratio")
    for device in devices:
        x = torch.randn(SHAPE, device=device, requires_grad=True)
        dy = torch.randn(SHAPE, device=device)
        stacks = [
            nn.Sequential(*(cls(SHAPE[1]) for _ in range(LAYERS))).to(device)
            for cls in (nn.BatchNorm2d, syncbn.BatchNorm2d)
        ]
        nn_us, syncbn_us = (
            t / LAYERS for t in alternate([partial(step, s, x, dy) for s in stacks])
        )
        print(f"{device:<7} {nn_us:>23.1f} {syncbn_us:>16.1f} {syncbn_us / nn_us:>6.2f}")


if __name__ == "__main__":
    main()
