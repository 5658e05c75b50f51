"""``import syncbn`` where something is missing, broken or called the same: one sentence."""

import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import syncbn
from interpreter import run_python
from syncbn import _requirements

PACKAGE = Path(syncbn.__file__).parent
EXTENSION = f"_C{EXTENSION_SUFFIXES[0]}"
ANOTHER_PYTHONS = "_C.cpython-39-x86_64-linux-gnu.so"

linux = pytest.mark.skipif(sys.platform != "linux", reason="ELF files")
a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

SENTENCE = re.compile(
    r"ImportError: syncbn needs (?P<needed>[^;]+), but found (?P<found>[^;]+); "
    r"to mend this: python -m pip install (?P<arguments>[^;]+)"
)
REINSTALL = "--force-reinstall --no-deps syncbn"
NEWER_TORCH = "--upgrade 'torch>=2.10'"


@pytest.fixture
def site(tmp_path):
    """A folder with a copy of the installed package, before which nothing is on the path."""
    shutil.copytree(PACKAGE, tmp_path / "syncbn", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run_in(folder, *arguments):
    return run_python(*arguments, cwd=folder, timeout=120, PYTHONPATH=str(folder))


def refused(folder, *flags, arguments=("-c", "import syncbn")):
    """What ``import syncbn`` says is needed, was found, and mends it."""
    done = run_in(folder, *flags, *arguments)
    assert done.returncode == 1, done.stderr
    sentence = SENTENCE.fullmatch(done.stderr.splitlines()[-1])
    assert sentence, done.stderr
    return sentence["needed"], sentence["found"], sentence["arguments"]


NEW_ENOUGH = "__version__ = '2.14.0'\n"


def stand_in(folder, text):
    """A package ``torch`` that holds ``text``."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(text)


def compiled(file, text):
    source = file.with_suffix(".c")
    source.write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", file], check=True, timeout=120)


# ---- PyTorch


def test_no_pytorch(site):
    needed, found, arguments = refused(site, "-S")  # without site-packages
    assert needed == "PyTorch 2.10 or newer"
    assert found == f"none for {sys.executable}"
    assert arguments == NEWER_TORCH


@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.1", "2.9.0a0+git1234"])
def test_an_old_pytorch(version, site):
    stand_in(site, f"__version__ = {version!r}")
    needed, found, arguments = refused(site)
    assert needed == "PyTorch 2.10 or newer"
    assert found == f"PyTorch {version} in {site}/torch/__init__.py"
    assert arguments == NEWER_TORCH


def test_a_file_called_torch(site):
    (site / "torch.py").touch()
    assert refused(site)[1] == f"PyTorch without a version in {site}/torch.py"


def test_the_rest_of_an_uninstalled_pytorch(site):
    (site / "torch/lib").mkdir(parents=True)
    assert refused(site, "-S")[1] == f"PyTorch without a version in {site}/torch"


def test_what_pytorch_itself_lacks_is_left_to_pytorch(site):
    stand_in(site, "import a_dependency_of_pytorchs")
    done = run_in(site, "-c", "import syncbn")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'a_dependency_of_pytorchs'\n")


def test_the_version_needed_is_the_one_that_is_declared():
    declared = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'dependencies = ["torch>={}.{}"]'.format(*_requirements._TORCH) in declared


# ---- the extension


@pytest.mark.parametrize("arguments", [("-c", "import syncbn"), ("-m", "syncbn")])
def test_no_extension(arguments, site):
    (site / "syncbn" / EXTENSION).unlink()
    expected = f"its extension {EXTENSION}", f"none in {site}/syncbn", REINSTALL
    assert refused(site, arguments=arguments) == expected


def test_an_extension_for_another_python(site):
    (site / "syncbn" / EXTENSION).rename(site / "syncbn" / ANOTHER_PYTHONS)
    needed, found, arguments = refused(site)
    assert needed == f"its extension {EXTENSION}"
    assert found == f"{ANOTHER_PYTHONS} for another Python in {site}/syncbn"
    assert arguments == REINSTALL


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"\x7fELF\x02\x01"])
def test_an_extension_that_is_none(content, site):
    stand_in(site, NEW_ENOUGH)
    (site / "syncbn" / EXTENSION).write_bytes(content)
    needed, found, arguments = refused(site)
    assert needed == f"its extension {EXTENSION}"
    assert found.startswith(f"that it does not load ({site}/syncbn/{EXTENSION}: ")
    assert arguments == REINSTALL


@linux
@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_an_extension_that_is_cut_off(part, site):
    """The loader would end the process."""
    stand_in(site, NEW_ENOUGH)
    file = site / "syncbn" / EXTENSION
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    assert refused(site)[1:] == (f"that {file} is cut off", REINSTALL)


@linux
@a_compiler
def test_an_undefined_symbol(site):
    stand_in(site, NEW_ENOUGH)
    compiled(
        site / "syncbn" / EXTENSION,
        "void gone_since(void); void PyInit__C(void) { gone_since(); }",
    )
    _, found, arguments = refused(site)
    assert found.startswith("that it does not load (")
    assert found.endswith(": undefined symbol: gone_since)")
    assert arguments == REINSTALL


@linux
def test_no_openmp_runtime(site):
    stand_in(site, NEW_ENOUGH)
    needed, found, arguments = refused(site)
    assert needed == "a PyTorch that loads an OpenMP runtime, as PyTorch's wheels do"
    assert re.fullmatch(r"none loaded \(.*: undefined symbol: (GOMP|omp)_\w+\)", found)
    assert arguments == "--force-reinstall torch"


@linux
def test_an_extension_whose_start_fails(site):
    """With the reason, which pybind11 keeps as the cause of the error."""
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not runtimes:
        pytest.skip("this PyTorch brings no libgomp")
    stand_in(
        site,
        f"{NEW_ENOUGH}import ctypes; ctypes.CDLL({str(runtimes[0])!r}, ctypes.RTLD_GLOBAL)",
    )
    _, found, arguments = refused(site)
    assert found == "that it does not load (module 'torch' has no attribute 'Tensor')"
    assert arguments == REINSTALL


def test_a_source_tree_that_is_not_built(tmp_path):
    """It hides the installed package."""
    root = Path(__file__).parents[1]
    tree = tmp_path / "a tree"
    shutil.copytree(
        root / "src", tree / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (tree / "csrc").mkdir()
    needed, found, arguments = refused(tree / "src")
    assert needed == f"its extension {EXTENSION}"
    assert found == (
        f"none in the source tree {tree}/src/syncbn, which hides {PACKAGE.resolve()}/__init__.py"
    )
    assert arguments == f"--no-build-isolation -e '{tree}'"


# ---- apex, whose extension module is called syncbn too


@pytest.fixture
def apex(site):
    """apex's extension beside the package, which comes first."""
    file = site / f"syncbn{EXTENSION_SUFFIXES[0]}"
    file.touch()
    return file


def test_a_call_that_is_meant_for_apexs_extension(apex):
    done = run_in(apex.parent, "-c", "import syncbn; syncbn.welford_mean_var_c_last(0)")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "AttributeError: module 'syncbn' has no attribute 'welford_mean_var_c_last', which belongs "
        f"to apex's extension of the same name ({apex}), hidden by the package "
        f"{apex.parent}/syncbn; to mend this: use syncbn.convert_model in place of "
        "apex.parallel.convert_syncbn_model, or python -m pip uninstall syncbn"
    )


def test_the_report_names_what_is_hidden(apex):
    done = run_in(apex.parent, "-m", "syncbn")
    assert done.returncode == 0, done.stderr
    hidden = re.findall(r"^hides +(.*)$", done.stdout, re.MULTILINE)
    assert hidden == [str(apex), f"{PACKAGE.resolve()}/__init__.py"]


def test_other_attributes_are_missed_as_usual():
    assert not hasattr(syncbn, "welford_parallel")
    with pytest.raises(AttributeError, match=r"^module 'syncbn' has no attribute 'dance'$"):
        _ = syncbn.dance
    with pytest.raises(ImportError, match="cannot import name 'dance'"):
        from syncbn import dance  # noqa: F401
