// From a dtype known at run time to a storage type.
#pragma once

#include "../ops.h"
#include "native_x86.h"
#include "vec.h"

namespace syncbn::cpu {

// Calls body with a value of the storage type for `dtype`.
template <class Body>
void with_type(DType dtype, const Body& body) {
#ifdef SYNCBN_NATIVE_HALVES
  if (has_native_halves()) {
    if (dtype == DType::float16) return body(NativeFloat16{});
    if (dtype == DType::bfloat16) return body(NativeBFloat16{});
  }
#endif
  switch (dtype) {
    case DType::float32:
      return body(float{});
    case DType::float16:
      return body(Float16{});
    case DType::bfloat16:
      return body(BFloat16{});
    case DType::float64:
      return body(double{});
  }
}

}  // namespace syncbn::cpu
