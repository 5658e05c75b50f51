"""Replicas that raise, do not come, or come to another layer: no hang, and the next step works."""

import ctypes
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import syncbn
from helpers import batch
from replication import (
    compare_a_step,
    data_parallel,
    local_and_synchronized,
    parallel_apply,
    replicate,
)
from syncbn.sync import ReplicaError, rendezvous, set_replica_timeout

SOON = 20  # seconds; the timeout is 300


class InjectedError(Exception):
    pass


class Net(nn.Module):
    """Layers, before one of which a replica may meet a fault."""

    def __init__(self, depth=3):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(depth))

    def forward(self, x, fault=None, at=-1, delay=0.0):
        for i, norm in enumerate(self.norms):
            x = self.conv(x)
            if i == at:
                time.sleep(delay)
                if fault == "raise":
                    raise InjectedError("injected")
                if fault == "bad dtype":
                    x = x.long()
                if fault == "bad shape":
                    x = x[:, :2]
                if fault == "skip":
                    continue
                if fault == "twice":
                    x = norm(x)
            x = norm(x)
        return x


ERRORS = {"raise": InjectedError, "bad dtype": TypeError, "bad shape": ValueError}
ERRORS |= {"skip": ReplicaError, "twice": ReplicaError}


@pytest.fixture
def short_timeout():
    before = rendezvous._timeout
    set_replica_timeout(0.5)
    yield
    set_replica_timeout(before)


def within(seconds, function, *args):
    """What ``function(*args)`` returns or raises; a failure if that takes longer."""
    outcome = {}

    def work():
        try:
            outcome["result"] = function(*args)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"hangs for {seconds} s"
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def restart(*models):
    """Running statistics as new ones: a failed step may have moved some."""
    for model in models:
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.reset_running_stats()


def run_wrapped(model, xs):
    return syncbn.ModelDataParallel(model, ["cpu"] * len(xs))(list(xs))


@pytest.mark.parametrize("run", [data_parallel, run_wrapped])
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.2])
@pytest.mark.parametrize("fault", ["raise", "bad dtype", "bad shape"])
def test_the_exception_of_a_replica_reaches_the_caller(run, who, at, delay, fault):
    reference, model = local_and_synchronized(Net())
    xs = batch((6, 3, 2, 2)).split(2)
    failing = [(x, fault, at, delay) if i == who else (x,) for i, x in enumerate(xs)]
    start = time.monotonic()
    with pytest.raises(ERRORS[fault]) as caught:
        within(60, run, model, failing)
    assert time.monotonic() - start < SOON
    if run is data_parallel:
        assert f"in replica {who}" in str(caught.value)
        if fault == "raise":
            assert 'raise InjectedError("injected")' in str(caught.value)
    else:
        assert caught.traceback[-1].path.name in (
            "test_replicas_faults.py" if fault == "raise" else "functional.py",
            "batchnorm.py",
            "reference.py",
        )
    restart(reference, model)
    compare_a_step(reference, model, xs, run)
    del caught  # until here, the traceback kept the replicas that failed


@pytest.mark.parametrize("run", [data_parallel, run_wrapped])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fault", ["skip", "twice"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_replica_that_makes_other_calls_is_an_error_that_names_the_layer(run, who, fault, at):
    reference, model = local_and_synchronized(Net())
    xs = batch((4, 3, 2, 2)).split(2)
    failing = [(x, fault, at) if i == who else (x,) for i, x in enumerate(xs)]
    with pytest.raises(ReplicaError, match=r"norms\.\d: BatchNorm2d\(3\)"):
        within(60, run, model, failing)
    restart(reference, model)
    compare_a_step(reference, model, xs, run)


def test_the_timeout_names_the_layer_on_every_replica(short_timeout):
    _, model = local_and_synchronized(Net())
    replicas = replicate(model, 3)
    x = batch((2, 3, 2, 2))
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(replica, x, "raise", 4) for replica in replicas[:2]]
        late = pool.submit(replicas[2], x, "late", 1, 2.0)
        for call in (*calls, late):
            with pytest.raises(
                ReplicaError, match=r"norms\.1: .* longer than the timeout of 0.5 s"
            ):
                call.result(60)


def test_the_timeout_is_checked():
    with pytest.raises(ValueError, match="expected seconds > 0, got 0"):
        set_replica_timeout(0)


def test_a_replica_called_alone_does_not_wait_for_the_timeout():
    _, model = local_and_synchronized(Net())
    x = batch((2, 3, 2, 2))
    replicas = replicate(model, 2)
    with pytest.raises(ReplicaError, match=r"replica 0 in norms\.0"):
        within(60, replicas[0], x)
    alone = replicate(model, 2)[0]  # the other one is gone
    assert alone(x).shape == x.shape


