#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// SHA-256 of many messages of one length at once, each in one lane of the processor's vectors. OpenSSL hashes one
// message after the other. Compared with OpenSSL, 16 lanes (AVX-512) are about six times as fast on a processor without
// SHA-256 instructions, and twice as fast on a processor with them. 8 lanes (AVX2) are three times as fast without
// SHA-256 instructions, and slower with them.

namespace lockstep::detail {

using Sha256Bytes = std::array<uint8_t, 32>;

/// Returns the lane counts that this processor supports: some of 8 and 16.
std::vector<size_t> sha256_lane_counts();

/// The best lane count for this processor, or 0 if one message after the other is faster.
size_t sha256_lanes();

/// Computes the digests of `lanes` messages that follow each other in memory. `size` is the size of one message, a
/// multiple of 64.
void sha256_in_lanes(size_t lanes, const uint8_t* messages, size_t size, Sha256Bytes* digests);

}  // namespace lockstep::detail
