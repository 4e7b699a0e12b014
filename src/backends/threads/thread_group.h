#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include <lockstep/backend.h>

namespace lockstep::threads {

/// One end of a message: the memory to copy from or into.
struct MessageEnd {
  void* data = nullptr;
  int64_t bytes = 0;
  uint64_t fingerprint = 0;  // of the message; must be equal on both ends
  bool is_done = false;      // guarded by the group's mutex
  std::exception_ptr error;  // guarded by the group's mutex
};

/// Connects the ranks of a group that are threads of one process and access each other's memory. Thread-safe.
class ThreadGroup {
 public:
  explicit ThreadGroup(int size);

  /// Publishes `object` to all ranks, waits until all ranks have published theirs, runs `use`, and returns
  /// when all ranks have finished `use`. `use` may access the objects of all ranks and the memory that they point to.
  /// It must not block. Throws MismatchError when the fingerprints of the ranks differ.
  void share(int rank, const void* object, const CallInfo& call, const std::function<void()>& use);

  /// The object that a rank has published, of type T. Call it only inside `use`.
  template <class T>
  const T& published(int rank) const {
    return *static_cast<const T*>(published_[rank]);
  }

  void post_send(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end);
  void post_recv(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end);
  /// Blocks until the end is done. `peer` is the rank at the other end, for errors.
  void wait(const MessageEnd& end, int peer, Deadline deadline);
  bool is_done(const MessageEnd& end);
  /// Cancels the end unless it is done. No rank accesses its memory afterwards.
  void withdraw(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end);

  void abort(std::exception_ptr cause);

 private:
  struct Mailbox {
    std::deque<std::shared_ptr<MessageEnd>> sends;
    std::deque<std::shared_ptr<MessageEnd>> receives;
  };
  using Channel = std::tuple<int, int, uint32_t>;  // from, to, tag

  void barrier(std::unique_lock<std::mutex>& lock, int rank, Deadline deadline);
  [[noreturn]] void leave(std::unique_lock<std::mutex>& lock);
  void deliver(const Channel& channel);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> rounds_;          // guarded by mutex_: how often each rank has called barrier()
  std::vector<const void*> published_;    // written before barrier(), read after it
  std::vector<uint64_t> fingerprints_;    // like published_
  int users_ = 0;                         // guarded by mutex_: ranks that currently run `use`
  std::exception_ptr cause_;              // guarded by mutex_: set when the group is aborted
  std::map<Channel, Mailbox> mailboxes_;  // guarded by mutex_
};

}  // namespace lockstep::threads
