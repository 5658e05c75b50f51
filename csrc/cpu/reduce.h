// Two sums per channel over a whole tensor: the traversal of `statistics` and `backward_reduce`.
//
// An op is a struct:
//
//     using Storage                         storage type of the tensors
//     kRunningPivot                         whether the pivot is the mean so far, found on the way;
//                                           if not, it is given as `const Acc* pivot;`, [C]
//     prefetch<kLocality>(i)                fetches the cache lines at element i
//     load(i, pivot, lanes, a, b)           vectors a and b at element i; summed are a and a * b
//     first(i, lanes)                       values to pivot on before there is a mean
//     part(n, pivot, sum_a, sum_ab)         the sums over n values as a Pair, which needs no pivot
//     merge(n, into, m, part)               puts together the Pairs of n and of m values
//
// Sums are in Acc over a chunk of about kChunk values, and in double from there on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "blocks.h"
#include "columns.h"
#include "scratch.h"
#include "vec.h"

namespace syncbn::cpu {

struct Pair {
  double a;
  double b;
};

// ---- By plane: all values of a block belong to one channel. ----

constexpr int64_t kChunk = 4096;  // values: 16 kB of float32, which L1 holds for a second look

// Sums over a table whose rows are at least a vector long. The last vector of a row ends with the
// row; lanes that it shares with the one before count as 0.
template <class Op>
SYNCBN_INLINE Pair sum_table(const Op& op, int64_t offset, int64_t rows, int64_t cols,
                             int64_t stride, Acc<typename Op::Storage> pivot) {
  using T = typename Op::Storage;
  using V = Vec<T>;
  constexpr int kStep = kLanes<T>;
  constexpr int kUnroll = 4;  // chains of additions in flight
  const V pivots = broadcast(pivot);
  const int tail = static_cast<int>(cols % kStep);
  V sum_a[kUnroll] = {}, sum_ab[kUnroll] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t begin = offset + row * stride, end = begin + cols;
    int64_t i = begin;
    V a, b;
    for (; i + kUnroll * kStep <= end; i += kUnroll * kStep) {
      for (int k = 0; k < kUnroll; ++k) {
        op.load(i + k * kStep, pivots, AllLanes<T>{}, a, b);
        sum_a[k] += a;
        sum_ab[k] += a * b;
      }
    }
    for (int k = 0; k < kUnroll - 1 && i + kStep <= end; ++k, i += kStep) {
      op.load(i, pivots, AllLanes<T>{}, a, b);
      sum_a[k] += a;
      sum_ab[k] += a * b;
    }
    if (tail > 0) {
      op.load(end - kStep, pivots, AllLanes<T>{}, a, b);
      a = without_first(a, kStep - tail);
      b = without_first(b, kStep - tail);
      sum_a[kUnroll - 1] += a;
      sum_ab[kUnroll - 1] += a * b;
    }
  }
  return {total((sum_a[0] + sum_a[1]) + (sum_a[2] + sum_a[3])),
          total((sum_ab[0] + sum_ab[1]) + (sum_ab[2] + sum_ab[3]))};
}

template <class Op>
SYNCBN_INLINE Pair reduce_plane_block(const Op& op, const Block& block) {
  using A = Acc<typename Op::Storage>;
  const int64_t chunk_rows = std::max<int64_t>(1, kChunk / block.cols);
  const int64_t pieces = ceil_div(block.cols, kChunk);
  Pair sums{0, 0};
  double count = 0;
  for (int64_t row = 0; row < block.rows; row += chunk_rows) {
    const int64_t rows = std::min(chunk_rows, block.rows - row);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = split(block.cols, pieces, piece);
      const int64_t cols = split(block.cols, pieces, piece + 1) - begin;
      const int64_t offset = block.offset + row * block.stride + begin;
      const double n = static_cast<double>(rows * cols);
      A pivot;
      if constexpr (!Op::kRunningPivot) {
        pivot = op.pivot[block.channel];
      } else if (count == 0) {
        pivot = op.first(offset, AllLanes<typename Op::Storage>{})[0];
        pivot += static_cast<A>(sum_table(op, offset, rows, cols, block.stride, pivot).a / n);
      } else {
        pivot = static_cast<A>(sums.a);
      }
      const Pair sum = sum_table(op, offset, rows, cols, block.stride, pivot);
      op.merge(count, sums, n, op.part(n, pivot, sum.a, sum.b));
      count += n;
    }
  }
  return sums;
}

