// Temporary arrays: on the stack if small, so that small tensors pay no allocation.
#pragma once

#include <cstddef>
#include <memory>

namespace syncbn::cpu {

template <class T>
class Scratch {
 public:
  explicit Scratch(size_t size) {
    if (size > kInPlace) heap_.reset(new T[size]);
  }
  T* data() { return heap_ ? heap_.get() : in_place_; }

 private:
  static constexpr size_t kInPlace = 8192 / sizeof(T);
  T in_place_[kInPlace];
  std::unique_ptr<T[]> heap_;
};

}  // namespace syncbn::cpu
