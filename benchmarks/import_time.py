"""What ``import syncbn`` adds over ``import torch``.

python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 7
CODE = """
import time
import torch
start = time.perf_counter()
import syncbn
print(time.perf_counter() - start)
"""


def main() -> None:
    times = [
        float(subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True).stdout)
        for _ in range(RUNS)
    ]
    print(
        f"import syncbn after import torch: median {statistics.median(times) * 1e3:.1f} ms, "
        f"largest {max(times) * 1e3:.1f} ms of {RUNS} runs"
    )


if __name__ == "__main__":
    main()
