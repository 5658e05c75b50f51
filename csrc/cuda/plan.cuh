// How an op's work is cut into blocks: decided on the host, from shape and device alone. walk.cuh
// draws the map from threads to values that a plan stands for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../ops.h"
#include "pack.cuh"

namespace syncbn::cuda {

constexpr uint32_t kWarp = 32;

// The packs that rows consist of: whole ones of 16 bytes; such, of which the first and the last of
// a row can be partial; or single values.
enum class Packs { whole, partial, single };

// How a kernel reads a tensor, as template arguments: value type, layout, packs.
template <typename T_, bool kInner_, Packs kPacks>
struct Access {
  using T = T_;
  using acc = acc_t<T>;
  static constexpr bool kInner = kInner_;
  static constexpr bool kMasked = kPacks == Packs::partial;
  static constexpr int kPack = kPacks == Packs::single ? 1 : 16 / sizeof(T);
  using pack_t = Pack<T, kPack>;
  // Channels per pack: value j of a pack belongs to the thread's channel slot(j).
  static constexpr int kSlots = kInner_ ? 1 : kPack;
  __device__ static constexpr int slot(int j) { return kInner_ ? 0 : j; }

  static constexpr uint32_t kThreads = kInner_ ? 256 : 512;  // of a block
  // Threads at work in a multiprocessor: half as many where eight channels each need registers.
  static constexpr uint32_t kResident = kSlots > 4 ? 512 : 1024;
  static constexpr uint32_t kBlocksPerSM = kResident / kThreads;
  // Steps that a thread takes at once, its loads under way together, with one tensor and with two:
  // in packs of 16 bytes, 64 KB on their way to each multiprocessor.
  static constexpr int kSteps = (kPack == 1 ? 8 : 4) * 1024 / kResident;
  static constexpr int kStepsOfTwo = (kPack == 1 ? 8 : 2) * 1024 / kResident;
  // Threads side by side in a matrix, at most: 256 bytes of a row.
  static constexpr uint32_t kWidth = kPack == 1 ? kWarp : 16;
  // Channels that a block can own.
  static constexpr uint32_t kChannels = kInner_ ? kThreads / kWarp : kWidth * kSlots;
};

// Division by a number that is known before the launch, for dividends below 2^31.
struct Divisor {
  uint32_t value = 1;
  uint32_t magic = 0;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / divisor + 1);
  }
  __device__ uint32_t quotient(uint32_t n) const { return __umulhi(2 * n, magic) >> shift; }
};

constexpr int64_t kMostSteps = int64_t{1} << 30;  // of a section, so that 32 bits number them

struct Plan {
  int64_t inner;
  int64_t row_stride;    // elements from a row to the next of the same channels: C * inner
  int64_t size;          // elements
  int64_t steps;         // per channel
  uint32_t per_section;  // steps per section
  uint32_t once;         // steps of a section to load so that they leave the L2 cache first
  uint32_t channels;
  uint32_t groups;
  uint32_t splits;
  uint32_t sharing;       // splits that take turns in a section
  uint32_t width;         // threads side by side
  uint32_t columns;       // packs of channels that a block owns
  Divisor packs_per_row;  // inner > 1
  uint32_t misalignment;  // elements from a multiple of 16 bytes to the tensors' beginning

  uint32_t blocks() const { return groups * splits; }
};

// What an op asks of its plan. Times are in steps of a thread: with all blocks at work, one step
// of each moves 2 MB, in about half a microsecond.
struct Shape {
  const char* op;
  uint32_t slots;       // blocks that the device runs at once
  int64_t overhead;     // time that a block takes besides its steps
  int64_t uneven;       // half blocks by which the last one ends late
  int64_t most_pairs;   // groups * splits * channels per group at most; 0: nothing to combine
  int64_t most_groups;  // of several blocks each, where there is something to combine
};

// The plan for a given width that should take the least time: with as many splits per channel as
// fill the device once, twice, four or eight times. More are balanced better, fewer cost less.
// Returns that time.
template <typename A>
int64_t split(const Shape& shape, uint32_t width, Plan* plan) {
  const auto ceil = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t rows = A::kThreads / width;  // of threads
  const int64_t stride = A::kInner ? width : rows;
  plan->width = width;
  plan->columns = static_cast<uint32_t>(A::kInner ? rows : width);
  const int64_t entries = int64_t{plan->columns} * A::kSlots;
  const int64_t groups = ceil(plan->channels, entries);
  plan->groups = static_cast<uint32_t>(groups);
  int64_t most = ceil(plan->steps, stride);
  if (shape.most_pairs > 0) {
    most = groups > shape.most_groups ? 1 : std::min(most, shape.most_pairs / (groups * entries));
  }
  int64_t least = INT64_MAX;
  int64_t splits = 1;
  for (int64_t fill = 1; fill <= 8; fill *= 2) {
    const int64_t some = std::max<int64_t>(1, std::min(most, fill * shape.slots / groups));
    const int64_t turns2 = 2 * ceil(groups * some, shape.slots) + shape.uneven;
    int64_t time2 = turns2 * (ceil(plan->steps, stride * some) + shape.overhead);
    if (some > 1 && shape.most_pairs > 0) time2 += 6;  // to combine
    if (time2 < least) {
      least = time2;
      splits = some;
    }
    if (some == most) break;
  }
  const int64_t sections = ceil(plan->steps, kMostSteps);
  plan->per_section = static_cast<uint32_t>(ceil(plan->steps, sections));
  plan->sharing = static_cast<uint32_t>(std::max<int64_t>(1, splits / sections));
  plan->splits = static_cast<uint32_t>(plan->sharing * sections);
  return least;
}

template <typename A>
Plan make_plan(const Layout& layout, uint32_t misalignment, const Shape& shape) {
  Plan plan{};
  plan.size = layout.size();
  plan.inner = layout.inner;
  plan.row_stride = layout.channels * layout.inner;
  plan.channels = static_cast<uint32_t>(layout.channels);
  plan.misalignment = misalignment;
  if (plan.size == 0) return plan;
  if (A::kInner) {
    // A row that begins anywhere can touch one pack more.
    const int64_t values = layout.inner + (A::kMasked ? A::kPack - 1 : 0);
    const int64_t packs = (values + A::kPack - 1) / A::kPack;
    if (packs > kMostSteps) {
      throw std::runtime_error(std::string(shape.op) + ": expected at most " +
                               std::to_string(kMostSteps * A::kPack) +
                               " values in a row of x, got " + std::to_string(layout.inner));
    }
    plan.packs_per_row = Divisor(static_cast<uint32_t>(packs));
    plan.steps = layout.outer * packs;
    // All threads on one channel, or fewer, if the blocks then run in fewer turns.
    int64_t time = split<A>(shape, A::kThreads, &plan);
    for (uint32_t width = A::kThreads / 2; width >= kWarp && plan.groups > shape.slots;
         width /= 2) {
      Plan other = plan;
      const int64_t other_time = split<A>(shape, width, &other);
      if (other_time >= time) break;
      time = other_time;
      plan = other;
    }
  } else {
    plan.steps = layout.outer;
    uint32_t width = 1;
    while (width < A::kWidth && width * A::kPack < plan.channels) width *= 2;
    split<A>(shape, width, &plan);
  }
  return plan;
}

}  // namespace syncbn::cuda
