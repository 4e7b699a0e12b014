#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "rendezvous/net/socket.h"

namespace lockstep::shm {

/// How another process finds a piece of shared memory.
struct MemoryHandle {
  std::string path;  // "/proc/PID/fd/N", or "shm:/NAME"
  std::string id;    // random: tells pieces apart whose paths are the same at different times
  size_t bytes = 0;
  bool is_locked = false;  // by the process that created it, as long as it has it
};

/// Memory that other processes of this host can map, all of it mapped here. Sparse: only what is touched takes memory.
/// Thread-safe.
class SharedMemory {
 public:
  enum class Kind {
    kUnnamed,  // a memfd: gone with the last process that has it, and not bounded by /dev/shm
    kNamed,    // in /dev/shm, until unlink(): for processes that do not see each other in /proc
  };

  /// SystemError when it cannot be had.
  static std::shared_ptr<SharedMemory> create(Kind way, size_t bytes);
  /// Maps what another process, or this one, has created; what this process has mapped already is shared.
  static std::shared_ptr<SharedMemory> open(const MemoryHandle& address);

  SharedMemory(FileDescriptor file, MemoryHandle address);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const MemoryHandle& handle() const { return handle_; }
  char* begin() const { return begin_; }
  size_t bytes() const { return handle_.bytes; }
  bool contains(const void* data) const { return data >= begin_ && data < begin_ + bytes(); }

  /// Gets the memory of these bytes now, so that a lack of it is an error here (SystemError) and not a signal later.
  void populate(size_t offset, size_t bytes);
  /// Gives the memory of these bytes back; their contents are lost.
  void release(size_t offset, size_t bytes);
  /// Gives the pages of these bytes, here, memory of this process alone, with the same contents at the same address:
  /// what other processes write to their mapping of them is no longer seen. SystemError when there is no memory.
  void detach(size_t offset, size_t bytes);
  /// Whether this process created it.
  bool is_created_here() const { return is_created_here_; }
  /// Whether the process that created it still has it, so far as this one can know: the system ends that with the
  /// process, however that ends.
  bool is_in_use() const;
  /// Removes the name, if it has one: from here on nobody else can open it, and nothing stays behind.
  void unlink();

 private:
  const FileDescriptor file_;
  const MemoryHandle handle_;
  char* begin_ = nullptr;         // constant after construction
  bool is_created_here_ = false;  // constant after create()
};

}  // namespace lockstep::shm
