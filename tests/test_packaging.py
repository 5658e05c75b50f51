"""What is installed, the wheel that it came from, the source distribution, and the command line."""

import ast
import importlib.metadata
import os
import re
import shutil
import statistics
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import syncbn
from interpreter import run_python
from syncbn import _C
from syncbn import __main__ as command_line

ROOT = Path(__file__).parents[1]
MADE = (".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.png")
SOURCES = (".cpp", ".cu", ".h", ".cuh", ".c", ".o")

# What every Linux with Python has, and the C++ runtime.
SYSTEM = re.compile(r"(libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux-.*)\.so\.\d+")

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")


def build(kind, folder, out):
    """A wheel or sdist of ``folder``, without a network: all traffic goes to a closed port."""
    pytest.importorskip("build")  # which a machine with a GPU need not have
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    done = run_python(
        "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), ".",
        cwd=folder, SYNCBN_CUDA="0", SOURCE_DATE_EPOCH="1500000000", PIP_NO_INDEX="1", **nowhere,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (kind == "sdist") or "syncbn: CPU-only build (SYNCBN_CUDA=0)" in done.stdout
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A copy of the repository to build in."""
    copy = tmp_path_factory.mktemp("tree") / "syncbn"
    return shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*MADE))


@pytest.fixture(scope="session")
def sdist(tree, tmp_path_factory):
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel_of_sdist(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def wheel(request):
    """The wheel that SYNCBN_WHEEL names, as `make test` sets it, else one built here."""
    named = os.environ.get("SYNCBN_WHEEL")
    return Path(named) if named else request.getfixturevalue("wheel_of_sdist")


def dynamic_section(path):
    """{"needed": [...], "runpath": [...]} of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    table, size, count = (
        *struct.unpack_from("<Q", data, 0x20),
        *struct.unpack_from("<2H", data, 0x36),
    )
    headers = [struct.unpack_from("<2I4Q", data, table + i * size) for i in range(count)]
    loads = [(vaddr, offset, length) for t, _, offset, vaddr, _, length in headers if t == 1]
    ((start, length),) = [(offset, n) for t, _, offset, _, _, n in headers if t == 2]
    entries = list(struct.iter_unpack("<2Q", data[start : start + length // 16 * 16]))
    (strings,) = [value for tag, value in entries if tag == 5]
    (strings,) = [strings - v + offset for v, offset, n in loads if v <= strings < v + n]

    def named(*tags):
        at = [strings + value for tag, value in entries if tag in tags]
        return [data[a : data.index(b"\0", a)].decode() for a in at]

    return {"needed": named(1), "runpath": named(15, 29)}


def test_the_installed_package_is_tested_not_the_source_tree():
    assert not Path(syncbn.__file__).is_relative_to(ROOT / "src")
    assert not Path(_C.__file__).is_relative_to(ROOT / "src")


@linux
def test_the_extension_needs_the_system_libraries_alone():
    section = dynamic_section(Path(_C.__file__))
    assert section["needed"], "at least libc"
    assert [n for n in section["needed"] if not SYSTEM.fullmatch(n)] == []
    assert section["runpath"] == []


@linux
def test_no_symbol_of_pytorchs(wheel, tmp_path):
    """inplace_abn#224, #148: import with another PyTorch than at build time"""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".so")]
        extension = Path(archive.extract(name, tmp_path))
    assert [n for n in dynamic_section(extension)["needed"] if not SYSTEM.fullmatch(n)] == []
    data = extension.read_bytes()
    for prefix in (b"_ZN3c10", b"_ZN2at", b"_ZNK2at", b"_ZN5torch", b"THPVariable"):
        assert prefix not in data


def test_install_without_cuda(wheel_of_sdist):
    """inplace_abn#234, #129: the CPU build. Also: the sdist builds by itself."""
    with zipfile.ZipFile(wheel_of_sdist) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    assert any(re.fullmatch(r"syncbn/_C\..*\.(so|pyd)", n) for n in names)


def test_building_twice_gives_the_same_wheel(wheel_of_sdist, tree, tmp_path):
    """In another folder, and from the tree instead of the source distribution."""
    again = build("wheel", tree, tmp_path)
    assert again.name == wheel_of_sdist.name
    assert again.read_bytes() == wheel_of_sdist.read_bytes()


def test_the_wheel_holds_no_source(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert [n for n in names if n.endswith(SOURCES)] == []
    assert {n.split("/")[0] for n in names} == {"syncbn", f"syncbn-{syncbn.__version__}.dist-info"}
    assert {"syncbn/py.typed", "syncbn/_C.pyi", "syncbn/sync/__init__.py"} <= set(names)
    assert any(n.endswith("LICENSE") for n in names)


def test_the_wheel_holds_every_module(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    assert len(modules) > 5
    assert modules - {n for n in modules if "egg-info" in n} <= names


def test_the_installed_distribution_holds_no_source():
    files = importlib.metadata.files("syncbn")
    assert files
    assert [f for f in files if f.suffix in SOURCES] == []


def test_the_sdist_holds_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*.*") if p.is_file()}
    assert len(sources) > 5
    assert sources <= names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not any(n.endswith(".so") for n in names)


def test_the_version_stands_in_one_place():
    version = syncbn.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.\w+|rc\d+)?(\+cu12)?", version)
    assert importlib.metadata.version("syncbn") == _C.build_info()["version"] == version
    for name in ("pyproject.toml", "setup.py", "csrc/bindings.cpp", "src/syncbn/__init__.py"):
        assert version not in (ROOT / name).read_text(), name


def test_build_info():
    info = _C.build_info()
    assert set(info) == {"version", "compiler", "cuda", "cuda_archs"}
    assert info["cuda"] is None or re.fullmatch(r"\d+\.\d+", info["cuda"])
    assert bool(info["cuda"]) == bool(info["cuda_archs"])


def test_stubs_name_what_the_extension_has():
    stub = ast.parse((Path(syncbn.__file__).parent / "_C.pyi").read_text()).body
    functions = [n for n in stub if isinstance(n, ast.FunctionDef)]
    values = [n.target.id for n in stub if isinstance(n, ast.AnnAssign)]
    names = {f.name for f in functions} | set(values)
    assert names == {n for n in dir(_C) if not n.startswith("_")}
    for f in functions:
        first_line = getattr(_C, f.name).__doc__.splitlines()[0]
        arguments = re.findall(r"(\w+): ", first_line)
        assert arguments == [a.arg for a in f.args.args], f.name


def test_public_names():
    assert set(syncbn.__all__) <= set(dir(syncbn))
    for name in ("convert_model", "revert_model", "BatchNorm2d", "create_process_group"):
        assert name in syncbn.__all__
    assert callable(syncbn.functional.batchnorm2d_sync)


IMPORT = """
import time, torch
start = time.perf_counter()
import syncbn
seconds = time.perf_counter() - start
assert not torch.cuda.is_initialized()
print(seconds, syncbn.__file__)
"""


def test_import_is_quick_and_starts_no_cuda(record_property):
    """The bar on a quiet machine is 60 ms; others may be working here."""
    runs = [run_python("-c", IMPORT) for _ in range(3)]
    assert all(r.returncode == 0 for r in runs), runs[0].stderr
    milliseconds = statistics.median(float(r.stdout.split()[0]) * 1e3 for r in runs)
    print(f"import syncbn adds {milliseconds:.0f} ms to import torch")
    record_property("import_milliseconds", milliseconds)
    assert milliseconds < 150


def test_report():
    done = run_python("-m", "syncbn")
    assert done.returncode == 0, done.stderr
    for text in (syncbn.__version__, torch.__version__, _C.build_info()["compiler"]):
        assert text in done.stdout


def test_check_trains_on_every_device():
    done = run_python("-m", "syncbn", "check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check cpu: ok" in done.stdout
    if torch.cuda.is_available() and _C.build_info()["cuda"]:
        assert "check cuda:0: ok" in done.stdout


def test_check_fails_where_a_kernel_is_wrong(monkeypatch, capsys):
    """The self-test notices one wrong gradient."""
    right = _C.backward

    def wrong(dy, x, weight, moments, dweight, dbias, dx, workspace):
        assert right(dy, x, weight, moments, dweight, dbias, dx, workspace)
        dx.view(-1)[0] *= 1.5
        return True

    monkeypatch.setattr(_C, "backward", wrong)
    monkeypatch.setattr(sys, "argv", ["syncbn", "check"])
    assert command_line.main() == 1
    assert "check cpu: gradient of the input" in capsys.readouterr().out


def test_unknown_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["syncbn", "dance"])
    with pytest.raises(SystemExit, match="2"):
        command_line.main()
    assert "invalid choice" in capsys.readouterr().err
