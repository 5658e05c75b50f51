// Scratch memory of the CUDA reductions, allocated by PyTorch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncbn::cuda {

// What `Workspace` must hold at least, whatever the tensor: zero before its first use, then left to
// the ops. Only launches that cannot overlap may share one: one per device, stream and CUDA graph.
constexpr size_t workspace_bytes() { return size_t{1} << 20; }

// The CUDA graph capture that `stream` (a cudaStream_t) takes part in; 0 if it takes part in none.
uint64_t capture_id(int device, void* stream);

}  // namespace syncbn::cuda
