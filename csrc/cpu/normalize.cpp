// normalize: x and the reduced sums -> y = weight * (x - mean) * invstd + bias, the moments, and
// the running statistics.
#include "../moments.h"
#include "channel_vector.h"
#include "map.h"
#include "scratch.h"
#include "storage.h"

namespace syncbn::cpu {
namespace {

// y = (x - pivot) * scale + shift. The pivot is the mean as far as float32 holds it: x - pivot is
// then small and exact where the mean is large, and what is left of the mean goes into the shift.
template <class T>
struct Affine {
  using Storage = T;
  static constexpr int kParameters = 3;
  const T* x;  // [outer, C, inner]
  T* y;        // [outer, C, inner]

  template <int kLocality>
  SYNCBN_INLINE void prefetch(int64_t i) const {
    __builtin_prefetch(x + i, 0, kLocality);
    if (kLocality == 3) __builtin_prefetch(y + i, 1, kLocality);
  }

  template <class Lanes>
  SYNCBN_INLINE void apply(int64_t i, const Vec<T>* parameters, Lanes lanes) const {
    const Vec<T> deviation = load(x + i, lanes) - parameters[0];
    store(y + i, deviation * parameters[1] + parameters[2], lanes);
  }
};

// Channels [begin, end): the moments, the running statistics and the parameters [3, C] of Affine.
template <class A>
SYNCBN_CLONES void prepare(const Normalize& args, double factor, int64_t begin, int64_t end,
                           A* parameters) {
  const int64_t channels = args.layout.channels;
  const double n = args.sums[2 * channels];
  const double unbiased = n / (n - 1);
  for (int64_t c = begin; c < end; ++c) {
    const Moments moments = moments_of(args.sums[c], args.sums[channels + c], n);
    const double invstd = invstd_of(moments.var, args.eps);
    args.moments[c] = moments.mean;
    args.moments[channels + c] = invstd;

    if (args.running_mean.data != nullptr && n > 0) {
      write(args.running_mean, c, moved(read(args.running_mean, c, 0), moments.mean, factor));
    }
    if (args.running_var.data != nullptr && n > 1) {
      write(args.running_var, c,
            moved(read(args.running_var, c, 0), moments.var * unbiased, factor));
    }

    const A pivot = static_cast<A>(moments.mean);
    const double scale = read(args.weight, c, 1) * invstd;
    const double shift = read(args.bias, c, 0) - (moments.mean - pivot) * scale;
    parameters[c] = pivot;
    parameters[channels + c] = static_cast<A>(scale);
    parameters[2 * channels + c] = static_cast<A>(shift);
  }
}

}  // namespace

void normalize(const Normalize& args, const Execution& execution) {
  const int64_t channels = args.layout.channels;
  const double n = args.sums[2 * channels];
  args.moments[2 * channels] = n;
  double factor = args.momentum;
  if (args.num_batches_tracked != nullptr && n > 0) {
    *args.num_batches_tracked += 1;
    if (args.cumulative) factor = 1.0 / static_cast<double>(*args.num_batches_tracked);
  }
  with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    Scratch<Acc<T>> parameters(3 * channels);
    parallel_for(
        channels, channels * kElementsPerChannel, execution.threads,
        [&](int64_t begin, int64_t end) { prepare(args, factor, begin, end, parameters.data()); });
    const Affine<T> op{static_cast<const T*>(args.x), static_cast<T*>(args.y)};
    map(op, args.layout, execution.threads, parameters.data());
  });
}

}  // namespace syncbn::cpu
