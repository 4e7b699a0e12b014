// Compilers vectorise the conversions of float16 and bfloat16 poorly for the instructions that every x86-64 processor
// has. These loops use the instructions of newer processors. On AArch64 every processor converts in hardware, and the
// loops of reduction.cpp are vectorised well.
//
// A function with a target attribute can only be inlined into functions with the same attribute; a function without an
// attribute can be inlined into any function. So the loop has no attribute, and calls the functions of `Lanes`, which
// take vectors by reference: passing vectors by value needs the attribute. sum_with_avx2 and sum_with_avx512 inline the
// loop and these functions.

#include "backends/common/narrow_sums.h"

#include <lockstep/error.h>

#if defined(__x86_64__)

#include <limits>

#include <immintrin.h>

#include "backends/common/narrow_floats.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // wrong warnings about GCC 12's own headers of AVX-512
#endif

#define LOCKSTEP_AVX2 __attribute__((target("avx2,f16c")))
#define LOCKSTEP_AVX512 __attribute__((target("avx512f,avx512bw")))

namespace lockstep {
namespace {

constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();  // becomes kHalfNan

struct HalfElement {
  using Type = Float16;
  static Type narrow_one(float value) { return narrow_to_half(value); }
};

struct BrainElement {
  using Type = BFloat16Bits;
  static Type narrow_one(float value) { return narrow_to_bfloat16(value); }
};

// --- AVX2: 16 elements, as two vectors of float32

struct Avx2 {
  static constexpr int kLanes = 16;
  struct Floats {
    __m256 a, b;
  };
  using Bits = __m256i;

  LOCKSTEP_AVX2 static void add(Floats& to, const Floats& more) {
    to.a = _mm256_add_ps(to.a, more.a);
    to.b = _mm256_add_ps(to.b, more.b);
  }
  LOCKSTEP_AVX2 static void multiply(Floats& values, float factor) {
    values.a = _mm256_mul_ps(values.a, _mm256_set1_ps(factor));
    values.b = _mm256_mul_ps(values.b, _mm256_set1_ps(factor));
  }
  LOCKSTEP_AVX2 static void store(void* to, const Bits& bits) { _mm256_storeu_si256(static_cast<Bits*>(to), bits); }
};

struct HalfAvx2 : Avx2, HalfElement {
  LOCKSTEP_AVX2 static void widen(Floats& to, const void* from) {
    const auto* halves = static_cast<const __m128i*>(from);
    to = {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  LOCKSTEP_AVX2 static void narrow(Bits& to, const Floats& from) {
    to = _mm256_set_m128i(_mm256_cvtps_ph(one_nan(from.b), kToNearest), _mm256_cvtps_ph(one_nan(from.a), kToNearest));
  }
  /// The processor's conversion keeps the sign and the payload of a NaN.
  LOCKSTEP_AVX2 static __m256 one_nan(__m256 values) {
    return _mm256_blendv_ps(values, _mm256_set1_ps(kNan), _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  }
};

/// A bfloat16 is the upper half of a float32. `a` has the elements with even indices, which are lower halves of 32 bits
/// in memory, and `b` the elements with odd indices, which are upper halves.
struct BrainAvx2 : Avx2, BrainElement {
  LOCKSTEP_AVX2 static void widen(Floats& to, const void* from) {
    const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    to = {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)), _mm256_castsi256_ps(_mm256_and_si256(bits, upper))};
  }
  LOCKSTEP_AVX2 static void narrow(Bits& to, const Floats& from) {
    to = _mm256_blend_epi16(_mm256_srli_epi32(rounded(from.a), 16), rounded(from.b), 0b10101010);
  }
  /// Rounds like narrow_to_bfloat16(). The results are in the upper halves.
  LOCKSTEP_AVX2 static __m256i rounded(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i to_nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(to_nearest, _mm256_set1_epi32(kBFloat16Nan << 16), is_nan);
  }
};

// --- AVX-512: the same with 32 elements

struct Avx512 {
  static constexpr int kLanes = 32;
  struct Floats {
    __m512 a, b;
  };
  using Bits = __m512i;

