// How a tensor is cut into blocks, the units of work that threads share.
//
// A block is a table: `rows` rows of `cols` adjacent values, `stride` apart. It comes in two kinds.
//
// By plane (inner >= kNarrow): a block belongs to one channel. Its rows are the planes [inner] of
// several outer indices, or pieces of them.
//
//     channel:     0       1       2       0       1       2
//     memory:  | inner | inner | inner | inner | inner | inner |
//     block:   [ row 0 ]               [ row 1 ]                    (C - 1) * inner between them
//
// By column (inner < kNarrow): a row holds all channels, `inner` adjacent columns for each; a block
// is a range of channels and a range of rows. If a row is too short to fill vectors, `repeat` rows
// count as one, which then holds every channel `repeat` times; those left over are a last block
// of one row. The column view never sees a plane shorter than a vector as a loop of its own.
//
//     C = 3, inner = 1:   | 0 1 2 0 1 2 0 1 2 ... 0 1 2 |  one row of 16 * 3 columns
//
// The cut depends on the shape alone, never on the number of threads: so do the sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../layout.h"
#include "parallel.h"

namespace syncbn::cpu {

constexpr int64_t kNarrow = 16;       // at least the values in a vector
constexpr int64_t kMaxColumns = 512;  // of a block by column: what it keeps per column fits in L1

struct Block {
  int64_t offset;  // of its first value, in elements
  int64_t rows;
  int64_t cols;
  int64_t stride;
  int64_t channel;   // the first of its channels
  int64_t channels;  // how many: 1 by plane
  int64_t part;
};

class Blocks {
 public:
  explicit Blocks(const Layout& layout) : layout_(layout), by_plane_(layout.inner >= kNarrow) {
    if (layout.size() == 0) return;
    const int64_t channels = layout.channels, inner = layout.inner;
    if (by_plane_) {
      const int64_t parts =
          std::min(ceil_div(layout.count(), kGrain), ceil_div(kEnoughBlocks, channels));
      row_parts_ = std::min(parts, layout.outer);
      col_parts_ = ceil_div(parts, row_parts_);
      return;
    }
    if (channels * inner < 2 * kNarrow) repeat_ = kNarrow;
    rows_ = layout.outer / repeat_;
    left_over_ = layout.outer % repeat_;
    col_parts_ = ceil_div(channels, kMaxColumns / (inner * repeat_));
    row_parts_ = std::min({ceil_div(layout.size(), kGrain * col_parts_),
                           ceil_div(rows_, kEnoughRows), ceil_div(kEnoughBlocks, col_parts_)});
  }

  bool by_plane() const { return by_plane_; }
  int64_t channels() const { return layout_.channels; }
  int64_t inner() const { return layout_.inner; }
  int64_t size() const { return layout_.size(); }

  // Every channel is covered by the same parts: those that a reduction puts together in the end.
  int64_t parts() const {
    return by_plane_ ? row_parts_ * col_parts_ : row_parts_ + (left_over_ > 0);
  }

  // Values per channel in a part.
  int64_t part_count(int64_t part) const {
    if (by_plane_) {
      const Range rows = range(layout_.outer, row_parts_, part / col_parts_);
      return rows.size * range(layout_.inner, col_parts_, part % col_parts_).size;
    }
    if (part == row_parts_) return left_over_ * layout_.inner;
    return range(rows_, row_parts_, part).size * repeat_ * layout_.inner;
  }

  int64_t count() const {
    if (by_plane_) return layout_.channels * parts();
    return row_parts_ * col_parts_ + (left_over_ > 0);
  }

  Block operator[](int64_t i) const {
    const int64_t channels = layout_.channels, inner = layout_.inner;
    if (by_plane_) {
      const int64_t channel = i / parts(), part = i % parts();
      const Range rows = range(layout_.outer, row_parts_, part / col_parts_);
      const Range cols = range(inner, col_parts_, part % col_parts_);
      return {(rows.begin * channels + channel) * inner + cols.begin,
              rows.size,
              cols.size,
              channels * inner,
              channel,
              1,
              part};
    }
    const int64_t stride = repeat_ * channels * inner;
    if (i == row_parts_ * col_parts_) {
      return {rows_ * stride, 1, left_over_ * channels * inner, stride, 0, channels, row_parts_};
    }
    const int64_t part = i / col_parts_;
    const Range rows = range(rows_, row_parts_, part);
    const Range own = range(channels, col_parts_, i % col_parts_);
    return {rows.begin * stride + own.begin * inner,
            rows.size,
            repeat_ * own.size * inner,
            stride,
            own.begin,
            own.size,
            part};
  }

 private:
  static constexpr int64_t kEnoughBlocks = 256;  // for any number of threads
  static constexpr int64_t kEnoughRows = 256;    // to be worth a set of partial results

  struct Range {
    int64_t begin;
    int64_t size;
  };
  static Range range(int64_t size, int64_t parts, int64_t i) {
    const int64_t begin = split(size, parts, i);
    return {begin, split(size, parts, i + 1) - begin};
  }

  Layout layout_;
  bool by_plane_;
  int64_t row_parts_ = 0;  // parts of outer (by plane) or of the rows
  int64_t col_parts_ = 0;  // parts of inner (by plane) or of the channels
  // By column only.
  int64_t repeat_ = 1;
  int64_t rows_ = 0;
  int64_t left_over_ = 0;
};

}  // namespace syncbn::cpu
