// backward_input: dx = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n).
#include "channel_vector.h"
#include "map.h"
#include "scratch.h"
#include "storage.h"

namespace syncbn::cpu {
namespace {

// dx = dy * scale + ((x - pivot) * slope + shift), with the mean as far as Acc holds it as pivot.
template <class T>
struct Gradient {
  using Storage = T;
  static constexpr int kParameters = 4;
  const T* dy;  // [outer, C, inner]
  const T* x;   // [outer, C, inner]
  T* dx;        // [outer, C, inner]

  template <int kLocality>
  SYNCBN_INLINE void prefetch(int64_t i) const {
    __builtin_prefetch(dy + i, 0, kLocality);
    __builtin_prefetch(x + i, 0, kLocality);
    if (kLocality == 3) __builtin_prefetch(dx + i, 1, kLocality);
  }

  template <class Lanes>
  SYNCBN_INLINE void apply(int64_t i, const Vec<T>* parameters, Lanes lanes) const {
    const Vec<T> deviation = load(x + i, lanes) - parameters[0];
    const Vec<T> correction = deviation * parameters[2] + parameters[3];
    store(dx + i, load(dy + i, lanes) * parameters[1] + correction, lanes);
  }
};

// Channels [begin, end) of the parameters [4, C] of Gradient.
template <class A>
SYNCBN_CLONES void prepare(const BackwardInput& args, int64_t begin, int64_t end, A* parameters) {
  const int64_t channels = args.layout.channels;
  const A* sums_dy = static_cast<const A*>(args.sums_dy);
  const double n = args.moments[2 * channels];
  for (int64_t c = begin; c < end; ++c) {
    const double mean = args.moments[c], invstd = args.moments[channels + c];
    const A pivot = static_cast<A>(mean);
    const double scale = read(args.weight, c, 1) * invstd;
    const double slope = -scale * invstd * (sums_dy[channels + c] / n);
    parameters[c] = pivot;
    parameters[channels + c] = static_cast<A>(scale);
    parameters[2 * channels + c] = static_cast<A>(slope);
    parameters[3 * channels + c] =
        static_cast<A>(-scale * (sums_dy[c] / n) - slope * (mean - pivot));
  }
}

}  // namespace

void backward_input(const BackwardInput& args, const Execution& execution) {
  const int64_t channels = args.layout.channels;
  if (args.layout.size() == 0) return;
  with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    Scratch<Acc<T>> parameters(4 * channels);
    parallel_for(channels, channels * kElementsPerChannel, execution.threads,
                 [&](int64_t begin, int64_t end) { prepare(args, begin, end, parameters.data()); });
    const Gradient<T> op{static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
                         static_cast<T*>(args.dx)};
    map(op, args.layout, execution.threads, parameters.data());
  });
}

}  // namespace syncbn::cpu
