"""Data parallelism in the threads of one process: lists in, lists out, on any devices."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .modules import Synchronized
from .sync import Replica
from .sync.joined import add_up
from .sync.local import LOCAL
from .sync.rendezvous import Rendezvous

__all__ = ["ModelDataParallel", "scatter"]

Device = torch.device | str | int


class ModelDataParallel(nn.Module):
    """Runs a model on several devices at once, each with its part of the batch.

    In each forward the module is replicated, one replica per input, and each replica runs in a
    thread of its own; the synchronized layers (``syncbn.convert_model``) see the whole batch. In
    the backward pass the gradients of all replicas add up in the parameters of ``module``. Buffers
    that a forward changes, such as running statistics, are those of the first replica.

        net = syncbn.ModelDataParallel(syncbn.convert_model(model), ["cuda:0", "cuda:1"])
        outputs = net(syncbn.scatter(x, net.devices))

    Args:
        module: moved to the first device.
        devices: where the replicas run. They may repeat, and may be "cpu".
        sync: False runs the replicas one after another, each with local statistics.

    Raises:
        ValueError: no devices.

    Source: the interface is that of a class of the same name for MXNet's Gluon.
    """

    def __init__(self, module: nn.Module, devices: Sequence[Device], sync: bool = True) -> None:
        super().__init__()
        self.devices = [_device(d) for d in devices]
        if not self.devices:
            raise ValueError("ModelDataParallel: expected at least one device, got none")
        self.module = module.to(self.devices[0])
        self.sync = sync

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, inputs: Any) -> Any:
        """Runs one replica per input.

        Args:
            inputs: a list with one entry for each of the first devices: a tensor, a tuple of
                arguments or a dict of keyword arguments, on that device. A list of one entry, or a
                tensor instead of a list, runs ``module`` itself on the first device.

        Returns:
            The list of outputs, in the order of the devices; for a tensor, the output.

        Raises:
            ValueError: no inputs, or more than devices.
            RuntimeError: ``module`` has been moved away from the first device.
            Exception: the one that a replica raised, with its traceback.
        """
        if isinstance(inputs, Tensor):
            return self.module(inputs)
        if not isinstance(inputs, (list, tuple)) or not 0 < len(inputs) <= len(self.devices):
            got = len(inputs) if isinstance(inputs, (list, tuple)) else type(inputs).__name__
            raise ValueError(
                "ModelDataParallel: expected a tensor or a list of 1 to "
                f"{len(self.devices)} inputs, one per device, got {got}"
            )
        calls = [_arguments(entry) for entry in inputs]
        if len(calls) == 1:
            args, kwargs = calls[0]
            return [self.module(*args, **kwargs)]
        replicas = _replicate(self.module, self.devices[: len(calls)])
        if self.sync:
            return _run_together(replicas, calls, self.devices)
        outputs = []
        for replica, (args, kwargs), device in zip(replicas, calls, self.devices, strict=False):
            for m in replica.modules():
                if isinstance(m, Synchronized):
                    m.process_group = LOCAL
            with _on(device):
                outputs.append(replica(*args, **kwargs))
        return outputs

    def extra_repr(self) -> str:
        devices = ", ".join(map(str, self.devices))
        return f"devices=[{devices}]" + ("" if self.sync else ", sync=False")


def scatter(batch: Any, devices: Sequence[Device]) -> list[Any]:
    """Splits a batch along its first dimension into one part per device, for ModelDataParallel.

    Args:
        batch: a tensor [N, ...], or a tuple, list or dict, nested at will, of tensors with the same
            N. Anything else in it goes to every part.
        devices: where the parts go. The first ones get one row more where N is not a multiple.

    Returns:
        As many parts, of the structure of ``batch``, as there are devices, or rows where these are
        fewer. Differentiable.

    Raises:
        ValueError: no devices, no tensor in ``batch``, or tensors of different N.
    """
    places = [_device(d) for d in devices]
    rows = set(_rows(batch))
    if not places or len(rows) != 1:
        raise ValueError(
            "scatter: expected at least one device and tensors with the same number of rows, got "
            f"{len(places)} devices and {sorted(rows)} rows"
        )
    places = places[: max(1, rows.pop())]
    return [_part(batch, i, places) for i in range(len(places))]


def _rows(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return [batch.shape[0]] if batch.dim() else []
    if isinstance(batch, dict):
        batch = list(batch.values())
    return [n for v in batch for n in _rows(v)] if isinstance(batch, (list, tuple)) else []


def _part(batch: Any, i: int, devices: list[torch.device]) -> Any:
    if isinstance(batch, Tensor):
        rows = batch.tensor_split(len(devices))[i] if batch.dim() else batch
        return rows.to(devices[i], non_blocking=devices[i].type != "cpu")
    if isinstance(batch, dict):
        return type(batch)((k, _part(v, i, devices)) for k, v in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_part(v, i, devices) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_part(v, i, devices) for v in batch)
    return batch


def _device(device: Device) -> torch.device:
    """With an index where there can be one, as the devices of tensors have."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _arguments(entry: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(entry, dict):
        return (), entry
    return (entry if isinstance(entry, tuple) else (entry,)), {}


