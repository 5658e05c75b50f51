"""Builds syncbn._C: CUDA kernels where a CUDA toolkit and a CUDA build of PyTorch are, else CPU
only.

SYNCBN_CUDA=1 asks for the CUDA build (and fails without nvcc), SYNCBN_CUDA=0 for the CPU-only one.
TORCH_CUDA_ARCH_LIST sets the GPU architectures, CUDA_HOME the toolkit.
"""

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import pybind11
import torch
from setuptools import setup

DEFAULT_ARCHS = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"


def cuda_home() -> str | None:
    """The toolkit's folder. nvcc itself is asked, because the nvcc on PATH may be a wrapper
    script."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        dry_run = subprocess.run(
            [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
        )
        candidates += re.findall(r"^#\$ TOP=(.+)$", dry_run.stderr, flags=re.MULTILINE)
    candidates.append("/usr/local/cuda")
    for candidate in filter(None, candidates):
        home = Path(candidate).resolve()
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return str(home)
    return None


def choose() -> tuple[str | None, str]:
    """(toolkit folder, or None for the CPU-only build; the reason)"""
    wish = os.environ.get("SYNCBN_CUDA")
    if wish not in (None, "", "0", "1"):
        sys.exit(f"SYNCBN_CUDA: expected 0, 1 or nothing, got {wish!r}")
    if wish == "0":
        return None, "SYNCBN_CUDA=0"
    home = cuda_home()
    missing = None
    if home is None:
        missing = (
            "no CUDA toolkit (nvcc with its headers) in CUDA_HOME, on PATH or in /usr/local/cuda"
        )
    elif torch.version.cuda is None:
        missing = f"PyTorch {torch.__version__} is a CPU build"
    if missing and wish == "1":
        sys.exit(f"SYNCBN_CUDA=1 asks for CUDA kernels, but there is {missing}.")
    if missing:
        return None, missing
    return home, f"CUDA toolkit in {home}, PyTorch {torch.__version__}"


home, reason = choose()
print(f"syncbn: {'CUDA' if home else 'CPU-only'} build ({reason})")
if home:
    # Before the import below, which takes CUDA_HOME from the environment or guesses it from PATH.
    os.environ["CUDA_HOME"] = home
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHS)

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


def quoted(text: str) -> str:
    return '"' + text + '"'


class Build(BuildExtension):
    def build_extensions(self) -> None:
        for extension in self.extensions:
            extension.define_macros.append(
                ("SYNCBN_VERSION", quoted(self.distribution.get_version()))
            )
        super().build_extensions()


sources = ["csrc/bindings.cpp", *sorted(glob("csrc/cpu/*.cpp"))]
cxx = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra"]
macros = []
if sys.platform == "linux":
    # OpenMP is compiled for and not linked: the symbols come from the runtime that PyTorch has
    # loaded, so that both share one pool of threads. -Wno-psabi: no vector type crosses a library's
    # boundary.
    cxx += ["-fopenmp", "-Wno-psabi"]
if home:
    sources += sorted(glob("csrc/cuda/*.cu"))
    archs = os.environ["TORCH_CUDA_ARCH_LIST"].replace(" ", ";")
    macros += [("SYNCBN_WITH_CUDA", None), ("SYNCBN_CUDA_ARCHS", quoted(archs))]
    nvcc_flags = ["-O3", "-std=c++17", "--threads=2", "-Xcompiler=-fvisibility=hidden"]
    extension = CUDAExtension(
        "syncbn._C",
        sources,
        include_dirs=[str(Path("csrc").resolve()), pybind11.get_include()],
        define_macros=macros,
        extra_compile_args={"cxx": cxx, "nvcc": nvcc_flags},
        extra_link_args=["-Wl,-s"],
    )
    libraries = ["cudart_static", "rt", "dl", "pthread"]
else:
    extension = CppExtension(
        "syncbn._C",
        sources,
        include_dirs=[str(Path("csrc").resolve()), pybind11.get_include()],
        define_macros=macros,
        extra_compile_args={"cxx": cxx},
        extra_link_args=["-Wl,-s"] if sys.platform == "linux" else [],
    )
    libraries = []
# No library of PyTorch's: the extension reads tensors through DLPack alone (csrc/tensor.h).
extension.libraries = libraries
extension.depends = sorted(
    glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True)
)

setup(ext_modules=[extension], cmdclass={"build_ext": Build})
