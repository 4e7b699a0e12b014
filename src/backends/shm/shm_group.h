#pragma once

#include <memory>
#include <vector>

#include <lockstep/backend.h>

#include "backends/shm/arena.h"
#include "backends/shm/rank_segment.h"
#include "backends/shm/wait.h"

namespace lockstep::shm {

/// One rank's view of a group: the mapped segments of all ranks.
///
/// One thread at a time may make calls and run pipelines. The other methods are thread-safe.
class ShmGroup {
 public:
  struct Member {
    std::shared_ptr<SharedMemory> memory;
    RankSegment* segment = nullptr;
  };

  /// `arena` belongs to this rank and contains its segment.
  ShmGroup(int rank, std::vector<Member> members, std::shared_ptr<Arena> arena);
  /// Leaves the group. This rank's segment is freed when all other ranks have left or their processes have ended.
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  RankSegment& segment(int rank) const { return *members_[rank].segment; }
  const std::shared_ptr<SharedMemory>& memory(int rank) const { return members_[rank].memory; }
  /// Returns the address of an offset in the arena of a rank.
  char* at(int rank, uint64_t offset) const { return members_[rank].memory->begin() + offset; }
  Waiter& waiter() { return waiter_; }

  /// Begins a call: publishes this rank's header and blocks until all ranks have published theirs. `payload` may have
  /// up to kPayloadBytes. Throws MismatchError when a rank has a different fingerprint.
  void begin_call(const CallInfo& call, uint64_t offset = CallHeader::kElsewhere, const void* payload = nullptr,
                  size_t payload_bytes = 0);
  /// The header of a rank in the current call.
  CallHeader& header(int rank) const { return segment(rank).headers[call_ % 2]; }
  /// Ends a call: blocks until no rank uses the memory of another rank in this call any more.
  void end_call(Deadline deadline);

  /// Between begin_call and end_call other ranks may read this rank's tensor in shared memory, and in some calls write
  /// to it. When a call fails, the rank calls give_up_call before its caller can change the tensor. Each rank calls
  /// check_no_rank_gave_up before it writes to other tensors and after it has read from them. The check throws
  /// PeerError when a rank gave up.
  void give_up_call() noexcept;
  void check_no_rank_gave_up() const;

  /// Call it after give_up_call. Blocks until the other ranks have stopped writing to this rank's tensor or have ended.
  /// Returns false when that takes longer than the limit. The limit does not apply to ranks that are threads of this
  /// process.
  bool await_release(std::chrono::milliseconds limit) const;

  /// Moves data through the slots in chunks, so that filling the next chunk overlaps with the work of other ranks.
  /// `chunks` must be at least 1. For each chunk k, in order:
  ///   fill(k, slot)    writes the input of this rank's slot;
  ///   work(k, slot)    runs after all ranks have filled k; may read all inputs and write this rank's result;
  ///   finish(k, slot)  runs after all ranks have worked on k; may read all results.
  ///
  /// Three slots are enough. fill(k + 1) reuses the inputs of chunk k - 2; it runs after finish(k - 2), when all ranks
  /// have worked on k - 2. work(k) overwrites the result of chunk k - 3; it runs after all ranks have filled k, and
  /// each rank filled k after its finish(k - 3).
  template <class Fill, class Work, class Finish>
  void pipeline(uint64_t chunks, Deadline deadline, const Fill& fill, const Work& work, const Finish& finish) {
    const uint64_t base = chunks_;
    chunks_ += chunks;
    auto slot = [&](uint64_t k) { return (base + k) % kSlots; };
    auto prepare = [&](uint64_t k) {
      fill(k, slot(k));
      raise(segment(rank_).filled, base + k + 1);
    };
    auto finish_chunk = [&](uint64_t k) {
      await(&RankSegment::worked, base + k + 1, deadline);
      finish(k, slot(k));
    };
    prepare(0);
    for (uint64_t k = 0; k < chunks; ++k) {
      if (k + 1 < chunks) prepare(k + 1);
      await(&RankSegment::filled, base + k + 1, deadline);
      work(k, slot(k));
      raise(segment(rank_).worked, base + k + 1);
      if (k > 0) finish_chunk(k - 1);
    }
    finish_chunk(chunks - 1);
  }

  /// Frees a block of the arena together with the segment: other ranks may read the block until they have left.
  void free_when_all_left(char* block) { freed_when_all_left_.push_back(block); }

 private:
  bool may_write(int peer) const;
  void raise(Flag& flag, uint64_t value);
  void await(Flag RankSegment::*flag, uint64_t value, Deadline deadline);
  void wake_others();

  const int rank_;
  const std::vector<Member> members_;
  const std::shared_ptr<Arena> arena_;
  Waiter waiter_;
  uint64_t call_ = 0;                       // used only by the thread that makes calls
  uint64_t chunks_ = 0;                     // used only by that thread: chunks that passed through the slots
  std::vector<char*> freed_when_all_left_;  // used only by the thread that destroys the group
};

/// Creates the ShmGroup: each rank publishes the handle of its segment in the store and maps the segments of the other
/// ranks. Collective. Throws NoSharedMemory on all ranks when the ranks cannot share memory.
std::unique_ptr<ShmGroup> exchange_handles(const BackendContext& context);

}  // namespace lockstep::shm
