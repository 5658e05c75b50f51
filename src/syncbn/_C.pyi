"""Types of the extension; csrc/ops.h says what each op computes."""

from typing import TypedDict

from torch import Tensor

class BuildInfo(TypedDict):
    version: str
    compiler: str
    cuda: str | None
    cuda_archs: str

def statistics(x: Tensor, sums: Tensor, workspace: Tensor | None = None) -> None: ...
def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    y: Tensor,
    moments: Tensor,
    momentum: float | None,
    eps: float,
) -> None: ...
def backward_reduce(
    dy: Tensor,
    x: Tensor,
    moments: Tensor,
    sums_dy: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    workspace: Tensor | None = None,
) -> None: ...
def backward_input(
    dy: Tensor, x: Tensor, weight: Tensor | None, moments: Tensor, sums_dy: Tensor, dx: Tensor
) -> None: ...
def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    y: Tensor,
    moments: Tensor,
    momentum: float | None,
    eps: float,
    workspace: Tensor | None = None,
) -> None: ...
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    moments: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dx: Tensor | None,
    workspace: Tensor | None = None,
) -> bool: ...

WORKSPACE_BYTES: int

def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> bool: ...
def same_layout(a: Tensor, b: Tensor) -> bool: ...
def launch_context(x: Tensor) -> tuple[int, int, int]: ...
def build_info() -> BuildInfo:
    """How this extension was built.

    Returns:
        ``version`` of syncbn, ``compiler``, ``cuda``: the toolkit's version or None for a CPU-only
            build, ``cuda_archs``: the GPU architectures, empty for a CPU-only build.
    """
