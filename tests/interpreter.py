"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def run_python(*arguments, cwd=None, timeout=600, **environment):
    # Not from the repository's folder by default: the installed package is what is tested.
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or Path(sys.executable).parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
