// An element-wise function with a few parameters per channel, over a whole tensor: the traversal of
// `normalize` and `backward_input`.
//
// An op is a struct:
//
//     using Storage                 storage type of the tensors
//     kParameters                   how many parameters a channel has
//     prefetch<kLocality>(i)        fetches the cache lines at element i
//     apply(i, parameters, lanes)   computes the elements from i on; parameters: kParameters
//     vectors
#pragma once

#include <cstdint>

#include "blocks.h"
#include "columns.h"
#include "vec.h"

namespace syncbn::cpu {

// By plane: the parameters are the same for the whole block. The last vector of a row ends with the
// row, and computes again what it shares with the one before.
template <class Op>
SYNCBN_INLINE void map_plane_block(const Op& op, const Block& block, int64_t channels,
                                   const Acc<typename Op::Storage>* parameters) {
  using T = typename Op::Storage;
  constexpr int kStep = kLanes<T>;
  Vec<T> own[Op::kParameters];
  for (int k = 0; k < Op::kParameters; ++k) {
    own[k] = broadcast(parameters[k * channels + block.channel]);
  }
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t begin = block.offset + row * block.stride, end = begin + block.cols;
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep) op.apply(i, own, AllLanes<T>{});
    if (i < end) op.apply(end - kStep, own, AllLanes<T>{});
  }
}

constexpr int kManyRows = 4;  // long rows worked on together

template <int kRows, class Op, class A>
SYNCBN_INLINE void map_rows(const Op& op, int64_t offset, int64_t cols, int64_t stride,
                            const A (*parameters)[kMaxColumns]) {
  using T = typename Op::Storage;
  each_vector<T>(cols, [&](int64_t col, int, auto lanes) SYNCBN_INLINE_LAMBDA {
    if constexpr (kRows == kManyRows) {
      prefetch_rows<kRows>(op, offset + kRows * stride + col * kRows, kRows * stride);
    }
    Vec<T> own[Op::kParameters];
    for (int k = 0; k < Op::kParameters; ++k) own[k] = load(parameters[k] + col, AllLanes<T>{});
    for (int row = 0; row < kRows; ++row) op.apply(offset + row * stride + col, own, lanes);
  });
}

// By column: a vector of each parameter serves several rows.
template <class Op>
SYNCBN_INLINE void map_column_block(const Op& op, const Block& block, int64_t channels,
                                    int64_t inner, const Acc<typename Op::Storage>* parameters) {
  alignas(kVectorBytes) Acc<typename Op::Storage> expanded[Op::kParameters][kMaxColumns];
  for (int k = 0; k < Op::kParameters; ++k) {
    expand(block, inner, parameters + k * channels + block.channel, expanded[k]);
  }
  each_row_group<typename Op::Storage, 2, kManyRows>(
      block.rows, block.cols, [&](int64_t row, auto group) SYNCBN_INLINE_LAMBDA {
        map_rows<group>(op, block.offset + row * block.stride, block.cols, block.stride, expanded);
      });
}

template <class Op>
SYNCBN_CLONES void map_blocks(const Op& op, const Blocks& blocks, int64_t begin, int64_t end,
                              const Acc<typename Op::Storage>* parameters) {
  for (int64_t i = begin; i < end; ++i) {
    if (blocks.by_plane()) {
      map_plane_block(op, blocks[i], blocks.channels(), parameters);
    } else {
      map_column_block(op, blocks[i], blocks.channels(), blocks.inner(), parameters);
    }
  }
}

// `parameters`: [Op::kParameters, C].
template <class Op>
void map(const Op& op, const Layout& layout, int threads,
         const Acc<typename Op::Storage>* parameters) {
  const Blocks blocks(layout);
  parallel_for(blocks.count(), blocks.size(), threads,
               [&](int64_t begin, int64_t end) { map_blocks(op, blocks, begin, end, parameters); });
}

}  // namespace syncbn::cpu
