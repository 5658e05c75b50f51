// Vectors of the accumulation type, and their loads from and stores to the four storage types.
//
// Every function here is forced inline, so that it is compiled for the target of the cloned
// function (SYNCBN_CLONES) that uses it. Choices between lanes are made with arithmetic masks:
// comparisons of vectors wider than a register are turned into scalar code by GCC.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#define SYNCBN_INLINE_LAMBDA __attribute__((always_inline))
#define SYNCBN_INLINE inline SYNCBN_INLINE_LAMBDA

// Marks a function to be compiled for three levels of x86-64; the loader picks one. It needs GCC
// and the C library's ifunc. Elsewhere (aarch64, clang, musl) there is one version, for the
// baseline.
#ifndef SYNCBN_CLONES
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define SYNCBN_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define SYNCBN_HAS_CLONES
#else
#define SYNCBN_CLONES
#endif
#endif

namespace syncbn::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The accumulation type of storage type T.
template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

// One vector register, where it counts: wider ones are split, and then kept in memory by GCC. 64
// bytes for AVX-512 would gain nothing, as memory is the limit there.
#ifdef __x86_64__
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(Acc<T>);

// How many lanes a load or store covers: all (a constant, the fast case) or an int.
template <class T>
using AllLanes = std::integral_constant<int, kLanes<T>>;

typedef float FloatVec __attribute__((vector_size(kVectorBytes)));
typedef double DoubleVec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t WordVec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));

template <class A>
struct VecOf;
template <>
struct VecOf<float> {
  typedef FloatVec type;
};
template <>
struct VecOf<double> {
  typedef DoubleVec type;
};
template <class T>
using Vec = typename VecOf<Acc<T>>::type;

template <class To, class From>
SYNCBN_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- float <-> 16 bits. U is uint32_t, I int32_t and F float, or the vectors of them. ----

// All ones where a > b, for a and b below 2^31.
template <class I, class U>
SYNCBN_INLINE U greater(U a, U b) {
  return (U)((I)(b - a) >> 31);
}

template <class U>
SYNCBN_INLINE U choose(U mask, U a, U b) {
  return (a & mask) | (b & ~mask);
}

template <class U, class I, class F>
struct Convert {
  static SYNCBN_INLINE U all(uint32_t value) { return U{} + value; }

  static SYNCBN_INLINE F from_bfloat16(U bits) { return bits_as<F>(bits << 16); }

  // Rounds to nearest even. Only the carry of a NaN can run into the sign; inverting all bits then
  // gives a NaN again. Signalling NaNs do not occur: no arithmetic results in one.
  static SYNCBN_INLINE U to_bfloat16(F value) {
    const U bits = bits_as<U>(value);
    const U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const U carried = (U)((I)(bits ^ rounded) >> 31);
    return (rounded ^ carried) >> 16;
  }

  // A float16 with the exponent re-biased by 112. Subnormals have no leading 1 in either format:
  // put one there, and take it off again as a float subtraction, which normalizes the rest.
  static SYNCBN_INLINE F from_float16(U bits) {
    constexpr uint32_t kBias = 112u << 23, kSmallestNormal = 113u << 23;
    const U magnitude = (bits & 0x7fffu) << 13;
    const U special = greater<I, U>(magnitude, all((31u << 23) - 1));
    const U normal = magnitude + kBias + (special & kBias);
    const F tiny = bits_as<F>(magnitude + kSmallestNormal) - bits_as<F>(all(kSmallestNormal));
    const U subnormal = greater<I, U>(all(1u << 23), magnitude);
    return bits_as<F>(choose<U>(subnormal, bits_as<U>(tiny), normal) | ((bits & 0x8000u) << 16));
  }

