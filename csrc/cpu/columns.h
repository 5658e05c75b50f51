// What the two traversals, reduce.h and map.h, share about blocks by column.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blocks.h"
#include "vec.h"

namespace syncbn::cpu {

// Calls step(col, skipped, lanes) for each vector of a row: `col` is its first column, and
// `skipped` says how many of its lanes the vector before already had.
template <class T, class Step>
SYNCBN_INLINE void each_vector(int64_t cols, const Step& step) {
  constexpr int kStep = kLanes<T>;
  if (cols < kStep) {
    step(int64_t{0}, 0, static_cast<int>(cols));
    return;
  }
  int64_t col = 0;
  for (; col + kStep <= cols; col += kStep) step(col, 0, AllLanes<T>{});
  if (col < cols) step(cols - kStep, static_cast<int>(col + kStep - cols), AllLanes<T>{});
}

// Calls step(row, group) for groups of adjacent rows that are worked on together, so that what is
// kept per column is loaded once for all: `group`, a constant, is kShort, kLong or 1. The CPU's own
// prefetching cannot follow several long rows side by side: step prefetches.
template <class T, int kShort, int kLong, class Step>
SYNCBN_INLINE void each_row_group(int64_t rows, int64_t cols, const Step& step) {
  constexpr int64_t kShortBytes = 256;
  int64_t row = 0;
  if (cols * int64_t{sizeof(T)} <= kShortBytes) {
    for (; row + kShort <= rows; row += kShort) step(row, std::integral_constant<int, kShort>{});
  } else {
    for (; row + kLong <= rows; row += kLong) step(row, std::integral_constant<int, kLong>{});
  }
  for (; row < rows; ++row) step(row, std::integral_constant<int, 1>{});
}

// While a vector of each of kRows rows is worked on: as much of the group of rows after them, in
// the order of memory, and of the group after that, a step earlier into a cache further out.
template <int kRows, class Op>
SYNCBN_INLINE void prefetch_rows(const Op& op, int64_t next, int64_t group) {
  using T = typename Op::Storage;
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < kRows * kLanes<T>; i += kLine) {
    op.template prefetch<2>(next + group + i);
    op.template prefetch<3>(next + i);
  }
}

// Gives every column of a block by column the value of its channel: [channels] -> [cols].
template <class A>
SYNCBN_INLINE void expand(const Block& block, int64_t inner, const A* from, A* to) {
  int64_t col = 0;
  while (col < block.cols) {
    for (int64_t c = 0; c < block.channels; ++c) {
      for (int64_t i = 0; i < inner; ++i) to[col++] = from[c];
    }
  }
}

}  // namespace syncbn::cpu
