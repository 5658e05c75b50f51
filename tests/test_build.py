"""What setup.py says where it cannot build: one sentence. Small scripts stand in for the tools."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# setup.py, with another PyTorch and, if so wished, on a machine without /usr/local/cuda.
SETUP = """
import os, pathlib, runpy
import torch
torch.version.cuda = os.environ["TORCH_CUDA"] or None
if os.environ["NO_TOOLKIT"]:
    exists = pathlib.Path.exists
    pathlib.Path.exists = lambda path, **k: path.name != "nvcc" and exists(path, **k)
end = runpy.run_path("setup.py", run_name="__main__")
print("architectures:", end.get("archs"))
"""


def run_setup(*arguments, torch_cuda="", toolkit="", **environment):
    given = {
        "TORCH_CUDA": torch_cuda,
        "NO_TOOLKIT": "" if toolkit else "1",
        "CUDA_HOME": str(toolkit),
        "CUDA_PATH": "",
        "TORCH_CUDA_ARCH_LIST": "",
        "SYNCBN_CUDA": "",
    }
    return subprocess.run(
        [sys.executable, "-c", SETUP, *arguments],
        cwd=ROOT, env=os.environ | given | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def script(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def toolkit(folder, version):
    """An nvcc that compiles nothing."""
    script(
        folder / "bin/nvcc",
        "case $1 in\n"
        f"  --version) echo 'Cuda compilation tools, release {version}, V{version}.1' ;;\n"
        "  --list-gpu-arch) printf 'compute_61\\ncompute_75\\ncompute_90\\ncompute_120\\n' ;;\n"
        "esac\n",
    )
    (folder / "include").mkdir()
    (folder / "include/cuda_runtime.h").touch()
    return folder


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ("1", r"SYNCBN_CUDA=1 asks for CUDA kernels, but there is no CUDA toolkit \(nvcc .*\.\n"),
        ("yes", r"SYNCBN_CUDA: expected 0, 1 or nothing, got 'yes'\n"),
    ],
)
def test_without_nvcc(tmp_path, wish, text):
    done = run_setup("--version", torch_cuda="13.0", SYNCBN_CUDA=wish, PATH=str(tmp_path))
    assert done.returncode == 1
    assert re.fullmatch(text, done.stderr)


def test_an_unset_choice_without_nvcc_is_the_cpu_build_and_says_why(tmp_path):
    done = run_setup("--version", torch_cuda="13.0", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^syncbn: CPU-only build \(no CUDA toolkit .*\)$", done.stdout, re.MULTILINE)


def test_an_unset_choice_with_a_cpu_build_of_pytorch_is_the_cpu_build(tmp_path):
    done = run_setup("--version", toolkit=toolkit(tmp_path, "13.0"))
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^syncbn: CPU-only build \(PyTorch .* CPU build\)$", done.stdout, re.MULTILINE
    )


@pytest.mark.parametrize("torch_cuda", ["", "13.2"])
def test_kernels_are_built_with_a_toolkit_that_fits(tmp_path, torch_cuda):
    """Also against a CPU build of PyTorch, as the release wheels are. All archs that nvcc knows."""
    home = toolkit(tmp_path, "13.0")
    done = run_setup("--version", torch_cuda=torch_cuda, toolkit=home, SYNCBN_CUDA="1")
    assert done.returncode == 0, done.stderr
    assert f"syncbn: CUDA build (CUDA toolkit in {home}, PyTorch " in done.stdout
    assert "architectures: 7.5;9.0;12.0+PTX\n" in done.stdout


@pytest.mark.parametrize("wish", ["", "1"])
def test_an_nvcc_of_another_major_version_than_pytorchs(tmp_path, wish):
    done = run_setup(
        "--version", torch_cuda="13.0", toolkit=toolkit(tmp_path, "12.9"), SYNCBN_CUDA=wish
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"The nvcc in .* is of CUDA 12, but PyTorch \S+ of CUDA 13\.0: set CUDA_HOME to .*\.\n",
        done.stderr,
    )


def test_an_architecture_that_nvcc_does_not_know(tmp_path):
    home = toolkit(tmp_path, "13.0")
    done = run_setup(
        "--version", torch_cuda="13.0", toolkit=home, TORCH_CUDA_ARCH_LIST="6.1 9.0+PTX"
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"TORCH_CUDA_ARCH_LIST: syncbn with the nvcc in {home} does not compile for 6.1,"
        " only for 7.5, 9.0, 12.0.\n"
    )


def test_a_compiler_that_is_too_old(tmp_path):
    """It answers what GCC 8 does to the question for its version."""
    compiler = script(tmp_path / "g++", "echo '8 __clang__'\n")
    done = run_setup("build_ext", CXX=str(compiler), SYNCBN_CUDA="0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"syncbn needs GCC 9 or newer, and {compiler} is GCC 8: set CXX to a newer compiler."
    )
