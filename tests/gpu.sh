#!/usr/bin/env bash
# Build, test suite and sanitizers on a machine with a GPU; a summary at the end. The tests of several
# ranks run a second time with CUDA tensors: over NCCL where there are two GPUs, else over gloo with
# all ranks on one GPU.
#
# Uses the Python that is there (PYTHON, default python3) and needs of it PyTorch, pybind11, setuptools, ninja
# and pytest (with `build`, packaging is tested too); nvcc and compute-sanitizer come from the CUDA toolkit. Builds for the GPUs at hand
# unless TORCH_CUDA_ARCH_LIST says otherwise.
set -u -o pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
LOGS=${LOGS:-build/gpu-test}
mkdir -p "$LOGS"
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
if [ -z "${TORCH_CUDA_ARCH_LIST:-}" ]; then
  TORCH_CUDA_ARCH_LIST=$("$PYTHON" -c 'import torch
print(";".join(sorted({"%d.%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})))')
  export TORCH_CUDA_ARCH_LIST
fi

summary=()
failed=0
# step NAME COMMAND...: runs it, with its output in a log and the log's end shown where it fails.
step() {
  local name=$1 log="$LOGS/$1.log" start=$SECONDS
  shift
  if "$@" > "$log" 2>&1; then
    summary+=("ok      $name ($((SECONDS - start)) s): $(grep -E 'passed|ERROR SUMMARY|hazards|Successfully installed' "$log" | tail -1)")
  else
    summary+=("FAILED  $name ($((SECONDS - start)) s), log in $log")
    failed=1
    tail -40 "$log"
  fi
}

step build env SYNCBN_CUDA=1 "$PYTHON" -m pip install --no-build-isolation --no-deps --force-reinstall .
step tests env SYNCBN_REQUIRE_CUDA=1 "$PYTHON" -m pytest -q -p no:cacheprovider tests
ranks=(env SYNCBN_REQUIRE_CUDA=1)
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
  ranks+=(SYNCBN_TEST_BACKEND=nccl)
else
  ranks+=(SYNCBN_TEST_SHARED_GPU=1)
fi
# shellcheck disable=SC2046  # one word per file
step ranks "${ranks[@]}" "$PYTHON" -m pytest -q -p no:cacheprovider $(grep -l run_ranks tests/test_*.py)
for tool in memcheck racecheck initcheck synccheck; do
  step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$PYTHON" tests/cuda_kernels.py
done

printf '%s\n' "" "${summary[@]}"
exit "$failed"
