#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/logging.h>
#include <lockstep/store.h>

#include "rendezvous/store/store_server.h"
#include "rendezvous/store/tcp_store.h"
#include "support/child_process.h"

namespace lockstep {

inline Secret test_secret() {
  return Secret::from_bytes("a secret of the tests, 32 bytes.");
}

inline StoreClient::Options client_options(int port,
                                           std::chrono::milliseconds heartbeat_limit = std::chrono::seconds(5),
                                           std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  return {{"127.0.0.1", port},
          test_secret().key(0),
          0,
          std::chrono::steady_clock::now() + timeout,
          std::chrono::milliseconds(heartbeat_limit)};
}

inline StoreServer::Options host_options(const std::string& host = "127.0.0.1", int port = 0) {
  const Endpoint endpoint{host, port};
  return {endpoint, test_secret(), 0, "rank 0", 0};
}

/// A store in this process, on loopback.
struct StoreHost {
  StoreServer server{host_options()};

  std::shared_ptr<StoreClient> connect() const { return std::make_shared<StoreClient>(client_options(server.port())); }
  std::shared_ptr<Store> open() const { return make_remote_store(connect()); }
};

/// Body of a ChildProcess that hosts a store. Writes its port, then its log. Shuts down in order at the end of its
/// input.
inline void host_store(const ChildProcess::Parent& test) {
  set_log_sink([&](LogLevel, const std::string& client) { test.write_line(client); });
  StoreHost host;
  test.write_line(std::to_string(host.server.port()));
  test.read_line();
}

/// Makes the client the liveness connection of a rank. Returns the store's value of the rank's key afterwards.
inline std::string join(StoreClient& client, int rank, std::chrono::milliseconds limit = std::chrono::seconds(5)) {
  const auto me = this_process();
  return client
      .call(Verb::kJoin, {"rank/" + std::to_string(rank), "here", std::to_string(rank), me.host, me.host_id,
                          std::to_string(me.pid), std::to_string(limit.count())})
      .at(0);
}

/// Records the events that the store reports to a rank.
class Ear : public StoreListener {
 public:
  explicit Ear(std::string doing = "in a test") : doing_(std::move(doing)) {}

  void on_failure(const std::string& group, const Failure& failure) override {
    std::lock_guard lock(mutex_);
    failures_.push_back(group + ": " + name_of(failure.kind) + ": " + failure.message);
    changed_.notify_all();
  }
  void on_left(int rank, const std::string& group, int64_t calls) override {
    std::lock_guard lock(mutex_);
    left_.push_back(std::to_string(rank) + " left " + group + " after " + std::to_string(calls));
    changed_.notify_all();
  }
  std::string on_question(const std::string& group, const std::string& subject) override {
    return "about " + subject + " of " + group;
  }
  std::string doing() override {
    std::lock_guard lock(mutex_);
    ++beats_;
    changed_.notify_all();
    return doing_;
  }
  void on_tick() override {
    std::lock_guard lock(mutex_);
    ++ticks_;
    changed_.notify_all();
  }

  /// Returns the first failure; empty if none arrives in time.
  std::string failure_within(std::chrono::milliseconds limit) { return first_within(failures_, limit); }
  std::string left_within(std::chrono::milliseconds limit) { return first_within(left_, limit); }
  size_t failures() {
    std::lock_guard lock(mutex_);
    return failures_.size();
  }
  /// Waits until a heartbeat has been sent, that is until the one after it is prepared. Returns false on time-out.
  bool has_told() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [this, wanted = beats_ + 2] { return beats_ >= wanted; });
  }
  /// Waits for two more ticks of the client's thread. Returns false on time-out.
  bool hears_ticks() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [this, wanted = ticks_ + 2] { return ticks_ >= wanted; });
  }

 private:
  std::string first_within(const std::vector<std::string>& list, std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [&] { return !list.empty(); });
    return list.empty() ? "" : list.front();
  }

  const std::string doing_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> failures_, left_;  // guarded by mutex_
  int ticks_ = 0, beats_ = 0;                 // guarded by mutex_
};

}  // namespace lockstep
