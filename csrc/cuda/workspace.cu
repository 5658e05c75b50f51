// Which CUDA graph a launch will belong to.
#include "launch.cuh"
#include "workspace.h"

namespace syncbn::cuda {

uint64_t capture_id(int device, void* stream) {
  const DeviceGuard guard("capture_id", device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check("capture_id", cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

}  // namespace syncbn::cuda
