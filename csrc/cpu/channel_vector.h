// Element access to C-vectors (weight, bias, running statistics), whose dtype is known at run time.
#pragma once

#include "../ops.h"
#include "vec.h"

namespace syncbn::cpu {

// `vector`[c] of [C], or `absent` where there is none.
SYNCBN_INLINE double read(const Vector& vector, int64_t c, double absent) {
  if (vector.data == nullptr) return absent;
  switch (vector.dtype) {
    case DType::float32:
      return static_cast<const float*>(vector.data)[c];
    case DType::float16:
      return ConvertOne::from_float16(static_cast<const Float16*>(vector.data)[c].bits);
    case DType::bfloat16:
      return ConvertOne::from_bfloat16(static_cast<const BFloat16*>(vector.data)[c].bits);
    case DType::float64:
      return static_cast<const double*>(vector.data)[c];
  }
  return absent;
}

// Sets `vector`[c] of [C]; does nothing where there is none.
SYNCBN_INLINE void write(const Vector& vector, int64_t c, double value) {
  if (vector.data == nullptr) return;
  const float single = static_cast<float>(value);
  switch (vector.dtype) {
    case DType::float32:
      static_cast<float*>(vector.data)[c] = single;
      break;
    case DType::float16:
      static_cast<Float16*>(vector.data)[c].bits =
          static_cast<uint16_t>(ConvertOne::to_float16(single));
      break;
    case DType::bfloat16:
      static_cast<BFloat16*>(vector.data)[c].bits =
          static_cast<uint16_t>(ConvertOne::to_bfloat16(single));
      break;
    case DType::float64:
      static_cast<double*>(vector.data)[c] = value;
      break;
  }
}

}  // namespace syncbn::cpu