// ---- By column: a block has several channels, each in one or more of its columns. ----

constexpr int64_t kChunkRows = 128;
constexpr int64_t kFirstChunkRows = 16;  // read twice
constexpr int kManyRows = 8;             // long rows worked on together

template <class A>
struct ColumnSums {
  alignas(kVectorBytes) A pivot[kMaxColumns];
  alignas(kVectorBytes) A sum_a[kMaxColumns];
  alignas(kVectorBytes) A sum_ab[kMaxColumns];
  double a[kMaxColumns];
  double b[kMaxColumns];
};

template <int kRows, class Op, class A>
SYNCBN_INLINE void add_rows(const Op& op, int64_t offset, int64_t cols, int64_t stride,
                            ColumnSums<A>& sums) {
  using T = typename Op::Storage;
  each_vector<T>(cols, [&](int64_t col, int skipped, auto lanes) SYNCBN_INLINE_LAMBDA {
    if constexpr (kRows == kManyRows) {
      prefetch_rows<kRows>(op, offset + kRows * stride + col * kRows, kRows * stride);
    }
    const Vec<T> pivots = load(sums.pivot + col, AllLanes<T>{});
    Vec<T> sum_a = load(sums.sum_a + col, AllLanes<T>{});
    Vec<T> sum_ab = load(sums.sum_ab + col, AllLanes<T>{});
    for (int row = 0; row < kRows; ++row) {
      Vec<T> a, b;
      op.load(offset + row * stride + col, pivots, lanes, a, b);
      if (skipped > 0) {
        a = without_first(a, skipped);
        b = without_first(b, skipped);
      }
      sum_a += a;
      sum_ab += a * b;
    }
    store(sums.sum_a + col, sum_a, AllLanes<T>{});
    store(sums.sum_ab + col, sum_ab, AllLanes<T>{});
  });
}

template <class Op, class A>
SYNCBN_INLINE void sum_columns(const Op& op, int64_t offset, int64_t rows, int64_t cols,
                               int64_t stride, ColumnSums<A>& sums) {
  using T = typename Op::Storage;
  const int64_t used = std::max<int64_t>(cols, kLanes<T>);
  std::fill(sums.sum_a, sums.sum_a + used, A{0});
  std::fill(sums.sum_ab, sums.sum_ab + used, A{0});
  each_row_group<T, 4, kManyRows>(rows, cols, [&](int64_t row, auto group) SYNCBN_INLINE_LAMBDA {
    add_rows<group>(op, offset + row * stride, cols, stride, sums);
  });
}

// Fills a and b [channels], from the columns of each channel.
template <class Op, class A>
SYNCBN_INLINE void merge_columns(const Op& op, const Block& block, int64_t inner,
                                 const ColumnSums<A>& sums, double* a, double* b) {
  const double rows = static_cast<double>(block.rows);
  const int64_t repeats = block.cols / (block.channels * inner);
  for (int64_t i = 0; i < repeats * inner; ++i) {
    const int64_t first = i / inner * block.channels * inner + i % inner;
    const double n = static_cast<double>(i) * rows;
    for (int64_t c = 0; c < block.channels; ++c) {
      Pair into = i == 0 ? Pair{0, 0} : Pair{a[c], b[c]};
      op.merge(n, into, rows, {sums.a[first + c * inner], sums.b[first + c * inner]});
      a[c] = into.a;
      b[c] = into.b;
    }
  }
}

