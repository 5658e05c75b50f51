// The one view of a tensor that the ops know: (outer, channels, inner), row-major.
#pragma once

#include <cstdint>

namespace syncbn {

// A dense tensor of shape [N, C, ...], whatever the order of its dimensions in memory, is three
// nested loops: `outer` over the dimensions slower than the channel, `channels`, and `inner` over
// the faster ones. Contiguous [N, C, H, W] is (N, C, H * W); channels_last is (N * H * W, C, 1).
struct Layout {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  int64_t count() const { return outer * inner; }  // values per channel
  int64_t size() const { return count() * channels; }
};

constexpr int64_t kLongRow = int64_t{1} << 30;

// Fills `layout` and returns true if the tensor is dense: no gaps, no overlaps, in any order of
// dimensions. Strides are in elements; those of dimensions of size 1 mean nothing. Needs ndim >= 2.
inline bool dense_layout(int ndim, const int64_t* shape, const int64_t* strides, Layout* layout) {
  int64_t size = 1;
  for (int i = 0; i < ndim; ++i) size *= shape[i];
  if (size == 0) {
    *layout = {0, shape[1], 1};
    return true;
  }
  // Walk memory from the fastest dimension: at each step the dimension whose stride is the number
  // of elements passed so far. At most ndim steps of at most ndim looks each.
  int64_t passed = 1;
  int64_t inner = -1;
  int64_t before = 1;  // the slowest dimension
  while (passed < size) {
    int next = -1;
    for (int i = 0; i < ndim && next < 0; ++i) {
      if (shape[i] != 1 && strides[i] == passed) next = i;
    }
    if (next < 0) return false;
    if (next == 1) inner = passed;
    before = passed;
    passed *= shape[next];
  }
  // One channel: all of the tensor is inner, but for what would be too long a row for CUDA.
  if (inner < 0) inner = size <= kLongRow ? size : before;
  *layout = {size / (inner * shape[1]), shape[1], inner};
  return true;
}

// Whether two tensors of the same shape place every element at the same offset.
inline bool same_strides(int ndim, const int64_t* shape, const int64_t* a, const int64_t* b) {
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] == 0) return true;
  }
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] != 1 && a[i] != b[i]) return false;
  }
  return true;
}

}  // namespace syncbn
