"""What a bug report needs: versions, build, devices, and the verdict of a self-check on each.

With ``check``, the self-check alone. The exit status is 1 if it fails.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from . import _C, BatchNorm2d, __version__
from ._requirements import hidden


def has_code(archs: str, capability: tuple[int, int]) -> bool | None:
    """Whether a build for ``archs``, written as in TORCH_CUDA_ARCH_LIST, has code for a device.

    Code for 8.0 runs on every 8.x, that for 8.6 not on 8.0; with +PTX also on all that came later.
    Code for 9.0a runs on 9.0 alone.

    Returns:
        None where it depends on something that has no number, as "native" has none.
    """
    unknown = False
    for arch in filter(None, archs.split(";")):
        parsed = re.fullmatch(r"(\d+)\.(\d)(a?)(\+PTX)?", arch)
        if parsed is None:
            unknown = True
            continue
        major, minor, only, ptx = parsed.groups()
        first = int(major), int(minor)
        if capability == first:
            return True
        if not only and capability > first and (ptx or capability[0] == first[0]):
            return True
    return None if unknown else False


def cuda_device(index: int) -> str:
    """Name, compute capability, and whether this build has code for it."""
    capability = torch.cuda.get_device_capability(index)
    code = {True: "has code", False: "has no code", None: "may have code"}[
        has_code(_C.build_info()["cuda_archs"], capability)
    ]
    return "{} (compute capability {}.{}, for which this build {})".format(
        torch.cuda.get_device_name(index), *capability, code
    )


def report() -> str:
    """Versions, the build of the extension, devices and process-group backends, a line each."""
    build = _C.build_info()
    cuda = f"CUDA {build['cuda']} for {build['cuda_archs']}" if build["cuda"] else "CPU only"
    backends = [
        name
        for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
        if dist.is_available() and getattr(dist, f"is_{name}_available", lambda: False)()
    ]
    lines = [
        ("syncbn", f"{__version__} in {Path(__file__).parent}"),
        *(("hides", other) for other in hidden()),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("pytorch", f"{torch.__version__} (CUDA {torch.version.cuda})"),
        ("extension", f"{cuda}, {build['compiler']}"),
        ("cpu", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        *((f"cuda:{i}", cuda_device(i)) for i in range(torch.cuda.device_count())),
        ("backends", ", ".join(backends) or "none"),
    ]
    return "\n".join(f"{name:<10} {value}" for name, value in lines)


def check(device: torch.device) -> str | None:
    """Trains one layer for three steps on ``device`` and compares with the reference.

    Returns:
        None if all is well, else one line that says what differs.
    """
    torch.manual_seed(0)
    for dtype, tolerance in (
        (torch.float32, 1e-5),
        (torch.float16, 2e-3),
        (torch.bfloat16, 1.6e-2),
        (torch.float64, 1e-12),
    ):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            layer = BatchNorm2d(19, dtype=torch.float64).to(device).train()
            weight = torch.randn(19, dtype=torch.float64, device=device)
            with torch.no_grad():
                layer.weight.copy_(weight)
            stock = torch.nn.BatchNorm2d(19, dtype=torch.float64)
            stock.load_state_dict(layer.state_dict())
            for _ in range(3):
                values = (torch.randn(3, 19, 9, 11) * 3 + 5).to(dtype)
                gradient = torch.randn(3, 19, 9, 11).to(dtype)
                x = values.to(device, memory_format=memory_format, copy=True).requires_grad_()
                expected_x = values.double().clone().requires_grad_()
                y, expected_y = layer(x), stock(expected_x)
                y.backward(gradient.to(device))
                expected_y.backward(gradient.double())
                pairs = {
                    "output": (y, expected_y),
                    "gradient of the input": (x.grad, expected_x.grad),
                    "gradient of the weight": (layer.weight.grad, stock.weight.grad),
                    "gradient of the bias": (layer.bias.grad, stock.bias.grad),
                    "running mean": (layer.running_mean, stock.running_mean),
                    "running variance": (layer.running_var, stock.running_var),
                }
                for what, (got, expected) in pairs.items():
                    assert got is not None
                    assert expected is not None
                    error = (got.cpu().double() - expected).abs().max() / expected.abs().max()
                    if not error <= tolerance:
                        return f"{what}, {dtype}, {memory_format}: relative error {error:.1e}"
    return None


def verdict(device: torch.device) -> str | None:
    """``check``, where an error is a verdict too."""
    try:
        return check(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m syncbn", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["report", "check"], default="report")
    if parser.parse_args().command == "report":
        print(report())
    devices = [torch.device("cpu")]
    if _C.build_info()["cuda"]:
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    failures = 0
    for device in devices:
        failure = verdict(device)
        failures += failure is not None
        print(f"check {device}: {failure or 'ok'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
