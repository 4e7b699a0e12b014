#include "checkpoint/sha256_lanes.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <lockstep/error.h>

namespace lockstep::detail {

#if defined(__x86_64__)

namespace {

constexpr size_t kBlock = 64;

constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Words8 = uint32_t __attribute__((vector_size(32)));
using Words16 = uint32_t __attribute__((vector_size(64)));

// The functions below are inlined into the two functions that name their instruction set. They pass vectors by
// reference, because how a vector is passed by value depends on the instruction set.
#define LOCKSTEP_INLINE __attribute__((always_inline)) inline

template <class Words>
LOCKSTEP_INLINE void rotate_right(Words& to, const Words& from, int count) {
  to = (from >> count) | (from << (32 - count));
}

/// One step of a transposition: exchanges elements between two rows at a distance of `kDistance`.
template <int kDistance>
LOCKSTEP_INLINE void exchange(Words8& low, Words8& high) {
  const Words8 a = low, b = high;
  if constexpr (kDistance == 1) {
    low = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
    high = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  } else if constexpr (kDistance == 2) {
    low = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    high = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  } else {
    low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

template <int kDistance>
LOCKSTEP_INLINE void exchange(Words16& low, Words16& high) {
  const Words16 a = low, b = high;
  if constexpr (kDistance == 1) {
    low = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    high = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  } else if constexpr (kDistance == 2) {
    low = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    high = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  } else if constexpr (kDistance == 4) {
    low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  } else {
    low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    high = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
}

template <int kDistance, class Words>
LOCKSTEP_INLINE void exchange_rows(Words* rows) {
  constexpr int kLanes = sizeof(Words) / sizeof(uint32_t);
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row)
    if (!(row & kDistance)) exchange<kDistance>(rows[row], rows[row + kDistance]);
}

/// Loads words first ... first + lanes - 1 of one block of every message, so that words[i] has word first + i of all.
template <class Words>
LOCKSTEP_INLINE void load_words(Words* words, const uint8_t* messages, size_t size) {
  constexpr int kLanes = sizeof(Words) / sizeof(uint32_t);
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) std::memcpy(&words[lane], messages + lane * size, sizeof(Words));
  exchange_rows<1>(words);
  exchange_rows<2>(words);
  exchange_rows<4>(words);
  if constexpr (kLanes == 16) exchange_rows<8>(words);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)  // to big-endian
    words[i] =
        (((words[i] << 8) | (words[i] >> 24)) & 0x00ff00ff) | (((words[i] >> 8) | (words[i] << 24)) & 0xff00ff00);
}

/// FIPS 180-4, section 6.2.2. Overwrites the message's words with later ones of the schedule.
template <class Words>
LOCKSTEP_INLINE void compress(Words* state, Words* words) {
  Words a = state[0], b = state[1], c = state[2], d = state[3];
  Words e = state[4], f = state[5], g = state[6], h = state[7];
  Words x, y, z;
#pragma GCC unroll 1
  for (int first = 0; first < 64; first += 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      rotate_right(x, e, 6);
      rotate_right(y, e, 11);
      rotate_right(z, e, 25);
      const Words next = h + (x ^ y ^ z) + (g ^ (e & (f ^ g))) + words[i] + kRound[first + i];
      rotate_right(x, a, 2);
      rotate_right(y, a, 13);
      rotate_right(z, a, 22);
      const Words sum = (x ^ y ^ z) + ((a & b) | (c & (a | b)));
      h = g, g = f, f = e, e = d + next, d = c, c = b, b = a, a = next + sum;
    }
    if (first == 48) break;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      rotate_right(x, words[(i + 1) % 16], 7);
      rotate_right(y, words[(i + 1) % 16], 18);
      words[i] += (x ^ y ^ (words[(i + 1) % 16] >> 3)) + words[(i + 9) % 16];
      rotate_right(x, words[(i + 14) % 16], 17);
      rotate_right(y, words[(i + 14) % 16], 19);
      words[i] += x ^ y ^ (words[(i + 14) % 16] >> 10);
    }
  }
  state[0] += a, state[1] += b, state[2] += c, state[3] += d;
  state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

template <class Words>
LOCKSTEP_INLINE void hash_lanes(const uint8_t* messages, size_t size, Sha256Bytes* digests) {
  constexpr int kLanes = sizeof(Words) / sizeof(uint32_t);
  Words state[8], words[16];
  for (int i = 0; i < 8; ++i) state[i] = Words{} + kInitial[i];
  for (size_t block = 0; block < size; block += kBlock) {
    for (int first = 0; first < 16; first += kLanes)
      load_words(words + first, messages + block + first * sizeof(uint32_t), size);
    compress(state, words);
  }
  // The padding: a one bit, zeros, and the size in bits.
  for (auto& word : words) word = Words{};
  words[0] += uint32_t{1} << 31;
  words[14] += static_cast<uint32_t>(uint64_t{size} >> 29);
  words[15] += static_cast<uint32_t>(uint64_t{size} << 3);
  compress(state, words);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 8; ++i) {
      const uint32_t big_endian = __builtin_bswap32(state[i][lane]);
      std::memcpy(digests[lane].data() + i * sizeof(uint32_t), &big_endian, sizeof(uint32_t));
    }
}

__attribute__((target("avx2"))) void hash_8(const uint8_t* messages, size_t size, Sha256Bytes* digests) {
  hash_lanes<Words8>(messages, size, digests);
}

__attribute__((target("avx512f"))) void hash_16(const uint8_t* messages, size_t size, Sha256Bytes* digests) {
  hash_lanes<Words16>(messages, size, digests);
}

bool has_sha_instructions() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}

}  // namespace

std::vector<size_t> sha256_lane_counts() {
  std::vector<size_t> counts;
  if (__builtin_cpu_supports("avx2")) counts.push_back(8);
  if (__builtin_cpu_supports("avx512f")) counts.push_back(16);
  return counts;
}

size_t sha256_lanes() {
  static const size_t lanes = [] {
    const auto counts = sha256_lane_counts();
    const size_t most = counts.empty() ? 0 : counts.back();
    return most == 8 && has_sha_instructions() ? 0 : most;
  }();
  return lanes;
}

void sha256_in_lanes(size_t lanes, const uint8_t* messages, size_t size, Sha256Bytes* digests) {
  if (size % kBlock) throw UsageError("SHA-256 in lanes: the message size is not a multiple of 64");
  if (lanes == 16) return hash_16(messages, size, digests);
  if (lanes == 8) return hash_8(messages, size, digests);
  throw UsageError("SHA-256 in lanes: the number of lanes must be 8 or 16");
}

#else

std::vector<size_t> sha256_lane_counts() {
  return {};
}
size_t sha256_lanes() {
  return 0;
}
void sha256_in_lanes(size_t, const uint8_t*, size_t, Sha256Bytes*) {
  throw UsageError("SHA-256 in lanes: this processor has none");
}

#endif

}  // namespace lockstep::detail
