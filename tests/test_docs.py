"""The README and docs/: code blocks run, commands and names exist, figures are the measured ones.

What each language of a block means here; any other is a failure:

- ``python``: runs, in order, in one namespace per page. With a ``title`` it is a file of that name,
  which a ``torchrun`` line of the page has to run.
- ``bash``: each line is a command of one of the kinds below. ``torchrun`` of a file of the page and
  ``python -m syncbn`` are run; of the others it is checked that what they name exists.
- ``text``: what the ``python`` block, or the command, right before it prints.
"""

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import doc_blocks
import syncbn
import syncbn.__main__
from doc_blocks import blocks_of

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PERFORMANCE = ROOT / "docs/performance.md"
TIMEOUT = 240  # seconds for a page or a command; most take less than ten

# What a `pip install` line may name, and variables that are not this project's.
PACKAGES = {".", "torch", "syncbn", "setuptools", "wheel", "pybind11", "ninja"}
VARIABLES = {"OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"}

page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


def run(arguments, folder):
    """The standard output of a Python command line that succeeds."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def make_targets():
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def variables():
    sources = ("setup.py", "Makefile", "tests/gpu.sh", "tests/conftest.py")
    text = "".join((ROOT / name).read_text() for name in sources)
    return VARIABLES | set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", text))


def command_of(line):
    """The words of a line of shell, without comments and variables in front."""
    words = shlex.split(line, comments=True)
    while words and (match := re.match(r"([A-Z_]+)=", words[0])):
        assert match[1] in variables(), f"unknown variable {match[1]}: {line}"
        del words[0]
    return words


def check_command(words, titles=()):
    """Raises unless what a command names exists; returns what to run of it in Python, or None."""
    program, *rest = words
    if program == "make":
        targets = {w for w in rest if "=" not in w}
        assert targets <= make_targets(), f"no such target: {words}"
    elif program == "bash":
        assert (ROOT / rest[0]).is_file(), f"no such script: {words}"
    elif program == "pip":
        assert rest[0] == "install", f"an unknown pip command: {words}"
        names = [w for w in rest[1:] if not w.startswith("-")]
        names = [re.split(r"[\[<>=!~]", name)[0] for name in names]
        assert names, f"installs nothing: {words}"
        assert set(names) <= PACKAGES, f"an unknown package: {words}"
    elif program == "python" and rest[0] == "-m":
        assert rest[1] == "syncbn", f"an unknown module: {words}"
        assert rest[2:] in ([], ["check"]), f"an unknown command: {words}"
        return rest
    elif program in ("python", "torchrun"):
        (script,) = [w for w in rest if w.endswith(".py")]
        assert script in titles or (ROOT / script).is_file(), f"no such file: {words}"
        if script in titles:
            assert program == "torchrun", f"expected torchrun, got {words}"
            return ["-m", "torch.distributed.run", "--standalone", *rest]
    else:
        raise AssertionError(f"a command of unknown kind: {words}")
    return None


@page
def test_every_block_runs(page, tmp_path):
    blocks = blocks_of(page)
    files = {b.title: b for b in blocks if b.title}
    for name, block in files.items():
        assert block.language == "python", f"{block}: a file of unknown language"
        (tmp_path / name).write_text(block.code)
    printed = []
    if any(b.language == "python" and b.title is None for b in blocks):
        printed = json.loads(run([doc_blocks.__file__, page], tmp_path))
    printed = iter(printed)
    have_run = set()
    output = None  # what the block before has printed
    for block in blocks:
        if block.language == "python":
            output = next(printed) if block.title is None else None
        elif block.language == "bash":
            output = None
            for line in block.code.splitlines():
                words = command_of(line)
                if not words:
                    continue
                arguments = check_command(words, files)
                if arguments is not None:
                    output = run(arguments, tmp_path)
                    have_run |= files.keys() & set(arguments)
        elif block.language == "text":
            assert output is not None, f"{block}: nothing before it has been run"
            assert block.code == output, f"{block}: {output!r} has been printed"
            output = None
        else:
            raise AssertionError(f"{block}: a block of unknown language {block.language!r}")
    assert next(printed, None) is None
    assert have_run == files.keys(), "files that no torchrun line runs"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```\npip install .\n```\n", "unknown language"),
        ("```python hidden\npass\n```\n", "unknown language"),
        ("1. a step\n\n   ```python\n   pass\n   ```\n", "unknown language"),
        ("```python\npass\n", "does not end"),
        ("so:\n\n    pip install syncbn\n", "by indentation"),
        ("```rust\nfn main() {}\n```\n", "unknown language 'rust'"),
        ("```text\nsurprise\n```\n", "nothing before it"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "has been printed"),
        ("```python\nraise SystemError\n```\n", "SystemError"),
        ('```python title="a.py"\npass\n```\n', "no torchrun line"),
        ("```bash\ncurl example.org\n```\n", "unknown kind"),
        ("```bash\nmake coffee\n```\n", "no such target"),
        ("```bash\npip install torchvision\n```\n", "unknown package"),
        ("```bash\npython benchmarks/none.py\n```\n", "no such file"),
        ("```bash\nSYNCBN_COLOUR=1 make test\n```\n", "unknown variable"),
    ],
)
def test_nothing_escapes(tmp_path, text, error):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises((ValueError, AssertionError), match=error):
        test_every_block_runs(page, tmp_path)


@page
def test_commands_in_the_prose_exist(page):
    titles = {b.title for b in blocks_of(page) if b.title}
    for code in re.findall(r"`([^`\n]+)`", page.read_text()):
        if re.match(r"(make|python|torchrun|bash|pip) \S", code):
            check_command(command_of(code), titles)


@page
def test_names_exist(page):
    """Every `syncbn.something` can be looked up."""
    for name in set(re.findall(r"(?<![\w./-])syncbn((?:\.[A-Za-z_]\w*)+)", page.read_text())):
        found = syncbn
        for part in name[1:].split("."):
            assert hasattr(found, part), f"syncbn{name}"
            found = getattr(found, part)


@page
def test_tests_exist(page):
    """Every `test_file.py`, and every `::test_name` after it in the same line."""
    for line in page.read_text().splitlines():
        text = ""
        for file, name in re.findall(r"\b(test_\w+\.py)|::(test_\w+)", line):
            if file:
                text = (ROOT / "tests" / file).read_text()
            else:
                assert f"def {name}(" in text, f"{name} in {line}"


@page
def test_links_exist(page):
    """Relative links, pictures included. For docs/ the site's strict build checks anchors too."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", prose, re.MULTILINE):
        path = "".join(target).partition("#")[0]
        if path and not re.match(r"https?://", path):
            assert (page.parent / path).exists(), path


