"""Where the replicas of one replication wait for each other, and learn that one will not come."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._utils import ExceptionWrapper

from .joined import Addend, join

if TYPE_CHECKING:
    from .replicas import Replica

_LOOK_AFTER = 0.05  # seconds between two looks for replicas that have ended
_timeout = 300.0


def set_replica_timeout(seconds: float) -> None:
    """Sets how long a replica waits in a layer for the others; 300 s at first.

    Replicas that raise are noticed at once, or as soon as their thread ends. The timeout is for
    those that neither come nor end.

    Args:
        seconds: greater than 0.

    Raises:
        ValueError: it is not.
    """
    if not seconds > 0:
        raise ValueError(f"set_replica_timeout: expected seconds > 0, got {seconds}")
    global _timeout
    _timeout = float(seconds)


class ReplicaError(RuntimeError):
    """The replicas did not make the same calls. The message names the layer."""


class _Meeting:
    """One call of one layer. Each replica that waits has a gate: a lock that is held, and released
    once there is something to see. A condition would wake them all to wait again, for its lock."""

    def __init__(self) -> None:
        self.addends: dict[int, Addend] = {}
        self.gates: list[threading.Lock] = []
        self.joined = False

    def open(self) -> None:
        for gate in self.gates:
            gate.release()
        self.gates.clear()


class Rendezvous:
    """The replicas of one replication.

    A replica waits in a layer until all have called it. It also looks, some times per second, for
    replicas that will not come:

    - all replicas wait, but not for the same call;
    - a replica's worker in ``torch.nn.parallel.parallel_apply`` has stored its result;
    - the thread in which a replica called its first layer has ended;
    - a replica has called no layer yet, and no thread is left that could: the thread that made the
      replicas waits for other threads to end, and no thread is younger than the replicas but those
      that wait here.

    Then every replica that waits, or comes later, raises: the exception of the replica that raised
    where it is known, so that whichever the caller looks at first is the original one.
    """

    def __init__(self) -> None:
        #: Whether the replicas were made inside a backward pass: their batch has been counted.
        self.recomputes = torch._C._current_graph_task_id() != -1
        self.layers: list[int] = []  # the ids of the original layers, while they are replicated
        self._lock = threading.RLock()
        self._maker = threading.current_thread()
        self._older = frozenset(threading.enumerate())
        self._replicas: list[weakref.ref[nn.Module]] = []
        self._participants: frozenset[int] | None = None
        self._threads: dict[int, threading.Thread] = {}
        self._waiting: dict[int, Replica] = {}
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self._failure: ExceptionWrapper | str | None = None
        #: The replica that was the first to ``fail``.
        self.failed: int | None = None

    def add(self, replica: nn.Module) -> None:
        """Counts in one more replica, by its first synchronized layer."""
        self._replicas.append(weakref.ref(replica))

    @property
    def started(self) -> bool:
        return self._participants is not None

    @property
    def size(self) -> int:
        """Number of participants: of the replicas that existed when the first one came."""
        if self._participants is None:
            with self._lock:
                if self._participants is None:
                    # Replicas in excess of the inputs have been dropped by now.
                    alive = [i for i, replica in enumerate(self._replicas) if replica() is not None]
                    self._participants = frozenset(alive)
        return len(self._participants)

    def meet(self, who: Replica, call: tuple[int, int], addend: Addend) -> None:
        """Returns once every replica has made this call, with the total in ``addend``.

        Raises:
            ReplicaError: a replica did not come.
            Exception: a replica raised; the type is that of its exception.
        """
        size = self.size
        with self._lock:
            if self._failure is not None:
                self._raise()
            self._threads[who.index] = threading.current_thread()
            meeting = self._meetings.setdefault(call, _Meeting())
            meeting.addends[who.index] = addend
            if len(meeting.addends) == size:
                try:
                    join([meeting.addends[index] for index in sorted(meeting.addends)])
                except BaseException as error:
                    self.fail(who.index, error)
                    raise
                meeting.joined = True
                del self._meetings[call]
                for index in meeting.addends:
                    self._waiting.pop(index, None)
                meeting.open()
                return
            gate = threading.Lock()
            gate.acquire()
            meeting.gates.append(gate)
            self._waiting[who.index] = who
            if len(self._waiting) == size:
                self._give_up(who, "all wait, but not for the same call")
        self._wait(who, meeting, gate)

    def fail(self, index: int, error: BaseException) -> None:
        """Wakes all replicas, because replica ``index`` raised ``error``."""
        with self._lock:
            if self._failure is None:
                self.failed = index
                self._fail(
                    ExceptionWrapper(
                        (type(error), error, error.__traceback__), where=f"in replica {index}"
                    )
                )

    def _fail(self, failure: ExceptionWrapper | str) -> None:
        self._failure = failure
        for meeting in self._meetings.values():
            meeting.open()

    def _wait(self, who: Replica, meeting: _Meeting, gate: threading.Lock) -> None:
        deadline = time.monotonic() + _timeout
        try:
            while not gate.acquire(timeout=max(0.0, min(_LOOK_AFTER, deadline - time.monotonic()))):
                with self._lock:
                    if meeting.joined or self._failure is not None:
                        break
                    if time.monotonic() < deadline:
                        self._look_for_the_ended(who)
                    else:
                        why = f"that lasted longer than the timeout of {_timeout:g} s"
                        self._give_up(who, why)
        except BaseException:  # from outside, as KeyboardInterrupt
            with self._lock:
                self._waiting.pop(who.index, None)
            raise
        if not meeting.joined:
            self._raise()

    def _look_for_the_ended(self, who: Replica) -> None:
        """Gives up if a replica that is not here cannot come any more."""
        missing = (self._participants or frozenset()) - self._waiting.keys()
        none_left = not self._another_thread_may_come()
        ended = {
            index
            for index in missing
            if (none_left if (t := self._threads.get(index)) is None else not t.is_alive())
        }
        # Looked up last: a worker stores its result before its thread ends.
        results = _results_of_parallel_apply()
        for index in sorted(missing & results.keys()):
            ended.add(index)
            if isinstance(results[index], ExceptionWrapper) and self._failure is None:
                self._fail(results[index])
        if ended and self._failure is None:
            indices = ", ".join(map(str, sorted(ended)))
            self._give_up(who, f"replica {indices} ended before, by an exception or without a call")

    def _another_thread_may_come(self) -> bool:
        here = {self._threads[index] for index in self._waiting}
        maker = self._maker
        if maker not in here and maker.is_alive() and not _is_joining(maker):
            return True
        return any(
            t not in here and t not in self._older
            for t in threading.enumerate()
            if not isinstance(t, threading._DummyThread)
        )

    def _give_up(self, who: Replica, why: str) -> None:
        if self._failure is None:
            waiting = sorted(self._waiting.values(), key=lambda r: r.index)
            names = _names_of_layers(who)
            places = ", ".join(f"replica {r.index} in {names.get(r.layer, '?')}" for r in waiting)
            self._fail(
                f"of {self.size} replicas, these wait in a synchronized layer for the others: "
                f"{places}; {why}. Every replica must call the same synchronized layers, equally "
                "often and in the same order (the timeout: syncbn.sync.set_replica_timeout)"
            )

    def _raise(self) -> NoReturn:
        if isinstance(self._failure, ExceptionWrapper):
            self._failure.reraise()
        raise ReplicaError(self._failure)


def _results_of_parallel_apply() -> dict[int, Any]:
    """What the workers of the ``torch.nn.parallel.parallel_apply`` around this call have stored."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_worker":
            results = frame.f_locals.get("results")
            if isinstance(results, dict):
                return results
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def _is_joining(thread: threading.Thread) -> bool:
    """Whether ``thread`` waits for the end of another one."""
    frame = sys._current_frames().get(thread.ident or 0)
    for _ in range(3):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name == "join" and code.co_filename == threading.__file__:
            return True
        frame = frame.f_back
    return False


def _names_of_layers(who: Replica) -> dict[int, str]:
    """Names of the synchronized layers, as in ``named_modules``, by their numbers.

    Layers do not know their names; the outermost module that runs on this thread and contains the
    layer does.
    """
    names: dict[int, str] = {}
    frame = sys._getframe(1)
    seen = None
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module is not seen:
            seen = module
            found = {}
            for name, m in module.named_modules():
                place: Any = getattr(m, "process_group", None)
                if getattr(place, "rendezvous", None) is who.rendezvous:
                    what = f"{type(m).__name__}({m.num_features})"
                    found[place.layer] = f"{name or 'the model itself'}: {what}"
            names = found if who.layer in found else names
        frame = frame.f_back  # type: ignore[assignment]
    return names