def test_threads_of_any_kind_do_not_wait_for_one_that_ended():
    _, model = local_and_synchronized(Net())
    errors = {}

    def run():
        replicas = replicate(model, 3)

        def call(i, *fault):
            try:
                replicas[i](batch((2, 3, 2, 2)), *fault)
            except Exception as error:
                errors[i] = error

        arguments = [(0,), (1, "raise", 0), (2,)]
        threads = [threading.Thread(target=call, args=a, daemon=True) for a in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    within(SOON, run)
    assert {i: type(error) for i, error in errors.items()} == {
        0: ReplicaError,
        1: InjectedError,
        2: ReplicaError,
    }
    assert "replica 1 ended before" in str(errors[0])


def test_stale_replicas_do_not_disturb():
    reference, model = local_and_synchronized(Net(1))
    xs = batch((6, 3, 2, 2)).split(2)
    stale = [replicate(model, n) for n in (2, 3, 1)]  # never called
    compare_a_step(reference, model, xs)
    kept = []
    for _ in range(3):
        with pytest.raises(InjectedError) as caught:
            data_parallel(model, [(x, "raise", 0) for x in xs])
        kept.append(caught)  # and with it the frames of the failed step
        compare_a_step(reference, model, xs)
    assert len(parallel_apply(stale[0], xs[:2])) == 2


def test_replication_that_stops_midway_does_not_disturb():
    class Unfinished(nn.Module):
        broken = True

        def forward(self, x):
            return x

        def _replicate_for_data_parallel(self):
            if Unfinished.broken:
                raise InjectedError("cannot be copied")
            return super()._replicate_for_data_parallel()

    reference, model = local_and_synchronized(
        nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), Unfinished())
    )
    with pytest.raises(InjectedError) as caught:
        replicate(model, 3)
    Unfinished.broken = False
    compare_a_step(reference, model, batch((4, 3, 2, 2)).split(2))
    del caught


def test_eight_replicas_do_not_spin():
    _, model = local_and_synchronized(Net(10))
    xs = batch((16, 3, 2, 2)).split(2)
    late = [(x, "late", 5, 1.5) if i == 0 else (x,) for i, x in enumerate(xs)]
    within(60, data_parallel, model, xs)
    before = time.process_time()
    within(60, data_parallel, model, late)
    assert time.process_time() - before < 0.75  # seven wait for a second and a half


@pytest.mark.parametrize(("run", "rounds"), [(data_parallel, 200), (run_wrapped, 60)])
def test_random_rounds_with_failures(run, rounds):
    """After each round, failed or not, a good one whose result is exact."""
    choose = random.Random(0)
    reference, model = local_and_synchronized(Net())
    kept = []
    for round_ in range(rounds):
        count = choose.randint(1, 8)
        sizes = [choose.randint(1, 3) for _ in range(count)]
        xs = batch((sum(sizes), 3, 2, 2), seed=round_).split(sizes)
        faults = [None] * count
        for i in range(count):
            if choose.random() < 0.3:
                faults[i] = choose.choice(list(ERRORS))
        inputs = [
            (x,) if fault is None else (x, fault, choose.randrange(3), choose.random() / 100)
            for x, fault in zip(xs, faults, strict=True)
        ]
        possible = {ERRORS[fault] for fault in faults if fault is not None}
        if count == 1:
            possible.discard(ReplicaError)
        try:
            within(55, run, model, inputs)
            failed = None
        except (InjectedError, TypeError, ValueError, ReplicaError) as error:
            failed = type(error)
            kept = [*kept[-3:], error]
        # Replicas that all make the same wrong calls do synchronize.
        assert failed is None or failed in possible, f"round {round_}: {failed} for {faults}"
        if possible - {ReplicaError}:
            assert failed is not None, f"round {round_}: no error for {faults}"
        if count > 1 and possible & {InjectedError, TypeError, ValueError} == possible:
            assert failed is not ReplicaError
        restart(reference, model)
        within(55, compare_a_step, reference, model, xs, run)


@pytest.mark.parametrize("last", [0, 2])
def test_a_replica_interrupted_while_it_waits_keeps_nobody_waiting(last):
    replicas = replicate(syncbn.BatchNorm2d(3), 3)
    xs = batch((6, 3, 2, 2), torch.float32).split(2)
    outcomes, done = {}, threading.Event()

    def call(i):
        try:
            outcomes[i] = replicas[i](xs[i])
        except BaseException as error:
            outcomes[i] = error
        done.wait(SOON)  # a thread that has ended is another case

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(3)]
    for i in 2 - last, 1:
        threads[i].start()
    rendezvous_ = replicas[0].process_group.rendezvous
    until(lambda: len(rendezvous_._waiting) == 2)
    ident = ctypes.c_ulong(threads[1].ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))
    until(lambda: 1 in outcomes)
    threads[last].start()
    until(lambda: len(outcomes) == 3)
    done.set()
    assert isinstance(outcomes[1], KeyboardInterrupt)
    for i in 0, 2:
        assert outcomes[i].shape == xs[i].shape


def until(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, f"not within {SOON} s"
        time.sleep(0.001)
