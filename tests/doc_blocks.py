"""The code blocks of Markdown pages: where they are, and what the Python ones print.

    python tests/doc_blocks.py PAGE

runs the Python blocks of a page, in order and in one namespace, and prints a JSON list of what each
has printed. Tracebacks name the lines of the page.
"""

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*(.*?)\s*$")
_INFO = re.compile(r'^(\w+)(?: title="([\w.]+)")?$')


@dataclass(frozen=True)
class Block:
    """A fenced block. ``title`` makes it a file of that name."""

    page: Path
    line: int  # of its first line, from 1
    language: str
    title: str | None
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order.

    Raises:
        ValueError: a fence that does not end, or says something else than ``language`` or
            ``language title="file"``; a line that Markdown takes for code without a fence.
    """
    blocks = []
    lines = page.read_text().splitlines()
    fence, language, title, start = "", "", None, 0  # of the block that is open, if one is
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if fence:
            if match and match[1].startswith(fence) and not match[2]:
                code = "\n".join(lines[start : number - 1]) + "\n"
                blocks.append(Block(page, start + 1, language, title, code))
                fence = ""
        elif match:
            info = _INFO.match(match[2])
            if info is None or line != line.lstrip():
                raise ValueError(f"{page.name}:{number}: a block of unknown language: {line!r}")
            fence, start = match[1], number
            language, title = info.groups()
        elif re.match(r"( {4}|\t)\s*\S", line) and (number == 1 or not lines[number - 2].strip()):
            raise ValueError(f"{page.name}:{number}: code by indentation, which nothing runs")
    if fence:
        raise ValueError(f"{page.name}:{start}: a block that does not end")
    return blocks


def run(page: Path) -> list[str]:
    """What each Python block without a title prints."""
    namespace = {"__name__": "__main__"}
    printed = []
    for block in blocks_of(page):
        if block.language == "python" and block.title is None:
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            printed.append(out.getvalue())
    return printed


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
