"""One way to time, for all benchmarks on the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def alternate(
    candidates: list[Callable[[], object]],
    seconds: float = 3.0,
    warm_up: int = 5,
    turn: int = 10,
    rounds: int | None = None,
) -> list[float]:
    """Median time of each candidate in microseconds.

    The candidates take turns for ``seconds`` in all, so that whatever else the machine does meets
    all of them alike; a turn is several calls, so that each runs in the caches and the heap that it
    leaves itself. ``rounds`` is how often all have had a turn, in place of ``seconds``: ranks have
    to agree.
    """
    for _ in range(warm_up):
        for candidate in candidates:
            candidate()
    times: list[list[float]] = [[] for _ in candidates]
    end = time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < end if rounds is None else done < rounds:
        done += 1
        for candidate, mine in zip(candidates, times, strict=True):
            for _ in range(turn):
                start = time.perf_counter()
                candidate()
                mine.append(time.perf_counter() - start)
    return [statistics.median(mine) * 1e6 for mine in times]
