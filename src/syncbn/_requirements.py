"""Imports PyTorch and the extension, before the rest of the package needs them.

Where that cannot be, ``import syncbn`` raises an ImportError of one sentence: what is needed, what
was found, and the pip command that mends it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import struct
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_TORCH = (2, 10)  # the first with __dlpack_c_exchange_api__ (csrc/tensor.h)
_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE.parents[1]
_IS_SOURCE_TREE = (_ROOT / "csrc").is_dir()

# What apex's extension module, which is called syncbn too, has, and apex's SyncBatchNorm calls.
APEX = frozenset(
    {
        "batchnorm_backward",
        "batchnorm_backward_c_last",
        "batchnorm_forward",
        "batchnorm_forward_c_last",
        "reduce_bn",
        "reduce_bn_c_last",
        "relu_bw_c_last",
        "welford_mean_var",
        "welford_mean_var_c_last",
        "welford_parallel",
    }
)


def hidden() -> list[str]:
    """The other modules called syncbn on ``sys.path``, which Python does not reach."""
    names = ["syncbn/__init__.py", *(f"syncbn{suffix}" for suffix in EXTENSION_SUFFIXES)]
    files = [Path(folder, name).resolve() for folder in sys.path for name in names]
    return [str(f) for f in dict.fromkeys(files) if f.is_file() and f.parent != _PACKAGE]


def apex_attribute(name: str) -> str:
    """Why the package lacks a function of apex's extension."""
    at = ", ".join(f for f in hidden() if f.endswith(tuple(EXTENSION_SUFFIXES)))
    return (
        f"module 'syncbn' has no attribute {name!r}, which belongs to apex's extension of the same "
        f"name{at and f' ({at})'}, hidden by the package {_PACKAGE}; to mend this: use "
        "syncbn.convert_model in place of apex.parallel.convert_syncbn_model, or "
        "python -m pip uninstall syncbn"
    )


def _error(needed: str, found: str, arguments: str) -> ImportError:
    return ImportError(
        f"syncbn needs {needed}, but found {found}; to mend this: python -m pip install {arguments}"
    )


def _import_torch() -> None:
    needed = "PyTorch {}.{} or newer".format(*_TORCH)
    mended_by = "--upgrade 'torch>={}.{}'".format(*_TORCH)
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise _error(needed, f"none for {sys.executable}", mended_by) from None
    version = str(getattr(torch, "__version__", "without a version"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _TORCH:
        # The rest of an uninstalled PyTorch is a package without a file.
        place = getattr(torch, "__file__", None) or next(iter(torch.__path__))
        raise _error(needed, f"PyTorch {version} in {place}", mended_by)


def _import_extension() -> None:
    spec = importlib.util.find_spec("._C", __package__)
    if spec is None or spec.origin is None:
        raise _extension_error(_without_extension())
    if _is_truncated(spec.origin):
        raise _extension_error(f"that {spec.origin} is cut off")
    try:
        importlib.import_module("._C", __package__)
    except ImportError as error:
        cause = str(error.__cause__ or error)
        if re.search(r"undefined symbol: (GOMP|omp)_", cause):
            # Not linked with an OpenMP library: csrc/cpu/parallel.h says why.
            raise _error(
                "a PyTorch that loads an OpenMP runtime, as PyTorch's wheels do",
                f"none loaded ({cause})",
                "--force-reinstall torch",
            ) from error
        raise _extension_error(f"that it does not load ({cause})") from error


def _extension_error(found: str) -> ImportError:
    mended_by = "--force-reinstall --no-deps syncbn"
    if _IS_SOURCE_TREE:
        mended_by = f"--no-build-isolation -e {shlex.quote(str(_ROOT))}"
    return _error(f"its extension _C{EXTENSION_SUFFIXES[0]}", found, mended_by)


def _without_extension() -> str:
    others = sorted(f.name for f in _PACKAGE.glob("_C.*") if f.suffix in (".so", ".pyd"))
    found = f"{', '.join(others)} for another Python" if others else "none"
    if not _IS_SOURCE_TREE:
        return f"{found} in {_PACKAGE}"
    installed = ", ".join(hidden())
    return f"{found} in the source tree {_PACKAGE}{installed and f', which hides {installed}'}"


def _is_truncated(extension: str) -> bool:
    """Whether a 64-bit ELF file ends before its last part, the table of its sections.

    The loader would not notice: the process would die of a bus error.
    """
    file = Path(extension)
    with file.open("rb") as stream:
        header = stream.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF\x02\x01"):
        return False  # the loader's to judge
    (sections,) = struct.unpack_from("<Q", header, 40)
    return bool(sections > file.stat().st_size)


_import_torch()
_import_extension()