  // Rounds to nearest even: by integer arithmetic, with the carry running into the exponent and up
  // to infinity; for subnormals by adding 0.5, whose last bit is the smallest float16.
  static SYNCBN_INLINE U to_float16(F value) {
    constexpr uint32_t kBias = 112u << 23, kSmallestNormal = 113u << 23, kHalf = 126u << 23;
    const U bits = bits_as<U>(value);
    const U magnitude = bits & 0x7fffffffu;
    const U normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - kBias) >> 13;
    const U tiny = bits_as<U>(bits_as<F>(magnitude) + bits_as<F>(all(kHalf))) - kHalf;
    const U subnormal = greater<I, U>(all(kSmallestNormal), magnitude);
    const U overflow = greater<I, U>(magnitude, all(0x477fffffu));
    const U nan = greater<I, U>(magnitude, all(0x7f800000u));
    U result = choose<U>(subnormal, tiny, normal);
    result = choose<U>(overflow, all(0x7c00u), result) | (nan & 0x200u);
    return result | ((bits >> 16) & 0x8000u);
  }
};

using ConvertVec = Convert<WordVec, IntVec, FloatVec>;
using ConvertOne = Convert<uint32_t, int32_t, float>;

// ---- Loads and stores of vectors. Lanes beyond `lanes` are loaded as 0 and not stored. ----

template <class Lanes>
SYNCBN_INLINE FloatVec load(const float* from, Lanes lanes) {
  FloatVec vec{};
  std::memcpy(&vec, from, sizeof(float) * lanes);
  return vec;
}

template <class Lanes>
SYNCBN_INLINE DoubleVec load(const double* from, Lanes lanes) {
  DoubleVec vec{};
  std::memcpy(&vec, from, sizeof(double) * lanes);
  return vec;
}

template <class Lanes>
SYNCBN_INLINE WordVec load_halves(const void* from, Lanes lanes) {
  HalfVec halves{};
  std::memcpy(&halves, from, sizeof(uint16_t) * lanes);
  return __builtin_convertvector(halves, WordVec);
}

template <class Lanes>
SYNCBN_INLINE FloatVec load(const Float16* from, Lanes lanes) {
  return ConvertVec::from_float16(load_halves(from, lanes));
}

template <class Lanes>
SYNCBN_INLINE FloatVec load(const BFloat16* from, Lanes lanes) {
  return ConvertVec::from_bfloat16(load_halves(from, lanes));
}

template <class Lanes>
SYNCBN_INLINE void store(float* to, FloatVec vec, Lanes lanes) {
  std::memcpy(to, &vec, sizeof(float) * lanes);
}

template <class Lanes>
SYNCBN_INLINE void store(double* to, DoubleVec vec, Lanes lanes) {
  std::memcpy(to, &vec, sizeof(double) * lanes);
}

template <class Lanes>
SYNCBN_INLINE void store_halves(void* to, WordVec words, Lanes lanes) {
  const HalfVec halves = __builtin_convertvector(words, HalfVec);
  std::memcpy(to, &halves, sizeof(uint16_t) * lanes);
}

template <class Lanes>
SYNCBN_INLINE void store(Float16* to, FloatVec vec, Lanes lanes) {
  store_halves(to, ConvertVec::to_float16(vec), lanes);
}

template <class Lanes>
SYNCBN_INLINE void store(BFloat16* to, FloatVec vec, Lanes lanes) {
  store_halves(to, ConvertVec::to_bfloat16(vec), lanes);
}

SYNCBN_INLINE FloatVec broadcast(float value) { return value - FloatVec{}; }
SYNCBN_INLINE DoubleVec broadcast(double value) { return value - DoubleVec{}; }

// The vector with its first `skipped` lanes set to +0, whatever they held.
template <class V>
SYNCBN_INLINE V without_first(V vec, int skipped) {
  static_assert(kVectorBytes <= 32);
  static constexpr int32_t kMasks[16] = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};
  constexpr int kWordsPerLane = sizeof(vec[0]) / 4;
  WordVec mask;
  std::memcpy(&mask, kMasks + 8 - skipped * kWordsPerLane, sizeof(mask));
  return bits_as<V>(bits_as<WordVec>(vec) & mask);
}

// The sum of the lanes, in double, as a tree.
template <class V>
SYNCBN_INLINE double total(V vec) {
  constexpr int kCount = sizeof(vec) / sizeof(vec[0]);
  double sums[kCount];
  for (int i = 0; i < kCount; ++i) sums[i] = vec[i];
  for (int half = kCount / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace syncbn::cpu
