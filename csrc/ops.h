// The four ops: what each computes, its arguments, and its two implementations.
//
// Notation, per channel: n values x with mean and invstd = 1 / sqrt(var + eps), xhat = (x - mean) *
// invstd, y = weight * xhat + bias. "acc" is the accumulation type: float for float32, float16 and
// bfloat16 tensors, double for float64. Sums that cross ranks cover the whole mini-batch once
// reduced.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace syncbn {

enum class DType : uint8_t { float32, float16, bfloat16, float64 };

// A C-vector (weight, bias, running statistics, their gradients) in any of the four dtypes.
// Absent where data is null.
struct Vector {
  void* data;  // [C]
  DType dtype;
};

// Device memory for partial results, from PyTorch's allocator. CUDA only; null on the CPU.
struct Workspace {
  void* data;
  size_t bytes;
};

// Where an op runs: `threads` on the CPU; `device` and `stream` (a cudaStream_t) on CUDA.
struct Execution {
  int threads;
  int device;
  void* stream;
};

// sums = [sum of x | sum of x^2 | n], from a pass that keeps (n, mean, M2), so that the variance
// survives a mean that is large beside it.
struct Statistics {
  DType dtype;
  Layout layout;
  const void* x;  // [outer, C, inner]
  double* sums;   // [2C + 1]
  Workspace workspace;
};

// y, moments = [mean | invstd | n], and the running statistics, from the reduced sums:
//   mean = sum / n,  var = sumsq / n - mean^2 (0 where it is below the sums' own rounding),
//   invstd = 1 / sqrt(var + eps), or 0 where var + eps is 0,
//   running_mean += f * (mean - running_mean),
//   running_var += f * (var * n / (n - 1) - running_var) where n > 1,
//   num_batches_tracked += 1,
// with f = momentum, or 1 / num_batches_tracked where `cumulative`. n = 0 changes none of the
// three.
struct Normalize {
  DType dtype;
  Layout layout;
  const void* x;                 // [outer, C, inner]
  Vector weight;                 // [C], 1 where absent
  Vector bias;                   // [C], 0 where absent
  const double* sums;            // [2C + 1]
  Vector running_mean;           // [C], both absent or both present
  Vector running_var;            // [C]
  int64_t* num_batches_tracked;  // [] or null
  void* y;                       // [outer, C, inner]
  double* moments;               // [2C + 1]
  double momentum;
  bool cumulative;
  double eps;
};

// sums_dy = [sum of dy | sum of dy * xhat]; dbias and dweight are the same numbers, kept apart
// because the collective overwrites sums_dy.
struct BackwardReduce {
  DType dtype;
  Layout layout;
  const void* dy;         // [outer, C, inner]
  const void* x;          // [outer, C, inner]
  const double* moments;  // [2C + 1]
  void* sums_dy;          // [2C], acc
  Vector dweight;         // [C] or absent
  Vector dbias;           // [C] or absent
  Workspace workspace;
};

// dx = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n), from the reduced sums_dy.
struct BackwardInput {
  DType dtype;
  Layout layout;
  const void* dy;         // [outer, C, inner]
  const void* x;          // [outer, C, inner]
  Vector weight;          // [C], 1 where absent
  const double* moments;  // [2C + 1]
  const void* sums_dy;    // [2C], acc
  void* dx;               // [outer, C, inner]
};

namespace cpu {
void statistics(const Statistics&, const Execution&);
void normalize(const Normalize&, const Execution&);
void backward_reduce(const BackwardReduce&, const Execution&);
void backward_input(const BackwardInput&, const Execution&);
}  // namespace cpu

namespace cuda {
void statistics(const Statistics&, const Execution&);
void normalize(const Normalize&, const Execution&);
void backward_reduce(const BackwardReduce&, const Execution&);
void backward_input(const BackwardInput&, const Execution&);
}  // namespace cuda

}  // namespace syncbn
