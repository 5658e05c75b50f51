// Values in registers: 16-byte packs, their conversion to the accumulation type, and C-vectors of
// any dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "../ops.h"

namespace syncbn::cuda {

// The accumulation type of a tensor type.
template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Accumulate<T>::type;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// The unsigned integers of a pack's size: a load or store of one is one instruction.
template <int kBytes>
struct Bits;
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<4> {
  using type = unsigned int;
};
template <>
struct Bits<8> {
  using type = unsigned long long;
};
template <>
struct Bits<16> {
  using type = uint4;
};

// How long the L2 cache is to keep what a load brings: an operand of the load.
struct Caching {
  uint64_t policy;
};

// What is read again soon.
__device__ inline Caching keep() {
  Caching caching{};
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(caching.policy));
#endif
  return caching;
}

// What is not read again while the cache could hold it: to leave first.
__device__ inline Caching once() {
  Caching caching{};
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(caching.policy));
#endif
  return caching;
}

// kSize neighbouring values of a tensor.
template <typename T, int kSize>
struct Pack {
  static_assert(kSize == 1 || kSize * sizeof(T) == 16);
  T value[kSize] = {};

  using bits_t = typename Bits<sizeof(T) * kSize>::type;

  // From p, which is aligned to the pack, where it `exists`; otherwise the pack stays as it is.
  __device__ void load(const T* p, Caching caching, bool exists) {
    if constexpr (sizeof(bits_t) == 16) {
      uint4 bits;
      memcpy(&bits, value, sizeof(bits));
#if __CUDA_ARCH__ >= 800
      asm volatile(
          "{\n .reg .pred exists;\n setp.ne.u32 exists, %6, 0;\n"
          " @exists ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n}"
          : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)
          : "l"(p), "l"(caching.policy), "r"(static_cast<uint32_t>(exists)));
#else
      asm volatile(
          "{\n .reg .pred exists;\n setp.ne.u32 exists, %5, 0;\n"
          " @exists ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
          : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)
          : "l"(p), "r"(static_cast<uint32_t>(exists)));
#endif
      memcpy(value, &bits, sizeof(bits));
    } else if (exists) {
      value[0] = *p;
    }
  }

  // What is written must not push what is still to be read out of the L2 cache: let it leave first.
  __device__ void store(T* p) const {
    bits_t bits;
    memcpy(&bits, value, sizeof(bits));
    __stcs(reinterpret_cast<bits_t*>(p), bits);
  }
};

// value <- wide, rounded to nearest even; two at a time where one instruction rounds both.
template <int kSize>
__device__ void narrow(const float (&wide)[kSize], Pack<float, kSize>& pack) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) pack.value[j] = wide[j];
}
template <int kSize>
__device__ void narrow(const double (&wide)[kSize], Pack<double, kSize>& pack) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) pack.value[j] = wide[j];
}
template <int kSize>
__device__ void narrow(const float (&wide)[kSize], Pack<__half, kSize>& pack) {
  if constexpr (kSize == 1) {
    pack.value[0] = __float2half_rn(wide[0]);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; j += 2) {
      const __half2 two = __floats2half2_rn(wide[j], wide[j + 1]);
      memcpy(&pack.value[j], &two, sizeof(two));
    }
  }
}
template <int kSize>
__device__ void narrow(const float (&wide)[kSize], Pack<__nv_bfloat16, kSize>& pack) {
  if constexpr (kSize == 1) {
    pack.value[0] = __float2bfloat16_rn(wide[0]);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; j += 2) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(wide[j], wide[j + 1]);
      memcpy(&pack.value[j], &two, sizeof(two));
    }
  }
}

// Entry c of a C-vector, in double: there are C of them, so the conversion costs nothing.
__device__ inline double get(const Vector& vector, uint32_t c) {
  switch (vector.dtype) {
    case DType::float32:
      return static_cast<const float*>(vector.data)[c];
    case DType::float16:
      return __half2float(static_cast<const __half*>(vector.data)[c]);
    case DType::bfloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(vector.data)[c]);
    default:
      return static_cast<const double*>(vector.data)[c];
  }
}

// Entry c, or `absent` where there is no vector.
__device__ inline double get_or(const Vector& vector, uint32_t c, double absent) {
  return vector.data == nullptr ? absent : get(vector, c);
}

__device__ inline void put(const Vector& vector, uint32_t c, double value) {
  switch (vector.dtype) {
    case DType::float32:
      static_cast<float*>(vector.data)[c] = static_cast<float>(value);
      break;
    case DType::float16:
      static_cast<__half*>(vector.data)[c] = __double2half(value);
      break;
    case DType::bfloat16:
      static_cast<__nv_bfloat16*>(vector.data)[c] = __double2bfloat16(value);
      break;
    default:
      static_cast<double*>(vector.data)[c] = value;
  }
}

}  // namespace syncbn::cuda
