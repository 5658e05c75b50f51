"""Real processes with a process group between them.

    results = run_ranks(2, function, *args)

calls ``function(*args)`` on every rank and returns what each returned. The function is sent by
name, so it stands at the top level of a module in this folder; it asks ``torch.distributed`` which
rank it is. Starting Python and importing PyTorch takes seconds, so two ranks are kept and run one
function after the other; they are replaced after a failure. Other world sizes get processes of
their own.

The backend is gloo, or what SYNCBN_TEST_BACKEND says: nccl gives each rank a GPU. Over gloo the
ranks compute on the CPU, or with SYNCBN_TEST_SHARED_GPU=1 all on one GPU. Tensors and modules among
the arguments arrive on ``rank_device()``, and tensors come back on the CPU.
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

START_TIMEOUT = 90  # seconds until every rank has its process group
BACKEND = os.environ.get("SYNCBN_TEST_BACKEND", "gloo")
SHARED_GPU = os.environ.get("SYNCBN_TEST_SHARED_GPU") == "1"
ON_GPU = BACKEND == "nccl" or SHARED_GPU
GRACE = 5  # seconds that the other ranks have to answer once one has failed


# For tests that need more of the backend than collectives that reduce or copy to all.
not_over_gloo_on_a_gpu = pytest.mark.skipif(
    SHARED_GPU, reason="gloo neither sends nor scatters CUDA tensors"
)


class RankError(AssertionError):
    """A rank raised, died or did not answer."""


def run_ranks(world_size, function, *args, timeout=60, backend=BACKEND):
    """What ``function(*args)`` returns on each of ``world_size`` ranks, in their order.

    Raises ``RankError`` with the traceback of each rank that raised, and the names of those that
    did not answer within ``timeout`` seconds. No process outlives a failure.
    """
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    if world_size == 2:
        return _pool(backend).run(function, args, timeout)
    ranks = Ranks(world_size, backend)
    try:
        return ranks.run(function, args, timeout)
    finally:
        ranks.close()


def rank_device():
    """Where a rank computes; in a process without ranks the CPU."""
    if dist.is_initialized() and (SHARED_GPU or dist.get_backend() == "nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def close_pool():
    """Ends the ranks that are kept."""
    for ranks in _kept.values():
        ranks.close()
    _kept.clear()


_kept = {}  # by backend


def _pool(backend):
    if backend not in _kept or not _kept[backend].alive:
        _kept[backend] = Ranks(2, backend)
    return _kept[backend]


class Ranks:
    """Processes that each have a process group and run what they are told."""

    def __init__(self, world_size, backend):
        self.folder = tempfile.TemporaryDirectory()  # the ranks meet at a file: no ports, no races
        self.alive = True
        self.processes, self.pipes = [], []
        context = multiprocessing.get_context("spawn")
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, world_size, backend, str(Path(self.folder.name) / "meet")),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self._answers(START_TIMEOUT)

    def run(self, function, args, timeout):
        # Test modules have another name under pytest than here: tests.test_x and test_x.
        module = function.__module__.rpartition(".")[2]
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a rank that died is reported below
                pipe.send_bytes(pickle.dumps((module, function.__qualname__, args)))
        return self._answers(timeout)

    def close(self):
        """Ends every process, by its own handle."""
        self.alive = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()

    def _answers(self, timeout):
        """One answer per rank; anything but a result of each ends all ranks."""
        results, errors = {}, {}
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self.pipes))
        while waiting and time.monotonic() < deadline:
            ready = connection.wait(waiting.values(), deadline - time.monotonic())
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    good, value = pickle.loads(waiting.pop(rank).recv_bytes())
                except EOFError:
                    self.processes[rank].join(GRACE)
                    good, value = False, f"exit code {self.processes[rank].exitcode}\n"
                (results if good else errors)[rank] = value
                if not good:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if errors or waiting:
            self.close()
            seconds = GRACE if errors else timeout  # that the ones below had
            text = [f"rank {rank} failed:\n{error}" for rank, error in errors.items()]
            text += [f"rank {rank} did not answer within {seconds} s" for rank in waiting]
            raise RankError("\n".join(text))
        return [results[rank] for rank in range(len(self.pipes))]


def _serve(pipe, rank, world_size, backend, meeting_point):
    """The life of a rank: meet the others, then run functions until the pipe closes."""
    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{meeting_point}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=50),
        )
    except Exception:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    pipe.send_bytes(pickle.dumps((True, None)))
    with contextlib.suppress(EOFError):
        while True:
            module, name, args = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_answer(module, name, args))


def _answer(module, name, args):
    try:
        torch.manual_seed(0)
        function = getattr(importlib.import_module(module), name)
        return pickle.dumps((True, _moved(function(*_moved(args, rank_device())), "cpu")))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _moved(value, device):
    """Tensors, without their history, and modules, also inside lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, torch.nn.Module):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value
