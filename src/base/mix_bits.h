#pragma once

#include <cstdint>

namespace lockstep {

/// One round of splitmix64: neighbouring inputs give unrelated outputs, and different inputs different ones.
inline uint64_t mix_bits(uint64_t number) {
  number += 0x9e3779b97f4a7c15;
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
  return number ^ (number >> 31);
}

}  // namespace lockstep
