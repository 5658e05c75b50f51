"""Modules over process groups: conversion, copies, lazy layers, DistributedDataParallel."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import syncbn
from distributed import run_ranks
from helpers import assert_near
from whole_batch import parts, run_whole

EQUAL = [(2, 5, 3, 4), (2, 5, 3, 4)]
UNEVEN = [(3, 5, 3, 4), (1, 5, 3, 4)]


def _built_before_the_group(path, xs):
    rank, world_size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    dist.destroy_process_group()
    layer = syncbn.BatchNorm2d(5).to(xs[rank])
    alone = layer(xs[rank])
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world_size)
    return alone, layer(xs[rank])


def test_a_layer_built_before_the_process_group(tmp_path):
    xs, dys = parts(UNEVEN)
    results = run_ranks(2, _built_before_the_group, str(tmp_path / "meet"), xs)
    together = run_whole(xs, dys)
    for rank, (alone, synced) in enumerate(results):
        assert_near(alone, run_whole(xs[rank : rank + 1], dys[rank : rank + 1])[0]["y"])
        assert_near(synced, together[rank]["y"])


def _sync_batch_norm_with_a_group(xs):
    alone = syncbn.create_process_group(1)
    x = xs[dist.get_rank()]
    layer = torch.nn.SyncBatchNorm(5, process_group=alone).to(x)
    other = torch.nn.SyncBatchNorm(5, process_group=alone).to(x)
    syncbn.convert_model(layer)
    syncbn.convert_model(other, dist.group.WORLD)
    kept = layer.process_group is alone, other.process_group is dist.group.WORLD
    back = syncbn.revert_model(layer)
    kept += type(back) is torch.nn.SyncBatchNorm, back.process_group is alone
    return all(kept), syncbn.convert_model(back)(x), other(x)


def test_convert_keeps_the_group_of_torchs_sync_batch_norm():
    xs, dys = parts(EQUAL)
    together = run_whole(xs, dys)
    for rank, (kept, y, other) in enumerate(run_ranks(2, _sync_batch_norm_with_a_group, xs)):
        assert kept
        assert_near(y, run_whole(xs[rank : rank + 1], dys[rank : rank + 1])[0]["y"])
        assert_near(other, together[rank]["y"])


class Derived(torch.nn.SyncBatchNorm):
    pass


def _sync_off_in_a_subclass(xs):
    x = xs[dist.get_rank()]
    layer = syncbn.convert_model(Derived(5).to(x))
    layer.sync = False
    return layer(x), layer.running_var


def test_sync_off_in_a_subclass_of_torchs_synchronized_layer():
    """Whose forward, PyTorch's own, exchanges."""
    xs, dys = parts(EQUAL)
    for rank, (y, running_var) in enumerate(run_ranks(2, _sync_off_in_a_subclass, xs)):
        (alone,) = run_whole(xs[rank : rank + 1], dys[rank : rank + 1])
        assert_near(y, alone["y"])
        assert_near(running_var, alone["running_var"])


def _lazy_from_the_first_forward(xs):
    x = xs[dist.get_rank()]
    layer = syncbn.convert_model(torch.nn.Sequential(torch.nn.LazyBatchNorm2d()).to(x))
    layer(x)
    return type(layer[0]) is syncbn.BatchNorm2d, layer[0].running_mean


def test_a_lazy_layer_synchronizes_from_the_first_forward():
    xs, dys = parts(EQUAL, torch.float32)
    for became, running_mean in run_ranks(2, _lazy_from_the_first_forward, xs):
        assert became
        assert_near(running_mean, run_whole(xs, dys)[0]["running_mean"])


def _copy_keeps_the_group():
    group = dist.new_group([0, 1])
    model = syncbn.convert_model(torch.nn.Sequential(torch.nn.BatchNorm2d(5)), group)
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    same = copied[0].process_group is group and copied[0].weight is not model[0].weight
    return same, loaded[0].process_group is None, repr(model[0])


def test_a_deep_copy_keeps_the_group_and_a_pickle_drops_it():
    for same, dropped, text in run_ranks(2, _copy_keeps_the_group):
        assert same
        assert dropped
        assert "process_group=" in text


def _ddp_then_convert(x):
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(5)).to(x[0])
    wrapped = syncbn.convert_model(DistributedDataParallel(model))
    y = wrapped(x[dist.get_rank()])
    y.square().sum().backward()
    return type(model[0]) is syncbn.BatchNorm2d, y, model[0].weight.grad


def test_a_model_already_wrapped_in_ddp():
    xs, dys = parts(EQUAL)
    expected = run_whole(xs, [2 * part["y"] for part in run_whole(xs, dys)], torch.ones(5))
    averaged = sum(part["dweight"] for part in expected) / 2
    for (converted, y, dweight), whole in zip(
        run_ranks(2, _ddp_then_convert, xs), expected, strict=True
    ):
        assert converted
        assert_near(y, whole["y"])
        assert_near(dweight, averaged, 100.0)
