// The one place that starts threads.
//
// The extension is not linked with an OpenMP library: its symbols are found at load time in the one
// that PyTorch brought, so that both share a pool of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace syncbn::cpu {

// Elements below which a second thread costs more than it saves; PyTorch's own figure.
constexpr int64_t kGrain = 32768;

// What preparing the parameters of one channel costs, in elements of the passes over a tensor.
constexpr int64_t kElementsPerChannel = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The start of part i, when `size` things are cut into `parts` of nearly equal size.
constexpr int64_t split(int64_t size, int64_t parts, int64_t i) { return size * i / parts; }

// Calls body(begin, end) on ranges that together cover [0, units), over at most `threads` threads.
// `elements` is how much work all of it is. The ranges depend on `threads`: results must not.
template <class Body>
void parallel_for(int64_t units, int64_t elements, int threads, const Body& body) {
#ifdef _OPENMP
  const int64_t useful = std::min(units, ceil_div(elements, kGrain));
  const int team_size = static_cast<int>(std::min<int64_t>(threads, useful));
  if (team_size > 1) {
#pragma omp parallel num_threads(team_size)
    {
      const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
      body(split(units, team, thread), split(units, team, thread + 1));
    }
    return;
  }
#else
  (void)elements;
  (void)threads;
#endif
  body(int64_t{0}, units);
}

}  // namespace syncbn::cpu
