#pragma once

#include <memory>
#include <vector>

#include "backends/shm/shm_group.h"
#include "base/owner_process.h"

namespace lockstep::shm {

/// Memory in the arena of rank 0 that all ranks of a group use. Every rank holds one SharedBlock for it. The memory is
/// freed when all ranks have destroyed theirs or have ended. It outlives the group.
class SharedBlock {
 public:
  /// On rank 0: allocates memory that is filled with zeros. Returns null when no memory is left.
  static std::shared_ptr<SharedBlock> create(const ShmGroup& group, size_t bytes);
  /// On the other ranks: `offset` is offset() of rank 0.
  static std::shared_ptr<SharedBlock> open(const ShmGroup& group, uint64_t offset);
  ~SharedBlock();
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  /// In the arena of rank 0.
  uint64_t offset() const { return offset_; }
  char* data() const;

 private:
  struct Header;
  SharedBlock(const ShmGroup& group, uint64_t offset);
  Header& header() const;

  const OwnerProcess owner_{};
  const int rank_;
  const std::shared_ptr<Arena> arena_;                         // of this rank
  const std::vector<std::shared_ptr<SharedMemory>> memories_;  // of all ranks
  const uint64_t offset_;
};

}  // namespace lockstep::shm
