// 16-bit floats converted by the CPU's own instructions, up to several times faster than by what
// the compiler makes of vec.h.
//
// They are storage types of their own, chosen at run time. Their conversions are not forced inline,
// because not every clone (SYNCBN_CLONES) that they are compiled into has the instructions; the
// clones that will run do, and inline them. Vectors travel by reference, since how they are passed
// by value depends on the target too.
#pragma once

#include "vec.h"

#ifdef SYNCBN_HAS_CLONES
#define SYNCBN_NATIVE_HALVES

#include <immintrin.h>

#define SYNCBN_NATIVE inline __attribute__((target("avx2,f16c")))

namespace syncbn::cpu {

struct NativeFloat16 : Float16 {};
struct NativeBFloat16 : BFloat16 {};

// Whether the clones for x86-64-v3 or better run.
inline bool has_native_halves() { return __builtin_cpu_supports("x86-64-v3"); }

SYNCBN_NATIVE void float16_to_float(const HalfVec& halves, FloatVec& floats) {
  floats = _mm256_cvtph_ps(bits_as<__m128i>(halves));
}

SYNCBN_NATIVE void float_to_float16(const FloatVec& floats, HalfVec& halves) {
  halves = bits_as<HalfVec>(_mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
}

SYNCBN_NATIVE void widen(const HalfVec& halves, WordVec& words) {
  words = bits_as<WordVec>(_mm256_cvtepu16_epi32(bits_as<__m128i>(halves)));
}

template <class Lanes>
SYNCBN_INLINE FloatVec load(const NativeFloat16* from, Lanes lanes) {
  HalfVec halves{};
  std::memcpy(&halves, from, sizeof(uint16_t) * lanes);
  FloatVec floats;
  float16_to_float(halves, floats);
  return floats;
}

template <class Lanes>
SYNCBN_INLINE void store(NativeFloat16* to, FloatVec vec, Lanes lanes) {
  HalfVec halves;
  float_to_float16(vec, halves);
  std::memcpy(static_cast<void*>(to), &halves, sizeof(uint16_t) * lanes);
}

template <class Lanes>
SYNCBN_INLINE FloatVec load(const NativeBFloat16* from, Lanes lanes) {
  HalfVec halves{};
  std::memcpy(&halves, from, sizeof(uint16_t) * lanes);
  WordVec words;
  widen(halves, words);
  return ConvertVec::from_bfloat16(words);
}

}  // namespace syncbn::cpu

#endif
