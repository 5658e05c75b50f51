// sums_dy = [sum of dy | sum of dy * xhat], dbias and dweight of one rank, in one pass over dy and
// x.
//
// A thread sums dy and dy * (x - mean) with the mean rounded to the accumulation type; the rounding
// error and invstd are put right once per channel:
//
//   sum dy * xhat = invstd * (sum dy * (x - rounded) - (mean - rounded) * sum dy)
#include "launch.cuh"

namespace syncbn::cuda {
namespace {

template <typename A>
__global__ __launch_bounds__(A::kThreads, A::kBlocksPerSM) void backward_reduce_kernel(
    const typename A::T* dy,   // [outer, C, inner]
    const typename A::T* x,    // [outer, C, inner]
    const double* moments,     // [2C + 1]
    typename A::acc* sums_dy,  // [2C]
    const Vector dweight,      // [C] or absent
    const Vector dbias,        // [C] or absent
    const __grid_constant__ Plan plan, const Partials partials) {
  using acc = typename A::acc;
  constexpr int kSteps = A::kStepsOfTwo;
  const Walk<A> walk(plan, blockIdx.x);

  Span span[kSteps];
  typename A::pack_t pack_dy[kSteps];
  typename A::pack_t pack_x[kSteps];
  const auto load = [&](uint32_t step) {
    const Caching caching = step < plan.once ? once() : keep();
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      span[u] = walk.at(step + u * walk.stride);
      walk.load(dy, span[u], pack_dy[u], caching);
      walk.load(x, span[u], pack_x[u], caching);
    }
  };
  wait_for_previous();
  load(walk.first);
  struct Channel {
    double rest, invstd;
  };
  __shared__ Channel channels[A::kChannels];
  __shared__ acc rounded[A::kChannels];
  if (threadIdx.x < walk.entries()) {
    const uint32_t c = walk.channel(threadIdx.x);
    if (c < plan.channels) {
      const double mean = moments[c];
      rounded[threadIdx.x] = static_cast<acc>(mean);
      channels[threadIdx.x] = {mean - static_cast<acc>(mean), moments[plan.channels + c]};
    }
  }
  __syncthreads();

  acc mean[A::kSlots];
  Sums<acc, A::kSlots> sum{};
#pragma unroll
  for (int s = 0; s < A::kSlots; ++s) mean[s] = rounded[walk.entry(s)];
  const auto add = [&](uint32_t, auto exist) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      walk.complete(dy, span[u], pack_dy[u]);
      walk.complete(x, span[u], pack_x[u]);
#pragma unroll
      for (int j = 0; j < A::kPack; ++j) {
        const int s = A::slot(j);
        const bool has = walk.template has<exist.value>(span[u], j);
        const acc d = has ? widen(pack_dy[u].value[j]) : acc{0};
        sum.a[s] += d;
        sum.b[s] += has ? d * (widen(pack_x[u].value[j]) - mean[s]) : acc{0};
      }
    }
  };
  walk.template rounds<kSteps>(load, add);

  reduce(plan, walk, sum, partials, [&](uint32_t entry, const Pair& total) {
    const uint32_t c = walk.channel(entry);
    const Channel& channel = channels[entry];
    const double sum_dy = total.a;
    const double sum_dy_xhat = channel.invstd * (total.b - channel.rest * total.a);
    sums_dy[c] = static_cast<acc>(sum_dy);
    sums_dy[plan.channels + c] = static_cast<acc>(sum_dy_xhat);
    if (dbias.data != nullptr) put(dbias, c, sum_dy);
    if (dweight.data != nullptr) put(dweight, c, sum_dy_xhat);
  });
}

size_t bytes_of(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

}  // namespace

void backward_reduce(const BackwardReduce& op, const Execution& where) {
  const char* name = "backward_reduce";
  const DeviceGuard guard(name, where.device);
  const auto stream = static_cast<cudaStream_t>(where.stream);
  if (op.layout.size() == 0) {
    const size_t channels = op.layout.channels;
    const size_t acc = op.dtype == DType::float64 ? sizeof(double) : sizeof(float);
    check(name, cudaMemsetAsync(op.sums_dy, 0, 2 * channels * acc, stream));
    for (const Vector& vector : {op.dweight, op.dbias}) {
      if (vector.data == nullptr) continue;
      check(name, cudaMemsetAsync(vector.data, 0, channels * bytes_of(vector.dtype), stream));
    }
    return;
  }
  const Partials partials = partials_of(name, op.workspace);
  with_access(op.dtype, op.layout, {op.dy, op.x}, [&](auto access, uint32_t misalignment) {
    using A = decltype(access);
    using T = typename A::T;
    const Plan plan = reduction_plan<A>(name, op.layout, misalignment, 2, where.device);
    launch(name, backward_reduce_kernel<A>, plan.blocks(), A::kThreads, where,
           static_cast<const T*>(op.dy), static_cast<const T*>(op.x), op.moments,
           static_cast<typename A::acc*>(op.sums_dy), op.dweight, op.dbias, plan, partials);
  });
}

}  // namespace syncbn::cuda
