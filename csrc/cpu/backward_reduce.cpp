// backward_reduce: dy, x and the moments -> [sum of dy | sum of dy * xhat], dweight and dbias.
#include "channel_vector.h"
#include "reduce.h"
#include "storage.h"

namespace syncbn::cpu {
namespace {

// Pairs are (sum of dy, sum of dy * (x - pivot)), with the mean as far as Acc holds it as pivot.
template <class T>
struct Products {
  using Storage = T;
  static constexpr bool kRunningPivot = false;
  const Acc<T>* pivot;  // [C]
  const T* dy;          // [outer, C, inner]
  const T* x;           // [outer, C, inner]

  template <class Lanes>
  SYNCBN_INLINE void load(int64_t i, Vec<T> pivots, Lanes lanes, Vec<T>& a, Vec<T>& b) const {
    a = cpu::load(dy + i, lanes);
    b = cpu::load(x + i, lanes) - pivots;
  }

  template <int kLocality>
  SYNCBN_INLINE void prefetch(int64_t i) const {
    __builtin_prefetch(dy + i, 0, kLocality);
    __builtin_prefetch(x + i, 0, kLocality);
  }

  static SYNCBN_INLINE Pair part(double, double, double sum_a, double sum_ab) {
    return {sum_a, sum_ab};
  }

  static SYNCBN_INLINE void merge(double, Pair& into, double, const Pair& part) {
    into.a += part.a;
    into.b += part.b;
  }
};

template <class A>
void pivots_of(const double* moments, int64_t channels, A* pivots) {
  for (int64_t c = 0; c < channels; ++c) pivots[c] = static_cast<A>(moments[c]);
}

// sum of dy * xhat = invstd * sum of dy * ((x - pivot) - (mean - pivot)).
template <class A>
SYNCBN_CLONES void gradients_of(const BackwardReduce& args, const A* pivots, const double* sum_dy,
                                const double* sum_product) {
  const int64_t channels = args.layout.channels;
  A* sums_dy = static_cast<A*>(args.sums_dy);
  for (int64_t c = 0; c < channels; ++c) {
    const double mean = args.moments[c], invstd = args.moments[channels + c];
    const double sum_dy_xhat = invstd * (sum_product[c] - (mean - pivots[c]) * sum_dy[c]);
    sums_dy[c] = static_cast<A>(sum_dy[c]);
    sums_dy[channels + c] = static_cast<A>(sum_dy_xhat);
    write(args.dbias, c, sum_dy[c]);
    write(args.dweight, c, sum_dy_xhat);
  }
}

}  // namespace

void backward_reduce(const BackwardReduce& args, const Execution& execution) {
  with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    Scratch<Acc<T>> pivots(args.layout.channels);
    pivots_of(args.moments, args.layout.channels, pivots.data());
    const Products<T> op{pivots.data(), static_cast<const T*>(args.dy),
                         static_cast<const T*>(args.x)};
    reduce(op, args.layout, execution.threads,
           [&](const double* sum_dy, const double* sum_product) {
             gradients_of(args, pivots.data(), sum_dy, sum_product);
           });
  });
}

}  // namespace syncbn::cpu
