#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lockstep::shm {

// What lies in shared memory: only plain data and lock-free atomics, equal in all programs of one version of lockstep.

inline constexpr size_t kCacheLinePair = 128;  // two cache lines: processors fetch them in pairs
inline constexpr size_t kPayloadBytes = 16 * 1024;
inline constexpr size_t kChunkBytes = 256 * 1024;
inline constexpr uint64_t kSlots = 3;
inline constexpr int kMostRanks = 1024;

/// A number that one rank counts up and the others wait for.
struct alignas(kCacheLinePair) Flag {
  std::atomic<uint64_t> value{0};
};

/// What a rank shows the others at the beginning of a call. Small data travels right here, beginning in the line of the
/// number that the others wait for.
struct alignas(kCacheLinePair) CallHeader {
  static constexpr uint64_t kElsewhere = ~uint64_t{0};

  std::atomic<uint64_t> call{0};  // written last
  uint64_t fingerprint = 0;
  uint64_t offset = kElsewhere;  // of the rank's tensor in its arena
  std::array<char, kPayloadBytes> payload;
};

/// One message to another rank, in the arena of the sender; its data follow.
struct alignas(kCacheLinePair) ShmMessage {
  uint64_t fingerprint = 0;
  uint64_t bytes = 0;
  std::atomic<uint64_t> next{0};       // offset of the next message from this rank to that; 0: none yet
  std::atomic<bool> is_taken{false};   // the data are copied
  std::atomic<bool> is_passed{false};  // the receiver has gone on to the next message
};

/// Data on the way through shared memory, in the pieces of a pipeline.
struct alignas(kCacheLinePair) Slot {
  std::array<char, kChunkBytes> input;
  std::array<char, kChunkBytes> result;
};

/// The memory of one rank in one group: it alone writes there, but for the futex and what others say when they leave.
///
/// Headers alternate between two places. When a rank writes a header, it has seen everyone's header of the call before,
/// and so everyone is through with the call before that, whose header lies in the same offset.
///
/// Chunks of data go through three slots: see ShmGroup::pipeline.
struct RankSegment {
  std::array<char, kCacheLinePair> token;                  // whoever maps the right memory reads the right token
  cpu_set_t cores;                                         // that this rank may run on
  alignas(kCacheLinePair) std::atomic<uint32_t> futex{0};  // a futex of this rank's threads
  std::atomic<uint32_t> sleepers{0};                       // threads of this rank that wait for the futex
  Flag filled;                                             // chunks that lie ready in slots
  Flag worked;                                             // chunks of all ranks that this one has worked on
  Flag done;                                               // the last call in which it is done with the others' memory
  Flag gave_up;  // the call that failed here, after which its tensor may change; 0: none
  std::array<CallHeader, 2> headers;
  std::array<std::atomic<uint64_t>, kMostRanks> first_messages{};  // to each rank; 0: none yet
  std::array<std::atomic<bool>, kMostRanks> left{};  // by rank, which says so itself: it reads here no more
  std::array<Slot, kSlots> slots;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<bool>::is_always_lock_free);

}  // namespace lockstep::shm
