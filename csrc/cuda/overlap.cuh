// A kernel's start overlapped with the end of the one before it in the stream (programmatic
// dependent launch, from compute capability 9.0): about a microsecond less each.
#pragma once

#include <cuda_runtime.h>

namespace syncbn::cuda {

// The first thing that every kernel does. Until then it may run beside the kernel before it, whose
// results it must not touch. So no kernel calls its inputs __restrict__: the compiler may read such
// memory earlier.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// From when all blocks have called this, or ended, the next kernel's blocks may start where there
// is room.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace syncbn::cuda
