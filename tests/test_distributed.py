"""The helper that starts ranks: failures are reported, and no process outlives them."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from distributed import RankError, run_ranks


def _rank_and_pid(value):
    return dist.get_rank(), dist.get_world_size(), os.getpid(), value + dist.get_rank()


def test_results_come_in_the_order_of_ranks():
    results = run_ranks(2, _rank_and_pid, torch.ones(2))
    assert [r[:2] for r in results] == [(0, 2), (1, 2)]
    assert [r[3].tolist() for r in results] == [[1, 1], [2, 2]]
    assert len({r[2] for r in results} | {os.getpid()}) == 3
    again = run_ranks(2, _rank_and_pid, torch.ones(2))
    assert [r[2] for r in again] == [r[2] for r in results], "the two ranks are kept"


def _fail_on(rank, how):
    if dist.get_rank() != rank:
        return
    if how == "raise":
        raise ValueError("from within the rank")
    if how == "hang":
        time.sleep(60)
    os._exit(3)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "ValueError: from within the rank"),
        ("hang", "rank 0 did not answer within 1 s"),
        ("exit", "exit code 3"),
    ],
)
def test_a_failure_is_reported_and_ends_the_processes(how, text):
    before = set(multiprocessing.active_children())
    start = time.monotonic()
    with pytest.raises(RankError, match=text) as raised:
        run_ranks(1, _fail_on, 0, how, timeout=1 if how == "hang" else 30)
    assert time.monotonic() - start < 50
    assert set(multiprocessing.active_children()) <= before
    if how == "raise":
        assert "_fail_on" in str(raised.value), "the traceback of the rank"
