// What a thread has summed, in the accumulation type, and how two such sums become one.
#pragma once

#include "pack.cuh"

namespace syncbn::cuda {

// Sums once more, in double, where there is one per warp and channel.
struct Pair {
  double a;
  double b;

  __device__ void operator+=(const Pair& other) {
    a += other.a;
    b += other.b;
  }
};

__device__ inline float ratio(float a, float b) { return __fdividef(a, b); }
__device__ inline double ratio(double a, double b) { return a / b; }

// n values of each of a thread's channels (slots): their mean, as an offset from a value P that all
// threads of the channel agree on, and their sum of squared deviations from the mean.
template <typename acc, int kSlots>
struct Welford {
  acc n;
  acc mean[kSlots];
  acc m2[kSlots];

  // Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm (1979). Only differences of
  // means are squared, so P need not be near the mean.
  __device__ void merge_lane(uint32_t other) {
    const acc other_n = __shfl_xor_sync(0xffffffff, n, other);
    const acc total = n + other_n;
    const acc share = total == 0 ? acc{0} : ratio(other_n, total);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const acc delta = __shfl_xor_sync(0xffffffff, mean[s], other) - mean[s];
      m2[s] += __shfl_xor_sync(0xffffffff, m2[s], other) + delta * delta * (n * share);
      mean[s] += delta * share;
    }
    n = total;
  }

  struct Slot {
    acc n, mean, m2;

    // Sums of x - P and of (x - P)^2.
    __device__ Pair pair() const {
      const double sum = static_cast<double>(n) * mean;
      return {sum, m2 + sum * mean};
    }
  };
  __device__ Slot slot(int s) const { return {n, mean[s], m2[s]}; }
};

// Two plain sums for each of a thread's channels.
template <typename acc, int kSlots>
struct Sums {
  acc a[kSlots];
  acc b[kSlots];

  __device__ void merge_lane(uint32_t other) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      a[s] += __shfl_xor_sync(0xffffffff, a[s], other);
      b[s] += __shfl_xor_sync(0xffffffff, b[s], other);
    }
  }

  struct Slot {
    acc a, b;
    __device__ Pair pair() const { return {a, b}; }
  };
  __device__ Slot slot(int s) const { return {a[s], b[s]}; }
};

}  // namespace syncbn::cuda
