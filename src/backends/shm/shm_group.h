#pragma once

#include <memory>
#include <vector>

#include <lockstep/backend.h>

#include "backends/shm/arena.h"
#include "backends/shm/rank_segment.h"
#include "backends/shm/wait.h"

namespace lockstep::shm {

/// The ranks of a group as one of them sees them: its own segment and the others', mapped.
///
/// Calls and their pipelines belong to one thread at a time; the rest is thread-safe.
class ShmGroup {
 public:
  struct Member {
    std::shared_ptr<SharedMemory> memory;
    RankSegment* segment = nullptr;
  };

  /// `arena` is this rank's, and holds its segment.
  ShmGroup(int rank, std::vector<Member> members, std::shared_ptr<Arena> arena);
  /// Leaves: this rank's segment goes when all others have left or ended.
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  RankSegment& segment(int rank) const { return *members_[rank].segment; }
  /// Memory in the arena of a rank.
  char* at(int rank, uint64_t offset) const { return members_[rank].memory->begin() + offset; }
  Waiter& waiter() { return waiter_; }

  /// Begins a call: shows this rank's header and waits for those of the others. `payload` may be up to kPayloadBytes.
  /// MismatchError when a rank comes with another fingerprint.
  void begin_call(const CallInfo& call, uint64_t offset = CallHeader::kElsewhere, const void* payload = nullptr,
                  size_t payload_bytes = 0);
  /// What a rank showed in this call.
  CallHeader& header(int rank) const { return segment(rank).headers[call_ % 2]; }
  /// Returns when no rank touches another's memory in this call any more.
  void end_call(Deadline deadline);

  /// Between begin_call and the end of a call the others may read this rank's tensor where it lies, and in some calls
  /// write to it. A rank whose call fails says so (give_up_call) before its caller can change the tensor. A rank looks
  /// (check_nobody_gave_up) before it writes to others, and after it has read from them. PeerError when one gave up.
  void give_up_call() noexcept;
  void check_nobody_gave_up() const;

  /// After give_up_call: returns whether the others have stopped writing to this rank's tensor, or have ended, within
  /// the limit. Ranks that are threads of this process are waited for without a limit.
  bool await_release(std::chrono::milliseconds limit) const;

  /// Takes data through the slots in chunks, two steps of them overlapping. For each chunk k, in order: fill(k, slot)
  /// writes to this rank's slot; when all ranks have, work(k, slot) may read the inputs of all slots of this number and
  /// write this rank's result; when all have, finish(k, slot) may read all results.
  ///
  /// Why three slots do: fill(k + 1) comes after finish(k - 2), for which all have worked on k - 2, whose slot it is.
  /// And work(k) comes after all have filled k, before which each has finished k - 3, whose results it overwrites.
  template <class Fill, class Work, class Finish>
  void pipeline(uint64_t chunks, Deadline deadline, const Fill& fill, const Work& work, const Finish& finish) {
    const uint64_t base = chunks_;
    chunks_ += chunks;
    auto slot = [&](uint64_t k) { return (base + k) % kSlots; };
    auto prepare = [&](uint64_t k) {
      fill(k, slot(k));
      raise(segment(rank_).filled, base + k + 1);
    };
    auto conclude = [&](uint64_t k) {
      await(&RankSegment::worked, base + k + 1, deadline);
      finish(k, slot(k));
    };
    prepare(0);
    for (uint64_t k = 0; k < chunks; ++k) {
      if (k + 1 < chunks) prepare(k + 1);
      await(&RankSegment::filled, base + k + 1, deadline);
      work(k, slot(k));
      raise(segment(rank_).worked, base + k + 1);
      if (k > 0) conclude(k - 1);
    }
    conclude(chunks - 1);
  }

  /// A block of the arena that others may read until they have left: it goes with the segment.
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
  uint64_t call_ = 0;                       // the thread's that makes calls
  uint64_t chunks_ = 0;                     // the same's: that went through the slots
  std::vector<char*> freed_when_all_left_;  // the thread's that ends the group
};

/// Brings the ranks of a group to one group: each shows the others, through the store, where its segment is, and makes
/// sure that it sees theirs. Collective. NoSharedMemory on all of them when some do not.
std::unique_ptr<ShmGroup> exchange_handles(const BackendContext& context);

}  // namespace lockstep::shm
