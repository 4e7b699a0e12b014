#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <lockstep/backend.h>

#include "comm/group/connection.h"
#include "comm/group/work_queue.h"
#include "comm/watch/job.h"

namespace lockstep::detail {

/// Numbers the messages between this rank and the other ranks, and finds the senders for receives from any rank.
/// Thread-safe.
class Messages final : private JobListener {
 public:
  /// The arguments must outlive the object.
  Messages(const Membership& me, const Connection& connection, std::mutex& mutex)
      : me_(me), connection_(connection), mutex_(mutex) {}

  /// Start and stop receiving the job's events.
  void subscribe(Job& job) { job.subscribe(me_.name, *this); }
  void unsubscribe(Job& job) { job.unsubscribe(*this); }

  /// Both require the mutex.
  int64_t begin(const MessageRoute& route) { return ++counts_[route]; }  // returns the number of the message
  void undo_begin(const MessageRoute& route) { --counts_[route]; }       // the last message was not sent

  /// Sends the receiver the number of messages that this rank has sent to it, if it waits for messages with that tag.
  void announce(const MessageRoute& route);
  /// Announces the messages to all receivers. Call it before this rank leaves: no rank can ask it later.
  void announce_all(Job& job);

  /// Asks all ranks to announce their messages with this tag. Only the first call for a tag does anything.
  void subscribe_to(uint32_t tag);
  /// Blocks until a rank has started to send a message with this tag that this rank has not started to receive, or
  /// `should_stop`, or the deadline. Returns that rank. Requires the mutex and subscribe_to().
  std::optional<int> await_sender(WorkQueue::Lock& lock, uint32_t tag, Deadline deadline,
                                  const std::function<bool()>& should_stop);

 private:
  std::optional<int> waiting_sender(uint32_t tag);
  bool on_note(int rank_in_job, const std::string& content) override;
  void on_failure(std::exception_ptr) override {}  // await_sender() asks should_stop() again and again

  const Membership& me_;
  const Connection& connection_;
  std::mutex& mutex_;
  std::atomic<bool> has_subscribers_{false};
  std::condition_variable announced_more_;
  // All guarded by mutex_:
  std::map<MessageRoute, int64_t> counts_;          // messages so far
  std::map<MessageRoute, int64_t> announced_;       // messages that other ranks have announced
  std::set<std::pair<int, uint32_t>> subscribers_;  // ranks, and tags of messages to them that this rank announces
  std::set<uint32_t> subscribed_tags_;              // tags to which this rank has subscribed
  int last_ = 0;                                    // the sender that was returned last
};

}  // namespace lockstep::detail
