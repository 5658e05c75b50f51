// From reduced sums to mean, variance and invstd: the same arithmetic on CPU and CUDA.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define SYNCBN_HOST_DEVICE __host__ __device__
#else
#define SYNCBN_HOST_DEVICE
#endif

namespace syncbn {

// Mean and biased variance of one channel over all n values of the mini-batch.
struct Moments {
  double mean;
  double var;
};

// n = 0 gives zeros. NaN and Inf in the sums give a NaN variance.
//
// sumsq and sum * mean each carry a few roundings of relative size 2^-53. A difference below 2^-50
// of sumsq is those roundings, not data: it counts as 0, so that a constant channel has variance 0.
// Where half the values of a float32 channel are neighbours of the other half, the variance is
// 2^-50 or more and stays; a few values that are neighbours of all others count as equal to them.
SYNCBN_HOST_DEVICE inline Moments moments_of(double sum, double sumsq, double n) {
  if (n == 0) return {0, 0};
  const double mean = sum / n;
  double m2 = fma(-sum, mean, sumsq);
  if (m2 < 0x1p-50 * sumsq) m2 = 0;
  return {mean, m2 / n};
}

// 0 where var + eps is 0, so that a constant channel with eps = 0 gives y = bias and a finite dx.
SYNCBN_HOST_DEVICE inline double invstd_of(double var, double eps) {
  return var + eps == 0 ? 0 : 1 / sqrt(var + eps);
}

// A running statistic moved towards the value of this batch. As a weighted sum: a factor of 1 gives
// the value, however large the statistic was.
SYNCBN_HOST_DEVICE inline double moved(double running, double value, double factor) {
  return (1 - factor) * running + factor * value;
}

}  // namespace syncbn
