"""Replicas on the CPU, made and run as ``nn.DataParallel`` makes and runs them on GPUs.

``replicate`` is PyTorch's own function; only the copies, which it makes between CUDA devices, are
made here. ``parallel_apply`` is a transcript of PyTorch's, which needs an accelerator to begin.
And the comparison of their step with that of one ``nn.BatchNorm`` on the whole batch.
"""

import copy
import importlib
import threading
from unittest import mock

import torch
from torch._utils import ExceptionWrapper

import syncbn
from helpers import assert_near, assert_same_bits, batch

_patching = threading.Lock()
_replicate = importlib.import_module("torch.nn.parallel.replicate")


def replicate(module, count):
    """``count`` replicas of a module on the CPU; the first one shares the module's buffers."""
    with _patching, mock.patch.object(_replicate, "_broadcast_coalesced_reshape", _broadcast):
        return _replicate.replicate(module, list(range(count)), not torch.is_grad_enabled())


def _broadcast(tensors, devices, detach=False):
    copies = [[t if i == 0 else t.clone() for t in tensors] for i in devices]
    return [[t.detach() for t in row] for row in copies] if detach else copies


def parallel_apply(modules, inputs):
    """Outputs, or the first exception in the order of the replicas."""
    grad_enabled = torch.is_grad_enabled()
    lock = threading.Lock()
    results = {}

    def _worker(i, module, input):
        torch.set_grad_enabled(grad_enabled)
        try:
            if not isinstance(input, (list, tuple)):
                input = (input,)
            output = module(*input)
            with lock:
                results[i] = output
        except Exception:
            with lock:
                results[i] = ExceptionWrapper(where=f"in replica {i} on device {i}")

    threads = [
        threading.Thread(target=_worker, args=(i, module, input), daemon=True)
        for i, (module, input) in enumerate(zip(modules, inputs, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a replica hangs"
    outputs = []
    for i in range(len(inputs)):
        output = results[i]
        if isinstance(output, ExceptionWrapper):
            output.reraise()
        outputs.append(output)
    return outputs


def data_parallel(module, inputs):
    """What ``nn.DataParallel(module)`` does with inputs that have been scattered."""
    return parallel_apply(replicate(module, len(inputs)), inputs)


def local_and_synchronized(model):
    """``model`` with PyTorch's layers, and a copy with ours; in float64."""
    model = model.double()
    return model, syncbn.convert_model(copy.deepcopy(model))


def assert_same_training(expected, actual):
    for (name, a), b in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert_near(b.grad, a.grad, 1.0 + a.grad.abs().max(), message=f"gradient of {name}")
    for (name, a), b in zip(expected.named_buffers(), actual.buffers(), strict=True):
        if a.dtype == torch.int64:
            assert_same_bits(b, a, name)
        else:
            assert_near(b, a, 1.0 + a.abs().max(), message=name)


def compare_a_step(reference, model, xs, run=data_parallel):
    """Outputs, gradients of inputs and parameters, and buffers of a step, against one batch."""
    xs = [x.detach().requires_grad_() for x in xs]
    whole = torch.cat([x.detach() for x in xs]).requires_grad_()
    expected = reference(whole)
    dy = batch(expected.shape, device=expected.device, seed=99)
    for m in (reference, model):
        m.zero_grad()
    expected.backward(dy)
    ys = run(model, xs)
    torch.autograd.backward(ys, list(dy.split([len(x) for x in xs])))
    assert_near(torch.cat([y.detach() for y in ys]), expected, message="y")
    assert_near(torch.cat([x.grad for x in xs]), whole.grad, 10.0, message="dx")
    assert_same_training(reference, model)