// Fills a and b [channels].
template <class Op>
SYNCBN_INLINE void reduce_column_block(const Op& op, const Block& block, int64_t inner, double* a,
                                       double* b) {
  using T = typename Op::Storage;
  using A = Acc<T>;
  ColumnSums<A> sums;
  if constexpr (!Op::kRunningPivot) {
    expand(block, inner, op.pivot + block.channel, sums.pivot);
  } else {
    each_vector<T>(block.cols, [&](int64_t col, int, auto lanes) SYNCBN_INLINE_LAMBDA {
      store(sums.pivot + col, op.first(block.offset + col, lanes), AllLanes<T>{});
    });
  }
  int64_t rows;
  for (int64_t row = 0; row < block.rows; row += rows) {
    rows = std::min(block.rows - row, row == 0 ? kFirstChunkRows : kChunkRows);
    const int64_t offset = block.offset + row * block.stride;
    const double count = static_cast<double>(row), n = static_cast<double>(rows);
    if (Op::kRunningPivot && row == 0) {
      sum_columns(op, offset, rows, block.cols, block.stride, sums);
      const A scale = static_cast<A>(1 / n);
      for (int64_t col = 0; col < block.cols; ++col) sums.pivot[col] += sums.sum_a[col] * scale;
    }
    sum_columns(op, offset, rows, block.cols, block.stride, sums);
    for (int64_t col = 0; col < block.cols; ++col) {
      Pair into = row == 0 ? Pair{0, 0} : Pair{sums.a[col], sums.b[col]};
      op.merge(count, into, n, op.part(n, sums.pivot[col], sums.sum_a[col], sums.sum_ab[col]));
      sums.a[col] = into.a;
      sums.b[col] = into.b;
      if (Op::kRunningPivot) sums.pivot[col] = static_cast<A>(into.a);
    }
  }
  merge_columns(op, block, inner, sums, a, b);
}

// ---- The whole tensor. ----

// Blocks [begin, end). Part p of channel c goes to a and b [p * channels + c].
template <class Op>
SYNCBN_CLONES void reduce_blocks(const Op& op, const Blocks& blocks, int64_t begin, int64_t end,
                                 double* a, double* b) {
  for (int64_t i = begin; i < end; ++i) {
    const Block block = blocks[i];
    const int64_t to = block.part * blocks.channels() + block.channel;
    if (blocks.by_plane()) {
      const Pair sums = reduce_plane_block(op, block);
      a[to] = sums.a;
      b[to] = sums.b;
    } else {
      reduce_column_block(op, block, blocks.inner(), a + to, b + to);
    }
  }
}

// Merges all parts into the first, in order.
template <class Op>
SYNCBN_CLONES void merge_parts(const Op& op, const Blocks& blocks, double* a, double* b) {
  const int64_t channels = blocks.channels();
  double count = static_cast<double>(blocks.part_count(0));
  for (int64_t part = 1; part < blocks.parts(); ++part) {
    const double n = static_cast<double>(blocks.part_count(part));
    const double* part_a = a + part * channels;
    const double* part_b = b + part * channels;
    for (int64_t c = 0; c < channels; ++c) {
      Pair into{a[c], b[c]};
      op.merge(count, into, n, {part_a[c], part_b[c]});
      a[c] = into.a;
      b[c] = into.b;
    }
    count += n;
  }
}

// Calls finish(a, b) with the Pairs of all channels, [C] each: zeros if the tensor is empty.
template <class Op, class Finish>
void reduce(const Op& op, const Layout& layout, int threads, const Finish& finish) {
  const Blocks blocks(layout);
  const int64_t parts = std::max<int64_t>(1, blocks.parts());
  Scratch<double> scratch(2 * parts * layout.channels);
  double* a = scratch.data();
  double* b = a + parts * layout.channels;
  if (blocks.count() == 0) {
    std::fill(a, a + 2 * layout.channels, 0.0);
  } else {
    parallel_for(blocks.count(), blocks.size(), threads,
                 [&](int64_t begin, int64_t end) { reduce_blocks(op, blocks, begin, end, a, b); });
    merge_parts(op, blocks, a, b);
  }
  finish(a, b);
}

}  // namespace syncbn::cpu
