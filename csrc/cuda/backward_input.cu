// dx = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n), from the reduced sums, in one
// pass.
//
// Per channel, with the mean split into `rounded` and a rest as in normalize:
//
//   dx = a * dy + (b * (x - rounded) + c),  a = weight * invstd
//                                           b = -a * invstd * sum_dy_xhat / n
//                                           c = -a * sum_dy / n - b * (mean - rounded)
//
// Blocks and threads walk from the end of the tensors to their beginning: the end is what
// backward_reduce read last, and still in the L2 cache.
#include "launch.cuh"

namespace syncbn::cuda {
namespace {

template <typename A>
__global__ __launch_bounds__(A::kThreads, A::kBlocksPerSM) void backward_input_kernel(
    const typename A::T* dy,         // [outer, C, inner]
    const typename A::T* x,          // [outer, C, inner]
    const Vector weight,             // [C] or absent
    const double* moments,           // [2C + 1]
    const typename A::acc* sums_dy,  // [2C]
    typename A::T* dx,               // [outer, C, inner]
    const __grid_constant__ Plan plan) {
  using acc = typename A::acc;
  constexpr int kSteps = A::kStepsOfTwo;
  const Walk<A> walk(plan, gridDim.x - 1 - blockIdx.x);

  typename A::pack_t pack_dy[kSteps];
  typename A::pack_t pack_x[kSteps];
  const auto load = [&](uint32_t step) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const Span span = walk.at_from_end(step + u * walk.stride);
      walk.load(dy, span, pack_dy[u], once());
      walk.load(x, span, pack_x[u], once());
    }
  };
  wait_for_previous();
  load(walk.first);  // under way while the coefficients are computed

  struct Coefficients {
    acc rounded, a, b, c;
  };
  __shared__ Coefficients shared[A::kChannels];
  if (threadIdx.x < walk.entries()) {
    const uint32_t channel = walk.channel(threadIdx.x);
    if (channel < plan.channels) {
      const size_t channels = plan.channels;
      const double mean = moments[channel];
      const double invstd = moments[channels + channel];
      const double per_value = 1 / moments[2 * channels];
      const acc rounded = static_cast<acc>(mean);
      const double a = get_or(weight, channel, 1) * invstd;
      const double b = -a * invstd * per_value * sums_dy[channels + channel];
      const double c = -a * per_value * sums_dy[channel] - b * (mean - rounded);
      shared[threadIdx.x] = {rounded, static_cast<acc>(a), static_cast<acc>(b),
                             static_cast<acc>(c)};
    }
  }
  __syncthreads();
  Coefficients k[A::kSlots];
#pragma unroll
  for (int s = 0; s < A::kSlots; ++s) k[s] = shared[walk.entry(s)];

  const auto apply = [&](uint32_t step, auto exist) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const Span span = walk.at_from_end(step + u * walk.stride);
      walk.complete(dy, span, pack_dy[u]);
      walk.complete(x, span, pack_x[u]);
      acc wide[A::kPack];
#pragma unroll
      for (int j = 0; j < A::kPack; ++j) {
        const Coefficients& kj = k[A::slot(j)];
        const acc d = widen(pack_x[u].value[j]) - kj.rounded;
        wide[j] = kj.a * widen(pack_dy[u].value[j]) + (kj.b * d + kj.c);
      }
      narrow(wide, pack_x[u]);
      walk.template store<exist.value>(dx, span, pack_x[u]);
    }
  };
  walk.template rounds<kSteps>(load, apply);
  let_next_start();
}

}  // namespace

void backward_input(const BackwardInput& op, const Execution& where) {
  const char* name = "backward_input";
  if (op.layout.size() == 0) return;
  const DeviceGuard guard(name, where.device);
  with_access(op.dtype, op.layout, {op.dy, op.x, op.dx}, [&](auto access, uint32_t misalignment) {
    using A = decltype(access);
    using T = typename A::T;
    const Plan plan = elementwise_plan<A>(name, op.layout, misalignment, where.device);
    launch(name, backward_input_kernel<A>, plan.blocks(), A::kThreads, where,
           static_cast<const T*>(op.dy), static_cast<const T*>(op.x), op.weight, op.moments,
           static_cast<const typename A::acc*>(op.sums_dy), static_cast<T*>(op.dx), plan);
  });
}

}  // namespace syncbn::cuda
