"""CPU kernels against ``torch.nn.BatchNorm2d``: forward + backward in training on the same tensors.

    python benchmarks/cpu.py

Prints microseconds and the ratio syncbn / nn.BatchNorm2d; below 1 syncbn is faster.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from timing import alternate
from torch import nn

import syncbn

SHAPES = [(8, 64, 56, 56), (2, 256, 64, 64)]
DTYPES = [torch.float32, torch.bfloat16]
FORMATS = [torch.contiguous_format, torch.channels_last]


def step(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    layer(x).backward(dy)
    x.grad = None
    layer.zero_grad(set_to_none=True)


def main() -> None:
    all_threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'shape':<18} {'dtype':<9} {'layout':<14} threads   nn us  syncbn us  ratio")
    for shape, dtype, memory_format, threads in itertools.product(
        SHAPES, DTYPES, FORMATS, sorted({1, all_threads})
    ):
        torch.set_num_threads(threads)
        x = torch.randn(shape).to(dtype, memory_format=memory_format).requires_grad_()
        dy = torch.randn(shape).to(dtype, memory_format=memory_format)
        layers = nn.BatchNorm2d(shape[1]), syncbn.BatchNorm2d(shape[1])
        nn_us, syncbn_us = alternate([partial(step, m, x, dy) for m in layers])
        print(
            f"{shape!s:<18} {str(dtype).removeprefix('torch.'):<9} "
            f"{str(memory_format).removeprefix('torch.'):<18} {threads:>3} {nn_us:>8.0f} "
            f"{syncbn_us:>10.0f} {syncbn_us / nn_us:>6.2f}"
        )


if __name__ == "__main__":
    main()