def drawing_script(name):
    spec = importlib.util.spec_from_file_location("drawing", ROOT / "docs" / name)
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    return drawing


def test_the_readme_shows_what_was_measured():
    """Its times are those of docs/performance.md, rounded."""
    text = (ROOT / "README.md").read_text()
    measured = drawing_script("layers.py").rows()
    shown = re.findall(
        r"^\| (\(.*?\)) (\w+) on an H200, forward \+ backward \| (\d+) us \| (\d+) us \|",
        text,
        re.MULTILINE,
    )
    for shape, dtype, torch_us, our_us in shown:
        row = measured[shape, dtype, "NCHW"]
        assert (int(torch_us), int(our_us)) == (
            round(row["nn.SyncBatchNorm"]),
            round(row["syncbn"]),
        )
    assert len(re.findall(r"\d [um]s\b", text)) == 2 * len(shown) > 0
    step = re.search(
        r"^\| a ResNet-50 step, batch (\d+) .* \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE
    )
    batch, torch_ratio, our_ratio = step.groups()
    row = rf"^\| {batch} \| eager \| [^|]*\| [^|]*\({torch_ratio}\) \| [^|]*\({our_ratio}\) \|"
    assert re.search(row, PERFORMANCE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "picture"), [("layers.py", "layers.svg"), ("data_flow.py", "data-flow.svg")]
)
def test_pictures_are_as_drawn(script, picture):
    """`python docs/layers.py` draws the table of docs/performance.md anew."""
    assert (ROOT / "docs" / picture).read_text() == drawing_script(script).picture()


def test_the_reference_covers_every_public_name():
    text = (ROOT / "docs/api.md").read_text()
    shown = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    modules = [syncbn, syncbn.functional, syncbn.sync, syncbn.modules, syncbn.parallel]
    public = {
        getattr(module, name)
        for module in modules
        for name in module.__all__
        if not name.startswith("__") and callable(getattr(module, name))
    }

    def look_up(path):
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    assert public <= {look_up(path) for path in shown}


def test_the_version_of_the_changelog_is_that_of_the_citation():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f'version: "{newest[1]}"\n' in citation
    assert f'date-released: "{newest[2]}"\n' in citation
    if re.fullmatch(r"\d+\.\d+\.\d+", syncbn.__version__):
        assert syncbn.__version__ == newest[1]
