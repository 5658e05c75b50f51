// statistics: x -> [sum of x | sum of x^2 | n], through (n, mean, M2) per channel, where M2 is the
// sum of squared deviations from the mean.
//
// Sums of deviations from a pivot are exact enough in float32 while the pivot is within a few
// standard deviations of the mean. The pivot of a chunk is the mean of all chunks before it: if the
// chunk lies far from that, then so it does from the final mean, and M2 is large too. The first
// chunk is read twice, the second time from cache.
#include "reduce.h"
#include "storage.h"

namespace syncbn::cpu {
namespace {

// Pairs are (mean, M2).
template <class T>
struct Deviations {
  using Storage = T;
  static constexpr bool kRunningPivot = true;
  const T* x;  // [outer, C, inner]

  template <class Lanes>
  SYNCBN_INLINE void load(int64_t i, Vec<T> pivots, Lanes lanes, Vec<T>& a, Vec<T>& b) const {
    a = b = cpu::load(x + i, lanes) - pivots;
  }

  template <class Lanes>
  SYNCBN_INLINE Vec<T> first(int64_t i, Lanes lanes) const {
    return cpu::load(x + i, lanes);
  }

  template <int kLocality>
  SYNCBN_INLINE void prefetch(int64_t i) const {
    __builtin_prefetch(x + i, 0, kLocality);
  }

  static SYNCBN_INLINE Pair part(double n, double pivot, double sum, double sum_of_squares) {
    const double mean = sum * (1 / n);
    return {pivot + mean, sum_of_squares - sum * mean};
  }

  // Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
  // variances", 1979.
  static SYNCBN_INLINE void merge(double n, Pair& into, double m, const Pair& part) {
    const double weight = m / (n + m);
    const double delta = part.a - into.a;
    into.a += delta * weight;
    into.b += part.b + delta * delta * (n * weight);
  }
};

// The sum is n times the mean, rounded; the sum of squares agrees with the mean that readers will
// divide out of that sum.
SYNCBN_CLONES void sums_of(const Layout& layout, const double* mean, const double* m2,
                           double* sums) {
  const double n = static_cast<double>(layout.count());
  const int64_t channels = layout.channels;
  for (int64_t c = 0; c < channels; ++c) {
    const double sum = n * mean[c];
    sums[c] = sum;
    sums[channels + c] = n == 0 ? 0 : m2[c] + sum * (sum / n);
  }
  sums[2 * channels] = n;
}

}  // namespace

void statistics(const Statistics& args, const Execution& execution) {
  with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Deviations<T> op{static_cast<const T*>(args.x)};
    reduce(op, args.layout, execution.threads, [&](const double* mean, const double* m2) {
      sums_of(args.layout, mean, m2, args.sums);
    });
  });
}

}  // namespace syncbn::cpu
