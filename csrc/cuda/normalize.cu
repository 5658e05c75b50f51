// y = weight * (x - mean) * invstd + bias, the saved moments and the running statistics, from the
// reduced sums, in one launch.
//
// The first blocks write all that is per channel, the others y, walking from the end of x to its
// beginning: the end is what statistics read last, and still in the L2 cache.
//
// In float, x - mean would lose what the rounding of the mean is worth. So the mean is split into
// `rounded` and a rest, and with scale = weight * invstd:
//
//   y = (x - rounded) * scale + shift,  shift = bias - (mean - rounded) * scale
#include "../moments.h"
#include "launch.cuh"

namespace syncbn::cuda {
namespace {

// Where the counter is read by all, one block must do all channels.
uint32_t channel_blocks(const Normalize& op, uint32_t threads) {
  if (op.cumulative) return 1;
  return static_cast<uint32_t>(std::max<int64_t>(1, (op.layout.channels + threads - 1) / threads));
}

__device__ void update_channels(const Normalize& op, uint32_t blocks) {
  const auto channels = static_cast<uint32_t>(op.layout.channels);
  const double n = op.sums[2 * static_cast<size_t>(channels)];
  const int64_t batches = op.num_batches_tracked == nullptr ? 1 : *op.num_batches_tracked + 1;
  const double factor = op.cumulative ? 1 / static_cast<double>(batches) : op.momentum;
  const uint32_t stride = blocks * blockDim.x;
  for (uint32_t c = blockIdx.x * blockDim.x + threadIdx.x; c < channels; c += stride) {
    const Moments m = moments_of(op.sums[c], op.sums[channels + c], n);
    op.moments[c] = m.mean;
    op.moments[channels + c] = invstd_of(m.var, op.eps);
    if (op.running_mean.data == nullptr || n == 0) continue;
    put(op.running_mean, c, moved(get(op.running_mean, c), m.mean, factor));
    if (n == 1) continue;
    const double unbiased = m.var * (n / (n - 1));
    put(op.running_var, c, moved(get(op.running_var, c), unbiased, factor));
  }
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) op.moments[2 * static_cast<size_t>(channels)] = n;
  __syncthreads();  // all threads have read the counter
  if (threadIdx.x == 0 && op.num_batches_tracked != nullptr && n != 0) {
    *op.num_batches_tracked = batches;
  }
}

template <typename A>
__global__ __launch_bounds__(A::kThreads, A::kBlocksPerSM) void normalize_kernel(
    const __grid_constant__ Normalize op, const __grid_constant__ Plan plan,
    const uint32_t channel_blocks) {
  using T = typename A::T;
  using acc = typename A::acc;
  constexpr int kSteps = A::kSteps;
  wait_for_previous();
  if (blockIdx.x < channel_blocks) return update_channels(op, channel_blocks);
  const T* x = static_cast<const T*>(op.x);  // [outer, C, inner]
  T* y = static_cast<T*>(op.y);              // [outer, C, inner]
  const Walk<A> walk(plan, gridDim.x - 1 - blockIdx.x);

  typename A::pack_t pack[kSteps];
  const auto load = [&](uint32_t step) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const Span span = walk.at_from_end(step + u * walk.stride);
      walk.load(x, span, pack[u], once());
    }
  };
  load(walk.first);  // under way while the coefficients are computed

  struct Coefficients {
    acc rounded, scale, shift;
  };
  __shared__ Coefficients shared[A::kChannels];
  if (threadIdx.x < walk.entries()) {
    const uint32_t c = walk.channel(threadIdx.x);
    if (c < plan.channels) {
      const size_t channels = plan.channels;
      const Moments m = moments_of(op.sums[c], op.sums[channels + c], op.sums[2 * channels]);
      const acc rounded = static_cast<acc>(m.mean);
      const double scale = get_or(op.weight, c, 1) * invstd_of(m.var, op.eps);
      const double shift = get_or(op.bias, c, 0) - (m.mean - rounded) * scale;
      shared[threadIdx.x] = {rounded, static_cast<acc>(scale), static_cast<acc>(shift)};
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
      walk.complete(x, span, pack[u]);
      acc wide[A::kPack];
#pragma unroll
      for (int j = 0; j < A::kPack; ++j) {
        const Coefficients& kj = k[A::slot(j)];
        wide[j] = (widen(pack[u].value[j]) - kj.rounded) * kj.scale + kj.shift;
      }
      narrow(wide, pack[u]);
      walk.template store<exist.value>(y, span, pack[u]);
    }
  };
  walk.template rounds<kSteps>(load, apply);
  let_next_start();
}

}  // namespace

void normalize(const Normalize& op, const Execution& where) {
  const char* name = "normalize";
  const DeviceGuard guard(name, where.device);
  with_access(op.dtype, op.layout, {op.x, op.y}, [&](auto access, uint32_t misalignment) {
    using A = decltype(access);
    const Plan plan = elementwise_plan<A>(name, op.layout, misalignment, where.device);
    const uint32_t more = channel_blocks(op, A::kThreads);
    launch(name, normalize_kernel<A>, more + plan.blocks(), A::kThreads, where, op, plan, more);
  });
}

}  // namespace syncbn::cuda
