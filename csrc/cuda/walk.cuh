// Which thread handles which values: one map for all four kernels and both memory layouts.
//
// A tensor is (outer, C, inner). The grid is `groups` x `splits` blocks: those of a group share its
// channels' values and take turns, so that at any time all blocks together read one stretch of
// memory, which DRAM is fastest at. A thread walks over packs of 16 bytes: steps first,
// first + stride, first + 2 * stride, ... below `count`. (Where 32 bits can't number the steps,
// they are in several sections, and only the blocks of a section take turns.)
//
//   inner > 1 (NCHW). A channel is `outer` rows of `inner` values. Its packs are numbered through,
//   row after row. `width` threads share a channel; a block has kThreads / width channels.
//
//      thread   0 .. width-1        | width .. 2*width-1  | ...
//      channel  c                   | c + 1               | ...
//      packs    0 .. width-1 in the first block's first turn, the next `width` in the second's, ...
//
//   Where rows do not begin and end at multiples of 16 bytes, packs keep to those multiples all the
//   same, and the first and last pack of a row are partial: values [from, to) of it are the row's.
//   Where the tensors of an op lie differently beside those multiples, a pack is one value.
//
//   inner == 1 (NHWC, [N, C]). A matrix of `outer` rows of C values; a step is a row. `width`
//   threads lie side by side, one pack of channels each; a block's turn is kThreads / width rows. A
//   pack is one value where rows do not consist of whole 16-byte packs.
//
//      channels   c .. c+V-1        | c+V .. c+2V-1       | ...
//      row 0      thread 0          | thread 1            | ... thread width-1
//      row 1      thread width      | thread width+1      | ...
//
// Loads of a step must not stand behind branches: the compiler then lets each wait for the one
// before it, and the memory idles. Hence packs that do not exist, loads with a predicate, and loops
// of which only the last round asks what exists.
#pragma once

#include <type_traits>

#include "plan.cuh"

namespace syncbn::cuda {

// Values [from, to) of the pack at `offset` elements; none where from >= to. Where packs are never
// partial, `to` says only whether there is one.
struct Span {
  int64_t offset;
  int from;
  int to;
};

// A thread's way. `block`: 0 .. plan.blocks() - 1.
template <typename A>
struct Walk {
  using T = typename A::T;
  using pack_t = typename A::pack_t;

  uint32_t group;
  uint32_t split;
  uint32_t column;  // of the thread among the block's packs of channels
  uint32_t first;
  uint32_t stride;
  uint32_t count;

  __device__ Walk(const Plan& plan, uint32_t block) : plan_(plan) {
    split = block / plan.groups;
    group = block - split * plan.groups;
    const uint32_t row = threadIdx.x / plan.width;
    const uint32_t along = threadIdx.x - row * plan.width;
    column = A::kInner ? row : along;
    const uint32_t section = split / plan.sharing;
    const uint32_t turn = split - section * plan.sharing;
    const uint32_t steps = A::kInner ? plan.width : A::kThreads / plan.width;  // of a turn
    first = turn * steps + (A::kInner ? along : row);
    stride = plan.sharing * steps;
    const int64_t begin = static_cast<int64_t>(section) * plan.per_section;
    const int64_t left = plan.steps - begin;
    count = left < plan.per_section ? static_cast<uint32_t>(left) : plan.per_section;
    const uint32_t channel = (group * plan.columns + column) * A::kSlots;
    if (channel >= plan.channels) count = 0;
    if (A::kInner) {
      const int64_t row = begin / plan.packs_per_row.value;
      skip_ = static_cast<uint32_t>(begin - row * plan.packs_per_row.value);
      base_ = row * plan.row_stride + channel * plan.inner;
    } else {
      base_ = begin * plan.row_stride + channel;
    }
  }

