"""Builds syncbn._C: CUDA kernels where a CUDA toolkit and a CUDA build of PyTorch are, else CPU
only.

SYNCBN_CUDA=1 asks for the CUDA build (and fails without nvcc), SYNCBN_CUDA=0 for the CPU-only one.
TORCH_CUDA_ARCH_LIST sets the GPU architectures, CUDA_HOME the toolkit. With SYNCBN_CUDA=1 a CPU
build of PyTorch will do, because of PyTorch the extension uses one plain C header.

What cannot be built ends in one sentence.
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

# Without TORCH_CUDA_ARCH_LIST: those of them that nvcc knows, and PTX of the last for newer GPUs.
DEFAULT_ARCHS = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
# The first GCC with __builtin_convertvector (csrc/cpu/vec.h).
MINIMUM_GCC = 9


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
    if home is None:
        missing = (
            "no CUDA toolkit (nvcc with its headers) in CUDA_HOME, on PATH or in /usr/local/cuda"
        )
        if wish == "1":
            sys.exit(f"SYNCBN_CUDA=1 asks for CUDA kernels, but there is {missing}.")
        return None, missing
    if torch.version.cuda is None and wish != "1":
        return None, f"PyTorch {torch.__version__} is a CPU build"
    return home, f"CUDA toolkit in {home}, PyTorch {torch.__version__}"


def ask_nvcc(home: str, argument: str) -> str:
    return subprocess.run(
        [f"{home}/bin/nvcc", argument], capture_output=True, text=True, check=True
    ).stdout


def check_versions(home: str) -> None:
    toolkit = re.search(r"release (\d+)\.", ask_nvcc(home, "--version"))[1]
    if torch.version.cuda and torch.version.cuda.split(".")[0] != toolkit:
        sys.exit(
            f"The nvcc in {home} is of CUDA {toolkit}, but PyTorch {torch.__version__} of CUDA"
            f" {torch.version.cuda}: set CUDA_HOME to a toolkit of the same major version, or"
            " SYNCBN_CUDA=0 for the CPU-only build (pip builds against the newest PyTorch unless"
            " it is given --no-build-isolation)."
        )


def choose_archs(home: str) -> str:
    """The architectures as PyTorch's TORCH_CUDA_ARCH_LIST names them, all of them known to nvcc."""
    listed = re.findall(r"^compute_(\d+)(\d)$", ask_nvcc(home, "--list-gpu-arch"), re.MULTILINE)
    # The kernels need 7.0's memory model.
    known = [f"{major}.{minor}" for major, minor in listed if int(major) >= 7]
    wish = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";")
    if not wish:
        return ";".join(arch for arch in DEFAULT_ARCHS if arch in known) + "+PTX"
    # A name instead of a number (Hopper, All) is PyTorch's to read.
    unknown = [arch for arch in re.findall(r"\d+\.\d+", wish) if arch not in known]
    if unknown:
        sys.exit(
            f"TORCH_CUDA_ARCH_LIST: syncbn with the nvcc in {home} does not compile for"
            f" {', '.join(unknown)}, only for {', '.join(known)}."
        )
    return wish


def check_compiler(compiler: str) -> None:
    macros = subprocess.run(
        [compiler, "-E", "-P", "-x", "c++", "-"],
        input="__GNUC__ __clang__", capture_output=True, text=True,
    ).stdout  # fmt: skip
    gcc = re.match(r"(\d+) __clang__", macros)
    if gcc and int(gcc[1]) < MINIMUM_GCC:
        sys.exit(
            f"syncbn needs GCC {MINIMUM_GCC} or newer, and {compiler} is GCC {gcc[1]}: set CXX to a"
            " newer compiler."
        )


home, reason = choose()
print(f"syncbn: {'CUDA' if home else 'CPU-only'} build ({reason})")
if home:
    check_versions(home)
    # Before the import below, which takes CUDA_HOME from the environment or guesses it from PATH.
    os.environ["CUDA_HOME"] = home
    archs = os.environ["TORCH_CUDA_ARCH_LIST"] = choose_archs(home)

from torch.utils import cpp_extension  # noqa: E402

if home:
    cpp_extension.CUDA_HOME = home  # which a CPU build of PyTorch leaves None


def quoted(text: str) -> str:
    return '"' + text + '"'


class Build(cpp_extension.BuildExtension):
    def build_extensions(self) -> None:
        check_compiler(self.compiler.compiler_cxx[0])
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
    macros += [("SYNCBN_WITH_CUDA", None), ("SYNCBN_CUDA_ARCHS", quoted(archs))]
    nvcc_flags = ["-O3", "-std=c++17", "--threads=2", "-Xcompiler=-fvisibility=hidden"]
    extension = cpp_extension.CUDAExtension(
        "syncbn._C",
        sources,
        include_dirs=[str(Path("csrc").resolve()), pybind11.get_include()],
        define_macros=macros,
        extra_compile_args={"cxx": cxx, "nvcc": nvcc_flags},
        extra_link_args=["-Wl,-s"],
    )
    libraries = ["cudart_static", "rt", "dl", "pthread"]
else:
    extension = cpp_extension.CppExtension(
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
