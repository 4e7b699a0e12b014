#pragma once

#include <bit>
#include <cstdint>

namespace lockstep {

/// The result of narrowing any NaN: positive, quiet, without a payload.
constexpr uint16_t kHalfNan = 0x7e00, kBFloat16Nan = 0x7fc0;

/// The bits of a float16 or a bfloat16. The conversions have no branches, so that compilers vectorise loops over them.
/// The results have the same bits as those of c10::Half and c10::BFloat16, except those of NaNs.
struct BFloat16Bits {
  uint16_t bits;
};
#if defined(__aarch64__)
using Float16 = __fp16;  // every AArch64 processor converts it in hardware
#else
struct Float16 {
  uint16_t bits;
};
#endif

inline float widen(BFloat16Bits value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

inline BFloat16Bits narrow_to_bfloat16(float value) {
  auto bits = std::bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
  uint32_t is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(is_nan ? kBFloat16Nan : rounded)};
}

#if defined(__aarch64__)

inline float widen(Float16 value) {
  return static_cast<float>(value);
}

inline Float16 narrow_to_half(float value) {
  const auto bits = std::bit_cast<uint16_t>(static_cast<Float16>(value));  // keeps the sign and payload of a NaN
  return std::bit_cast<Float16>(value != value ? kHalfNan : bits);
}

#else

/// Returns `a` if the condition holds, else `b`, without a branch.
inline int32_t choose(bool condition, int32_t a, int32_t b) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (a & mask) | (b & ~mask);
}

inline float widen(Float16 value) {
  const int32_t magnitude = (value.bits & 0x7fff) << 13;  // as the bits of a float 2^112 times smaller
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;  // exact, also for subnormal numbers
  const int32_t special = magnitude | 0x7f800000;                   // infinity or NaN
  const int32_t bits = choose(magnitude >= 0x0f800000, special, std::bit_cast<int32_t>(scaled));
  return std::bit_cast<float>(static_cast<uint32_t>(bits) | sign);
}

inline Float16 narrow_to_half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits & 0x80000000;
  const auto magnitude = static_cast<int32_t>(bits ^ sign);  // signed: compares fastest in vectors
  const int32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;  // to nearest, ties to even
  // Adding 0.5 shifts the bits of a subnormal result to the low end of the sum, already rounded by the processor.
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const int32_t finite = choose(magnitude < 0x38800000, subnormal, normal);
  const int32_t number = choose(magnitude >= 0x47800000, 0x7c00, finite);  // 65536 and above become infinity
  const auto with_sign = static_cast<int32_t>(static_cast<uint32_t>(number) | sign >> 16);
  return {static_cast<uint16_t>(choose(magnitude > 0x7f800000, kHalfNan, with_sign))};
}

#endif

}  // namespace lockstep
