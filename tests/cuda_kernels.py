"""Every CUDA kernel once in each of its forms, at small and odd sizes, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/cuda_kernels.py

Results are compared with the reference, so that a run also says whether they were right.
"""

import itertools

import torch

from syncbn import _C, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Not below float32, in which the [C] vectors are.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float64: 1e-6}
SHAPES = (
    (2, 3, 5, 7),  # rows of partial packs
    (3, 8, 4, 4),  # rows of whole packs
    (5, 70, 1, 1),
    (37, 24, 1, 1),
    (2, 3, 64, 65),  # a channel on many blocks
)


def run(ops, x, dy, weight, bias, workspace):
    """[sums, y, moments, running_mean, running_var, sums_dy, dweight, dbias, dx]"""
    channels = x.shape[1]
    float64 = {"dtype": torch.float64, "device": x.device}
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums, moments = (torch.empty(2 * channels + 1, **float64) for _ in range(2))
    running_mean, running_var = torch.zeros_like(weight), torch.ones_like(weight)
    batches = torch.zeros((), dtype=torch.int64, device=x.device)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    sums_dy = torch.empty(2 * channels, dtype=acc, device=x.device)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    ops.statistics(x, sums, workspace)
    running = running_mean, running_var, batches
    ops.normalize(x, weight, bias, sums, *running, y, moments, 0.1, 1e-5)
    ops.backward_reduce(dy, x, moments, sums_dy, dweight, dbias, workspace)
    ops.backward_input(dy, x, weight, moments, sums_dy, dx)
    return [sums, y, moments, running_mean, running_var, sums_dy, dweight, dbias, dx]


def main():
    workspace = torch.zeros(_C.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    runs = 0
    formats = (torch.contiguous_format, torch.channels_last)
    for shape, dtype, fmt in itertools.product(SHAPES, DTYPES, formats):
        x, dy = (torch.randn(shape).to(dtype).contiguous(memory_format=fmt) for _ in range(2))
        weight, bias = torch.randn(shape[1]), torch.randn(shape[1])
        # One value beside its storage's begin, so that no pack is aligned there.
        for offset in (0, 1):
            on_cuda = []
            for t in (x, dy):
                memory = torch.empty(t.numel() + offset, dtype=dtype, device="cuda")
                on_cuda.append(memory.as_strided(t.shape, t.stride(), offset).copy_(t))
            got = run(_C, *on_cuda, weight.cuda(), bias.cuda(), workspace)
            wide = [t.double() for t in (x, dy, weight, bias)]
            for a, b in zip(got, run(reference, *wide, None), strict=True):
                error = (a.cpu().double() - b).norm() / b.norm().clamp_min(1e-3)
                assert error < TOLERANCE[dtype], (shape, dtype, fmt, offset, error)
            runs += 1
    empty = torch.empty(0, 3, 2, 2, device="cuda")
    for result in run(_C, empty, empty, weight[:3].cuda(), bias[:3].cuda(), workspace)[:1]:
        assert not result.any()
    torch.cuda.synchronize()
    print(f"{runs} runs of all kernels are right")


if __name__ == "__main__":
    main()
