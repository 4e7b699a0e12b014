#pragma once

#include <bit>
#include <cstdint>

namespace lockstep {

/// The bits of a float16 or a bfloat16. Conversions are written without branches, so that loops over them become vector
/// instructions on every processor; they give the bits that c10::Half and c10::BFloat16 give (for a NaN: some NaN).
struct BrainFloat16 {
  uint16_t bits;
};
#if defined(__aarch64__)
using Float16 = __fp16;  // every processor of this kind converts it
#else
struct Float16 {
  uint16_t bits;
};
#endif

inline float widen(BrainFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

inline BrainFloat16 narrow_to_brain(float value) {
  auto bits = std::bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
  uint32_t is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded)};
}

#if defined(__aarch64__)

inline float widen(Float16 value) {
  return static_cast<float>(value);
}

inline Float16 narrow_to_half(float value) {
  return static_cast<Float16>(value);
}

#else

/// `a` where the condition holds, else `b`: a choice that compilers do not make a jump of.
inline int32_t choose(bool condition, int32_t a, int32_t b) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (a & mask) | (b & ~mask);
}

inline float widen(Float16 value) {
  const int32_t magnitude = (value.bits & 0x7fff) << 13;  // as the bits of a float 2^112 times smaller
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;  // exact, and right for subnormal numbers too
  const int32_t special = magnitude | 0x7f800000;                   // infinity or NaN
  const int32_t bits = choose(magnitude >= 0x0f800000, special, std::bit_cast<int32_t>(scaled));
  return std::bit_cast<float>(static_cast<uint32_t>(bits) | sign);
}

inline Float16 narrow_to_half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits & 0x80000000;
  const auto magnitude = static_cast<int32_t>(bits ^ sign);  // signed: processors compare such vectors best
  const int32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;  // to nearest, ties to even
  // Adding a half moves the bits of a subnormal result to the end of the sum, where the processor has rounded it.
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const int32_t finite = choose(magnitude < 0x38800000, subnormal, normal);
  const int32_t special = choose(magnitude > 0x7f800000, 0x7e00, 0x7c00);
  const int32_t result = choose(magnitude >= 0x47800000, special, finite);  // 65536 and more are infinity
  return {static_cast<uint16_t>(static_cast<uint32_t>(result) | sign >> 16)};
}

#endif

}  // namespace lockstep