def _replicate(module: nn.Module, devices: list[torch.device]) -> list[nn.Module]:
    """One replica per device, by the protocol of ``torch.nn.parallel.replicate``.

    That one serves different CUDA devices only. Buffers are copied, but for the first replica's.
    """
    for v in (*module.parameters(), *module.buffers()):
        if v.device != devices[0]:
            raise RuntimeError(
                f"ModelDataParallel: expected parameters and buffers on {devices[0]}, the first "
                f"device, got one on {v.device}"
            )
    modules = list(module.modules())
    replicas = {m: [m._replicate_for_data_parallel() for _ in devices] for m in modules}
    parameters, buffers = list(module.parameters()), list(module.buffers())
    copies_of_parameters = _Broadcast.apply(devices, *parameters)
    for j, device in enumerate(devices):
        copies: dict[Tensor, Tensor] = dict(
            zip(parameters, copies_of_parameters[j :: len(devices)], strict=True)
        )
        for b in buffers:
            copies[b] = b if j == 0 else b.detach().to(device, non_blocking=True, copy=True)
        for m in modules:
            replica = replicas[m][j]
            for name, child in m._modules.items():
                if child is None:
                    replica._modules[name] = None
                else:
                    setattr(replica, name, replicas[child][j])
            for name, value in (*m._parameters.items(), *m._buffers.items()):
                if value is not None:
                    setattr(replica, name, copies[value])
                elif name in m._parameters:
                    replica._parameters[name] = None
    return replicas[module]


class _Broadcast(torch.autograd.Function):
    """Parameters to one alias or copy per device: [first on every device, second, ...].

    The gradients are added up in the order of the devices, whenever they come, so that results can
    be reproduced.
    """

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.devices = [p.device for p in parameters]
        ctx.count = len(devices)
        copies = [
            p.view_as(p) if p.device == device else p.to(device, non_blocking=True)
            for p in parameters
            for device in devices
        ]
        constant = [not need for need in ctx.needs_input_grad[1:] for _ in devices]
        ctx.mark_non_differentiable(*itertools.compress(copies, constant))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        n = ctx.count
        return None, *(
            add_up([g for g in gradients[n * i : n * (i + 1)] if g is not None], device)
            for i, device in enumerate(ctx.devices)
        )


def _run_together(
    replicas: list[nn.Module],
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]],
    devices: list[torch.device],
) -> list[Any]:
    """Each replica's output, computed in a thread of its own under the modes of this thread."""
    rendezvous = _rendezvous_of(replicas[0])
    outputs: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    modes = [_modes_on(device) for device in devices]

    def work(index: int) -> None:
        try:
            args, kwargs = calls[index]
            with contextlib.ExitStack() as stack:
                for mode in modes[index]:
                    stack.enter_context(mode())
                outputs[index] = replicas[index](*args, **kwargs)
        except BaseException as error:
            errors[index] = error
            rendezvous.fail(index, error)

    threads = [
        threading.Thread(target=work, args=(i,), name=f"replica {i}", daemon=True)
        for i in range(len(replicas))
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException as error:  # KeyboardInterrupt, or no more threads
        rendezvous.fail(len(started), error)
        raise
    if errors:
        # The others' errors tell of this one.
        first = errors.get(rendezvous.failed) if rendezvous.failed is not None else None
        try:
            raise first or errors[min(errors)]
        finally:
            del first
            errors.clear()  # they hold this frame, by their tracebacks
    return [outputs[i] for i in range(len(replicas))]


def _rendezvous_of(replica: nn.Module) -> Rendezvous:
    for m in replica.modules():
        if isinstance(m, Synchronized) and isinstance(m.process_group, Replica):
            return m.process_group.rendezvous
    return Rendezvous()  # no synchronized layer: nobody waits


def _modes_on(device: torch.device) -> list[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """What to enter in another thread, so that it works on ``device`` as this thread would."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    modes: list[Callable[[], Any]] = [lambda: torch.inference_mode(inference)]
    modes.append(lambda: torch.set_grad_enabled(grad))
    cache = torch.is_autocast_cache_enabled()
    for kind in {"cpu", "cuda", device.type}:
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if enabled:
            modes.append(
                lambda k=kind, d=dtype: torch.autocast(k, d, enabled=True, cache_enabled=cache)  # type: ignore[misc]
            )
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        modes.append(lambda: torch.cuda.stream(stream))
    return modes


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