  LOCKSTEP_AVX512 static void add(Floats& to, const Floats& more) {
    to.a = _mm512_add_ps(to.a, more.a);
    to.b = _mm512_add_ps(to.b, more.b);
  }
  LOCKSTEP_AVX512 static void multiply(Floats& values, float factor) {
    values.a = _mm512_mul_ps(values.a, _mm512_set1_ps(factor));
    values.b = _mm512_mul_ps(values.b, _mm512_set1_ps(factor));
  }
  LOCKSTEP_AVX512 static void store(void* to, const Bits& bits) { _mm512_storeu_si512(to, bits); }
};

struct HalfAvx512 : Avx512, HalfElement {
  LOCKSTEP_AVX512 static void widen(Floats& to, const void* from) {
    const auto* halves = static_cast<const __m256i*>(from);
    to = {_mm512_cvtph_ps(_mm256_loadu_si256(halves)), _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
  }
  LOCKSTEP_AVX512 static void narrow(Bits& to, const Floats& from) {
    to = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(from.a)), narrow(from.b), 1);
  }
  LOCKSTEP_AVX512 static __m256i narrow(__m512 values) {
    const __mmask16 is_number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
    return _mm512_mask_cvtps_ph(_mm256_set1_epi16(kHalfNan), is_number, values, kToNearest);
  }
};

struct BrainAvx512 : Avx512, BrainElement {
  LOCKSTEP_AVX512 static void widen(Floats& to, const void* from) {
    const __m512i bits = _mm512_loadu_si512(from);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    to = {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), _mm512_castsi512_ps(_mm512_and_si512(bits, upper))};
  }
  LOCKSTEP_AVX512 static void narrow(Bits& to, const Floats& from) {
    to = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(rounded(from.a), 16), rounded(from.b));
  }
  LOCKSTEP_AVX512 static __m512i rounded(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i to_nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_mask_blend_epi32(is_nan, to_nearest, _mm512_set1_epi32(kBFloat16Nan << 16));
  }
};

// --- the loop

struct Sums {
  std::span<void* const> outputs;
  std::span<const void* const> inputs;
  int64_t count;
  float factor;
};

template <class Lanes>
[[gnu::always_inline]] inline void sum_lanes(const Sums& sums) {
  using Element = typename Lanes::Type;
  constexpr int kVectors = 2;  // at a time, which hides how long an addition takes
  constexpr int kLanes = Lanes::kLanes;
  const auto input = [&](size_t rank, int64_t i) { return static_cast<const Element*>(sums.inputs[rank]) + i; };
  const auto output = [&](size_t rank, int64_t i) { return static_cast<Element*>(sums.outputs[rank]) + i; };
  int64_t i = 0;
  for (; i + kVectors * kLanes <= sums.count; i += kVectors * kLanes) {
    typename Lanes::Floats sum[kVectors], more;
    const Element* from = input(0, i);
    for (int v = 0; v < kVectors; ++v) Lanes::widen(sum[v], from + v * kLanes);
    for (size_t rank = 1; rank < sums.inputs.size(); ++rank) {
      from = input(rank, i);
      for (int v = 0; v < kVectors; ++v) {
        Lanes::widen(more, from + v * kLanes);
        Lanes::add(sum[v], more);
      }
    }
    typename Lanes::Bits result[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      Lanes::multiply(sum[v], sums.factor);
      Lanes::narrow(result[v], sum[v]);
    }
    for (size_t rank = 0; rank < sums.outputs.size(); ++rank) {
      Element* to = output(rank, i);
      for (int v = 0; v < kVectors; ++v) Lanes::store(to + v * kLanes, result[v]);
    }
  }
  for (; i < sums.count; ++i) {
    float sum = widen(*input(0, i));
    for (size_t rank = 1; rank < sums.inputs.size(); ++rank) sum += widen(*input(rank, i));
    const auto result = Lanes::narrow_one(sum * sums.factor);
    for (size_t rank = 0; rank < sums.outputs.size(); ++rank) *output(rank, i) = result;
  }
}

template <class Lanes>
LOCKSTEP_AVX2 __attribute__((flatten)) void sum_with_avx2(const Sums& sums) {
  sum_lanes<Lanes>(sums);
}

template <class Lanes>
LOCKSTEP_AVX512 __attribute__((flatten)) void sum_with_avx512(const Sums& sums) {
  sum_lanes<Lanes>(sums);
}

}  // namespace

std::vector<VectorSet> vector_sets() {
  std::vector<VectorSet> sets;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) sets.push_back(VectorSet::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) sets.push_back(VectorSet::kAvx512);
  return sets;
}

void sum_narrow(VectorSet set, NarrowFloat type, std::span<void* const> outputs, std::span<const void* const> inputs,
                int64_t count, float factor) {
  const Sums sums{outputs, inputs, count, factor};
  const bool is_half = type == NarrowFloat::kHalf;
  if (set == VectorSet::kAvx2) return is_half ? sum_with_avx2<HalfAvx2>(sums) : sum_with_avx2<BrainAvx2>(sums);
  return is_half ? sum_with_avx512<HalfAvx512>(sums) : sum_with_avx512<BrainAvx512>(sums);
}

}  // namespace lockstep

#else

namespace lockstep {

std::vector<VectorSet> vector_sets() {
  return {};
}

void sum_narrow(VectorSet, NarrowFloat, std::span<void* const>, std::span<const void* const>, int64_t, float) {
  throw UsageError("sum_narrow: this processor has neither AVX2 nor AVX-512");
}

}  // namespace lockstep

#endif
