#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lockstep::shm {

// The layout of shared memory: plain data and lock-free atomics only. All programs built with one version of lockstep
// have the same layout.

inline constexpr size_t kCacheLinePair = 128;  // two cache lines, since processors prefetch lines in pairs
inline constexpr size_t kPayloadBytes = 16 * 1024;
inline constexpr size_t kChunkBytes = 256 * 1024;
inline constexpr uint64_t kSlots = 3;
inline constexpr int kMaxRanks = 1024;

/// A counter that one rank increases and other ranks wait for.
struct alignas(kCacheLinePair) Flag {
  std::atomic<uint64_t> value{0};
};

/// Published by each rank at the beginning of a call. Small tensors travel in the payload, which begins in the cache
/// line of the call number that the other ranks wait for.
struct alignas(kCacheLinePair) CallHeader {
  static constexpr uint64_t kElsewhere = ~uint64_t{0};

  std::atomic<uint64_t> call{0};  // written last
  uint64_t fingerprint = 0;
  uint64_t offset = kElsewhere;  // of the rank's tensor in its arena; kElsewhere: not in the arena
  std::array<char, kPayloadBytes> payload;
};

/// One message to another rank, in the arena of the sender. The data follow this header.
struct alignas(kCacheLinePair) ShmMessage {
  uint64_t fingerprint = 0;
  uint64_t bytes = 0;
  std::atomic<uint64_t> next{0};       // offset of the next message between the same ranks; 0: none yet
  std::atomic<bool> is_taken{false};   // the receiver has copied the data
  std::atomic<bool> is_passed{false};  // the receiver has read `next`
};

/// Buffers for one chunk of ShmGroup::pipeline.
struct alignas(kCacheLinePair) Slot {
  std::array<char, kChunkBytes> input;
  std::array<char, kChunkBytes> result;
};

/// The shared memory of one rank in one group. Only this rank writes to it, except for `futex` and `left`.
///
/// There are two headers, used by alternate calls. When a rank writes the header of call n, it has seen the headers of
/// call n - 1 of all ranks. So all ranks have finished call n - 2, which used the same header.
///
/// Chunks of data pass through three slots: see ShmGroup::pipeline.
struct RankSegment {
  std::array<char, kCacheLinePair> token;  // random: lets other ranks check that they mapped the right memory
  cpu_set_t cores;                         // on which this rank may run
  alignas(kCacheLinePair) std::atomic<uint32_t> futex{0};  // the threads of this rank sleep on it
  std::atomic<uint32_t> sleepers{0};                       // threads of this rank that sleep on the futex
  Flag filled;                                             // number of chunks that this rank has written to its slots
  Flag worked;                                             // number of chunks that this rank has worked on
  Flag done;     // the last call in which this rank has finished using the memory of other ranks
  Flag gave_up;  // the call that failed on this rank, after which its tensor may change; 0: none
  std::array<CallHeader, 2> headers;
  std::array<std::atomic<uint64_t>, kMaxRanks> first_messages{};  // by receiver: offset of the first; 0: none yet
  std::array<std::atomic<bool>, kMaxRanks> left{};  // by rank, set by that rank when it stops reading this segment
  std::array<Slot, kSlots> slots;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<bool>::is_always_lock_free);

}  // namespace lockstep::shm