  // What a block keeps per channel in shared memory it keeps in the order [slot][column], so that
  // neighbouring threads touch neighbouring words.
  __device__ uint32_t entries() const { return plan_.columns * A::kSlots; }
  __device__ uint32_t entry(int slot) const { return slot * plan_.columns + column; }
  // The channel of an entry; not below plan.channels where there is none.
  __device__ uint32_t channel(uint32_t entry) const {
    const uint32_t slot = A::kSlots == 1 ? 0 : entry / plan_.columns;
    return (group * plan_.columns + entry - slot * plan_.columns) * A::kSlots + slot;
  }

  __device__ Span at(uint32_t step) const { return span(step, step < count); }

  // The same steps from the last to the first.
  __device__ Span at_from_end(uint32_t step) const { return span(count - 1 - step, step < count); }

  // All of the thread's rounds of kSteps steps, of which `load` has loaded the first: use(step,
  // whether all steps from there exist), then load(the next round's step). In the last round some
  // or all steps are missing.
  template <int kSteps, typename Load, typename Use>
  __device__ void rounds(Load load, Use use) const {
    uint32_t step = first;
    while (step + (kSteps - 1) * stride < count) {
      use(step, std::true_type{});
      step += kSteps * stride;
      load(step);
    }
    use(step, std::false_type{});
  }

  // Whether value j of a pack is the row's; all are where the pack exists and is never partial.
  template <bool kExists>
  __device__ static bool has(const Span& span, int j) {
    if (A::kMasked) return span.from <= j && j < span.to;
    return kExists || span.to != 0;
  }

  __device__ static bool is_empty(const Span& span) { return span.from >= span.to; }

  // Values of the span per slot.
  __device__ static int size(const Span& span) {
    if (is_empty(span)) return 0;
    return A::kMasked ? span.to - span.from : A::kPack / A::kSlots;
  }

  // What is outside the span is not to be used. A partial pack is loaded whole, with values of the
  // neighbouring row, unless it would reach beyond the tensor: then `complete` loads it.
  __device__ void load(const T* tensor, const Span& span, pack_t& pack, Caching caching) const {
    pack.load(tensor + span.offset, caching, !is_empty(span) && is_inside(span));
  }

  __device__ void complete(const T* tensor, const Span& span, pack_t& pack) const {
    if constexpr (A::kMasked) {
      if (is_inside(span)) return;
#pragma unroll
      for (int j = 0; j < A::kPack; ++j) {
        if (has<true>(span, j)) pack.value[j] = tensor[span.offset + j];
      }
    }
  }

  template <bool kExists>
  __device__ void store(T* tensor, const Span& span, const pack_t& pack) const {
    T* p = tensor + span.offset;
    if (!A::kMasked) {
      if (has<kExists>(span, 0)) pack.store(p);
      return;
    }
    if (span.from == 0 && span.to == A::kPack) {
      pack.store(p);
      return;
    }
#pragma unroll
    for (int j = 0; j < A::kPack; ++j) {
      if (has<true>(span, j)) p[j] = pack.value[j];
    }
  }

 private:
  __device__ bool is_inside(const Span& span) const {
    return !A::kMasked || (span.offset >= 0 && span.offset + A::kPack <= plan_.size);
  }

  __device__ Span span(uint32_t step, bool exists) const {
    if (!A::kInner) {
      return {base_ + static_cast<int64_t>(step) * plan_.channels, 0, exists ? A::kPack : 0};
    }
    const uint32_t row = plan_.packs_per_row.quotient(skip_ + step);
    const uint32_t pack = skip_ + step - row * plan_.packs_per_row.value;
    const int64_t begin = base_ + row * plan_.row_stride;
    const int64_t in_row = static_cast<int64_t>(pack) * A::kPack;
    if (!A::kMasked) return {begin + in_row, 0, exists ? A::kPack : 0};
    const int before = static_cast<int>((begin + plan_.misalignment) % A::kPack);
    const int64_t left = plan_.inner - in_row + before;
    const int to = left < A::kPack ? static_cast<int>(left) : A::kPack;
    return {begin + in_row - before, pack == 0 ? before : 0, exists ? to : 0};
  }

  const Plan& plan_;
  int64_t base_;   // of the section's first row, at the thread's channel
  uint32_t skip_;  // packs of that row that belong to the section before
};

}  // namespace syncbn::cuda
