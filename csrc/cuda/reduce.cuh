// Sums over threads, warps and blocks, in an order that depends on the shape alone: the same bits
// in every run.
#pragma once

#include "overlap.cuh"
#include "walk.cuh"
#include "welford.cuh"

namespace syncbn::cuda {

// Device memory where the blocks of a group leave their sums for the last of them to add up.
struct Partials {
  uint32_t* arrived;  // [groups], zero between launches
  Pair* pairs;        // [splits, groups, entries of a block]
};

// True in the one block that comes last of `splits`; what the others wrote before is visible to it.
__device__ inline bool is_last(uint32_t* arrived, uint32_t splits) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    // Release: what this block wrote, by way of the barrier above; acquire: what the others did.
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(arrived))
                 : "memory");
    last = before == splits - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  return last;
}

// Adds up what all threads of all blocks have per channel (slot), then calls finish(entry, sum),
// once per channel, each from one thread of the block that came last.
template <typename A, typename Sum, typename Finish>
__device__ void reduce(const Plan& plan, const Walk<A>& walk, Sum sum, const Partials& partials,
                       Finish finish) {
  constexpr uint32_t kWarps = A::kThreads / kWarp;
  const uint32_t thread = threadIdx.x;
  const uint32_t lane = thread % kWarp;
  const uint32_t warp = thread / kWarp;
  const uint32_t entries = walk.entries();
  let_next_start();

  // Lanes. In a matrix, lanes `width` apart have the same channels; otherwise all lanes of a warp.
  const uint32_t distinct = A::kInner ? 1 : plan.width;
  for (uint32_t other = distinct; other < kWarp; other *= 2) sum.merge_lane(other);

  // Warps. In a matrix, each has all entries; otherwise one, the same as its neighbours.
  using Slot = typename Sum::Slot;
  __shared__ Slot warps[A::kInner ? kWarps : kWarps * A::kChannels];
  if (lane < distinct) {
#pragma unroll
    for (int s = 0; s < A::kSlots; ++s) {
      warps[A::kInner ? warp : warp * entries + walk.entry(s)] = sum.slot(s);
    }
  }
  __syncthreads();
  const bool owns_entry = thread < entries && walk.channel(thread) < plan.channels;
  if (owns_entry) {
    const uint32_t sharing = A::kInner ? plan.width / kWarp : kWarps;
    const Slot* from = warps + (A::kInner ? thread * sharing : thread);
    Pair total{0, 0};
    for (uint32_t w = 0; w < sharing; ++w) total += from[A::kInner ? w : w * entries].pair();
    if (plan.splits == 1) {
      finish(thread, total);
    } else {
      partials
          .pairs[static_cast<size_t>(walk.split * plan.groups + walk.group) * entries + thread] =
          total;
    }
  }
  if (plan.splits == 1) return;

  // Blocks. An exchange with other ranks would follow here, in the last block of each group.
  if (!is_last(partials.arrived + walk.group, plan.splits)) return;
  __shared__ Pair shares[A::kThreads];
  const uint32_t sharing = min(A::kThreads / entries, kWarp);
  if (thread < sharing * entries) {
    const uint32_t entry = thread % entries;
    const size_t step = static_cast<size_t>(plan.groups) * entries;
    const Pair* from = partials.pairs + walk.group * entries + entry;
    const uint32_t splits = walk.channel(entry) < plan.channels ? plan.splits : 0;
    Pair total{0, 0};
    constexpr int kLoads = 8;  // under way at once
    for (uint32_t split = thread / entries; split < splits; split += kLoads * sharing) {
      double2 pair[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const bool exists = split + u * sharing < splits;
        const Pair* p = from + (split + u * sharing) * step;
        pair[u] = exists ? __ldcg(reinterpret_cast<const double2*>(p)) : double2{0, 0};
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) total += Pair{pair[u].x, pair[u].y};
    }
    shares[thread] = total;
  }
  __syncthreads();
  if (owns_entry) {
    Pair total = shares[thread];
    for (uint32_t s = 1; s < sharing; ++s) total += shares[s * entries + thread];
    finish(thread, total);
  }
}

}  // namespace syncbn::cuda
