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

/// One end of a message: memory that the other end copies from or into.
struct MessageEnd {
  void* data = nullptr;
  int64_t bytes = 0;
  uint64_t fingerprint = 0;  // of the message: equal on both ends
  bool is_done = false;      // guarded by the group's mutex
  std::exception_ptr error;  // guarded by the group's mutex
};

/// Where the ranks of a group meet when they are threads of one process: they see each other's memory. Thread-safe.
class ThreadGroup {
 public:
  explicit ThreadGroup(int size);

  /// Shows `board` to all ranks, runs `use` when all have done the same, and returns when all have finished using what
  /// they were shown. `use` may read every board and what it points to, and must not block. MismatchError when the
  /// ranks come with different fingerprints.
  void share(int rank, const void* board, const CallInfo& call, const std::function<void()>& use);

  /// The board of a rank, as that rank's type; only inside `use`.
  template <class Board>
  const Board& board(int rank) const {
    return *static_cast<const Board*>(boards_[rank]);
  }

  void post_send(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end);
  void post_recv(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end);
  /// Returns when the end is done. `peer` is whom it is with.
  void wait(const MessageEnd& end, int peer, Deadline deadline);
  bool is_done(const MessageEnd& end);
  /// Takes the end back unless it is done: nobody touches its memory after this.
  void withdraw(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end);

  void abort(std::exception_ptr cause);

 private:
  struct Mailbox {
    std::deque<std::shared_ptr<MessageEnd>> sends;
    std::deque<std::shared_ptr<MessageEnd>> receives;
  };
  using Channel = std::tuple<int, int, uint32_t>;  // from, to, tag

  void meet(std::unique_lock<std::mutex>& lock, int rank, Deadline deadline);
  [[noreturn]] void leave(std::unique_lock<std::mutex>& lock);
  void deliver(const Channel& channel);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> rounds_;          // guarded by mutex_: how often each rank has come to a meeting
  std::vector<const void*> boards_;       // written before a meeting, read after it
  std::vector<uint64_t> fingerprints_;    // the same
  int users_ = 0;                         // guarded by mutex_: ranks that run `use` now
  std::exception_ptr cause_;              // guarded by mutex_: set once aborted
  std::map<Channel, Mailbox> mailboxes_;  // guarded by mutex_
};

}  // namespace lockstep::threads
