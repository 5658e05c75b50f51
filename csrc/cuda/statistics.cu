// sums = [sum of x | sum of x^2 | n] of one rank, in one pass over x.
//
// A thread sums d = x - pivot and d^2 in the accumulation type, with its own first value as the
// pivot: whatever the mean, d is no larger than the spread of the thread's own values. From that
// come its mean and M2; the lanes of a warp merge theirs as Welford does, with means counted from
// the channel's first value P; warps and blocks, in double, add up the sums of x - P and (x - P)^2.
#include "launch.cuh"

namespace syncbn::cuda {
namespace {

template <typename A>
__global__ __launch_bounds__(A::kThreads, A::kBlocksPerSM) void statistics_kernel(
    const typename A::T* x,  // [outer, C, inner]
    double* sums,            // [2C + 1]
    const double n,          // values per channel
    const double one_nth, const __grid_constant__ Plan plan, const Partials partials) {
  using acc = typename A::acc;
  constexpr int kSteps = A::kSteps;
  const Walk<A> walk(plan, blockIdx.x);

  Span span[kSteps];
  typename A::pack_t pack[kSteps];
  const auto load = [&](uint32_t step) {
    const Caching caching = step < plan.once ? once() : keep();
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      span[u] = walk.at(step + u * walk.stride);
      walk.load(x, span[u], pack[u], caching);
    }
  };
  wait_for_previous();
  load(walk.first);
  __shared__ acc origin[A::kChannels];  // P
  if (threadIdx.x < walk.entries()) {
    const uint32_t c = walk.channel(threadIdx.x);
    if (c < plan.channels) origin[threadIdx.x] = widen(x[c * plan.inner]);
  }
  __syncthreads();

  acc pivot[A::kSlots] = {};
  if (walk.first < walk.count) {
    // Of an empty pack, the value before it: the last of its row.
    const int64_t own = span[0].offset + min(span[0].from, span[0].to - 1);
#pragma unroll
    for (int s = 0; s < A::kSlots; ++s) {
      pivot[s] = widen(A::kMasked ? x[own] : pack[0].value[s]);
    }
  }
  acc s1[A::kSlots] = {};
  acc s2[A::kSlots] = {};
  uint32_t taken = 0;  // values per slot
  const auto add = [&](uint32_t, auto exist) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      walk.complete(x, span[u], pack[u]);
#pragma unroll
      for (int j = 0; j < A::kPack; ++j) {
        const int s = A::slot(j);
        const bool has = walk.template has<exist.value>(span[u], j);
        const acc d = has ? widen(pack[u].value[j]) - pivot[s] : acc{0};
        s1[s] += d;
        s2[s] += d * d;
      }
      taken += walk.size(span[u]);
    }
  };
  walk.template rounds<kSteps>(load, add);

  Welford<acc, A::kSlots> sum{};
  if (taken != 0) {
    sum.n = static_cast<acc>(taken);
#pragma unroll
    for (int s = 0; s < A::kSlots; ++s) {
      const acc offset = ratio(s1[s], sum.n);
      sum.mean[s] = pivot[s] - origin[walk.entry(s)] + offset;
      sum.m2[s] = s2[s] - s1[s] * offset;
    }
  }
  reduce(plan, walk, sum, partials, [&](uint32_t entry, const Pair& total) {
    const uint32_t c = walk.channel(entry);
    const double offset = total.a * one_nth;
    const double m2 = total.b - total.a * offset;
    sums[c] = n * origin[entry] + total.a;
    sums[plan.channels + c] = (m2 < 0 ? 0 : m2) + sums[c] * (origin[entry] + offset);
    if (c == 0) sums[2 * static_cast<size_t>(plan.channels)] = n;
  });
}

}  // namespace

void statistics(const Statistics& op, const Execution& where) {
  const char* name = "statistics";
  const DeviceGuard guard(name, where.device);
  const auto stream = static_cast<cudaStream_t>(where.stream);
  if (op.layout.size() == 0) {
    const size_t bytes = (2 * op.layout.channels + 1) * sizeof(double);
    return check(name, cudaMemsetAsync(op.sums, 0, bytes, stream));
  }
  const Partials partials = partials_of(name, op.workspace);
  with_access(op.dtype, op.layout, {op.x}, [&](auto access, uint32_t misalignment) {
    using A = decltype(access);
    const Plan plan = reduction_plan<A>(name, op.layout, misalignment, 1, where.device);
    const double n = static_cast<double>(op.layout.count());
    launch(name, statistics_kernel<A>, plan.blocks(), A::kThreads, where,
           static_cast<const typename A::T*>(op.x), op.sums, n, 1 / n, plan, partials);
  });
}

}  // namespace syncbn::cuda
