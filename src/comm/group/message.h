#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include <lockstep/backend.h>
#include <lockstep/call_options.h>

#include "comm/group/group.h"

namespace lockstep::detail {

/// A message between two ranks, outside the order of collectives. Thread-safe.
class Message {
 public:
  /// Begins the message. Returns null if there is nothing to send.
  using Start = std::function<std::unique_ptr<Transfer>(Backend&, uint64_t fingerprint)>;

  /// Calls `start` and rethrows its exceptions; after a UsageError, such as a tag that the backend does not support,
  /// the group stays usable.
  Message(std::shared_ptr<Group> group, const MessageRoute& route, Fingerprint call, const CallOptions& options,
          const Start& start);
  ~Message();

  /// Blocks until the message is done.
  void wait();
  bool is_done();

 private:
  void begin(const MessageRoute& route, const Start& start);
  std::shared_ptr<Transfer> transfer();

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<const Connection::Parts> parts_;  // outlive the transfer, even when the group is destroyed
  const std::chrono::milliseconds timeout_;
  CallRecord record_;
  std::mutex mutex_;
  std::shared_ptr<Transfer> transfer_;  // guarded by mutex_; null when done
};

}  // namespace lockstep::detail
