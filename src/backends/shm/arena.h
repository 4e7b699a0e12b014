#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/shm/shared_memory.h"
#include "base/owner_process.h"

namespace lockstep::shm {

/// Allocates blocks of shared memory. Other processes address a block by its offset. Thread-safe.
class Arena {
 public:
  static constexpr size_t kAlignment = 128;
  static constexpr size_t kOwnPages = 8 * 1024;  // blocks of at least this size share no page with other blocks

  /// Returns the arena that all ranks and groups of this process share, so that every group can find a tensor that
  /// another group allocated. A forked child gets its own arena.
  static std::shared_ptr<Arena> of_process();

  /// Reserves LOCKSTEP_SHM_BYTES of address space, or else as much as the machine has memory.
  explicit Arena(SharedMemory::Kind kind);

  /// Returns a block, never at offset 0, with undefined contents. Throws SystemError when no memory is left.
  char* allocate(size_t bytes);
  /// Like allocate, but each page of the block takes memory only on first touch. Named memory may be full then, and the
  /// touch raises SIGBUS: use allocate.
  char* reserve(size_t bytes);
  /// Does nothing in a forked child: the block belongs to the parent, even if tensors of the child refer to it.
  void free(char* block);

  /// Frees the blocks once `is_unused` returns true, that is, once no other rank reads them. Calls `is_unused` now and
  /// again on later allocations.
  void retire(std::vector<char*> blocks, std::function<bool()> is_unused);

  /// Returns nullopt for memory outside this arena and for detached memory.
  std::optional<uint64_t> offset_of(const void* data) const;

  /// Replaces the shared memory of these bytes by private memory with the same contents at the same address, so that
  /// late writes of other processes no longer reach them. The block must have kOwnPages bytes or more. Its range in the
  /// arena is never reused. Throws SystemError when no memory is left.
  void detach(const void* data, size_t bytes);

  SharedMemory& memory() { return *memory_; }

 private:
  struct Retired {
    std::vector<char*> blocks;
    std::function<bool()> is_unused;
  };

  bool is_detached(uint64_t begin, uint64_t end) const;

  // Both require mutex_.
  void free_retired();
  void free_block(char* block);

  const OwnerProcess owner_{};
  const SharedMemory::Kind kind_;
  const std::shared_ptr<SharedMemory> memory_;
  mutable std::mutex mutex_;
  std::map<uint64_t, size_t> free_;      // guarded by mutex_: by offset, no two adjacent
  std::map<uint64_t, size_t> used_;      // guarded by mutex_: by offset
  size_t kept_ = 0;                      // guarded by mutex_: bytes of memory that free blocks keep, about
  std::vector<Retired> retired_;         // guarded by mutex_
  std::map<uint64_t, size_t> detached_;  // guarded by mutex_: by offset
  std::atomic<bool> has_detached_{false};
};

}  // namespace lockstep::shm
