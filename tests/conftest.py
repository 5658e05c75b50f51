"""Devices, seeds, and the end of the pool of ranks."""

import os

import pytest
import torch

import distributed
from syncbn import _C

REQUIRE_CUDA = os.environ.get("SYNCBN_REQUIRE_CUDA") == "1"


def missing_for_cuda():
    """What a CUDA test lacks here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if _C.build_info()["cuda"] is None:
        return "this build of syncbn has no CUDA kernels"
    return None


def pytest_runtest_setup(item):
    missing = missing_for_cuda() if item.get_closest_marker("cuda") else None
    if missing and REQUIRE_CUDA:
        pytest.fail(f"SYNCBN_REQUIRE_CUDA=1, but {missing}", pytrace=False)
    if missing:
        pytest.skip(missing)


DEVICES = ["cpu"] * (not distributed.ON_GPU) + [pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _same_start():
    """Every test starts with the same random numbers.

    And with one thread: the tensors are small, and on a busy machine threads wait for each other.
    That results do not depend on the number of threads is a test of its own.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session():
    yield
    distributed.close_pool()
