"""``python -m syncbn``: what a bug report needs to say about devices and the self-check."""

import re
import sys

import pytest
import torch

from interpreter import run_python
from syncbn import _C, __main__

RELEASED = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (RELEASED, (7, 5), True),
        (RELEASED, (9, 0), True),
        (RELEASED, (8, 7), True),  # a later 8.x
        (RELEASED, (10, 3), True),
        (RELEASED, (12, 1), True),
        (RELEASED, (13, 0), True),  # from PTX
        (RELEASED, (7, 0), False),  # an earlier 7.x
        (RELEASED, (6, 1), False),
        (RELEASED, (11, 0), False),  # PTX of 12.0 is too new
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (9, 0), True),
        ("9.0a", (9, 0), True),
        ("10.0a", (10, 3), False),
        ("10.0a+PTX", (12, 0), False),
        ("8.0;;9.0", (9, 0), True),
        ("native", (9, 0), None),
        ("Ampere;9.0", (8, 0), None),
        ("Ampere;9.0", (9, 0), True),
        ("", (9, 0), False),  # the CPU-only build
    ],
)
def test_code_for_a_device(archs, capability, expected):
    assert __main__.has_code(archs, capability) is expected


@pytest.mark.parametrize(
    ("archs", "verb"), [("9.0", "has code"), ("8.0", "has no code"), ("native", "may have code")]
)
def test_the_report_says_whether_there_is_code(archs, verb, monkeypatch):
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": "13.0", "cuda_archs": archs})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    expected = f"NVIDIA H200 (compute capability 9.0, for which this build {verb})"
    assert __main__.cuda_device(0) == expected


def test_the_report_is_whole():
    done = run_python("-m", "syncbn")
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^(\S+(?: \S+:)?) ", done.stdout, re.MULTILINE)
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    checks = ["check cpu:", *(f"check {d}:" for d in devices if _C.build_info()["cuda"])]
    ours = ["syncbn", "python", "pytorch", "extension", "cpu", *devices, "backends", *checks]
    assert [n for n in names if n != "hides"] == ours


def test_an_error_is_a_verdict(monkeypatch, capsys):
    def fails(*arguments):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(_C, "forward", fails)
    monkeypatch.setattr(sys, "argv", ["syncbn"])
    assert __main__.main() == 1
    assert "check cpu: RuntimeError: no kernel image\n" in capsys.readouterr().out
