#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/owner_process.h"
#include "rendezvous/failure.h"
#include "rendezvous/net/output_buffer.h"
#include "rendezvous/net/socket.h"
#include "rendezvous/net/tls.h"
#include "rendezvous/process_id.h"
#include "rendezvous/store/heartbeat_schedule.h"
#include "rendezvous/store/protocol.h"

namespace lockstep {

/// Receives notifications from the job's store. All functions are called on the StoreClient's thread and must not block
/// on the StoreClient.
class StoreListener {
 public:
  virtual ~StoreListener() = default;

  /// A group has failed, or the whole job if `group` is empty.
  virtual void on_failure(const std::string& group, const Failure& failure) = 0;
  /// A rank has left a group cleanly, after `calls` calls on it.
  virtual void on_left(int rank, const std::string& group, int64_t calls) = 0;
  /// Another rank has sent a kNote.
  virtual void on_note(int /*rank*/, const std::string& /*group*/, const std::string& /*content*/) {}
  /// Returns this rank's answer to a kQuestion.
  virtual std::string on_question(const std::string& group, const std::string& subject) = 0;
  /// Returns a human-readable description of this rank's current activity.
  virtual std::string doing() = 0;
  /// Called periodically.
  virtual void on_tick() = 0;
};

/// A process's connection to the job's store: it carries requests and answers and, after kJoin, is the rank's liveness
/// connection. A background thread receives messages and sends heartbeats. Thread-safe.
class StoreClient {
 public:
  using Fields = std::vector<std::string>;
  using Deadline = std::chrono::steady_clock::time_point;

  struct Options {
    Endpoint endpoint;
    Secret key;  // see Secret::key
    int generation = 0;
    Deadline deadline{};
    std::chrono::milliseconds heartbeat_limit = std::chrono::seconds(5);
    OnWait on_wait{};  // called only while the constructor connects
  };

  /// Blocks until connected. Throws TimeoutError if no store answers by the deadline, PeerError if the store has
  /// another secret or a different program listens there.
  explicit StoreClient(const Options& options);
  /// Sends kLeaveJob and waits up to 0.5 s for the store to close the connection. Does nothing in a forked child.
  ~StoreClient();
  StoreClient(const StoreClient&) = delete;
  StoreClient& operator=(const StoreClient&) = delete;

  /// Sends a request and blocks for the answer. Throws PeerError if the connection to the store is lost, UsageError if
  /// the store refuses the request or in a forked child, and the job's failure if the job has failed.
  Fields call(Verb verb, Fields fields);
  /// The same with a deadline, for kGet. Returns none if the deadline passes; `late` then has the missing keys.
  std::optional<Fields> call(Verb verb, Fields fields, Deadline deadline, Fields& late);
  /// The same without blocking: `done` is called with the answer on the client's thread, or with none if the request
  /// fails. If the connection is lost already, `done` is called with none on the calling thread.
  void call(Verb verb, Fields fields, std::function<void(std::optional<Fields>)> done);
  /// Sends a notification, which has no answer. Does nothing if the connection is lost.
  void send_async(Verb verb, Fields fields) noexcept;

  /// Delivers notifications to `listener` until stop_listening(), and reports its activity in heartbeats. If the job
  /// has failed already, calls listener->on_failure() on the calling thread.
  void listen(StoreListener* listener);
  void stop_listening();

  /// Ends the liveness connection. If `failure` is set, the job fails with it and all ranks are notified.
  void leave_job(const std::optional<Failure>& failure) noexcept;

  /// The failure of the whole job, if any. Must not be called by the listener.
  std::optional<Failure> over();

  /// The local address of the connection to the store.
  const std::string& local_address() const { return local_address_; }
  const ProcessId& host() const { return host_; }
  std::chrono::milliseconds heartbeat_limit() const { return options_.heartbeat_limit; }

 private:
  struct Pending {
    bool is_done = false;
    StoreMessage answer{};
    std::function<void(std::optional<Fields>)> done{};
  };
  using Lock = std::unique_lock<std::mutex>;

  void connect();
  bool handshake(Deadline deadline, std::string& reason);
  std::shared_ptr<Pending> start(Verb verb, Fields fields, std::function<void(std::optional<Fields>)> done,
                                 uint64_t* id);
  Fields result_of(const Pending& pending);

  void run();
  bool wait_for_something(std::chrono::milliseconds limit);
  void read_some();
  void handle(const StoreMessage& message);
  void beat();
  void check_silence();
  void send_locked(const StoreMessage& message);
  void flush_locked();
  void wake();
  void fail_connection(const std::string& reason, bool is_clean, const std::optional<Culprit>& culprit);
  void notify_failure(const std::string& group, const Failure& failure);
  std::string describe_host() const;

  const Options options_;
  const OwnerProcess owner_{};
  const TlsContext tls_;
  HeartbeatSchedule heartbeats_;                        // used by thread_ only
  FileDescriptor socket_;                               // constant after construction
  std::optional<ClosedInChildren> closed_in_children_;  // of socket_
  FileDescriptor waker_;                                // constant after construction
  std::string local_address_;                           // constant after construction
  ProcessId host_;                                      // constant after construction: the process that hosts the store
  std::string host_role_;                               // constant after construction
  std::optional<Culprit> host_culprit_;                 // constant after construction: the host, if it is a rank

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<TlsSession> session_;                   // guarded by mutex_
  OutputBuffer unsent_;                                   // guarded by mutex_
  uint64_t next_id_ = 1;                                  // guarded by mutex_
  std::map<uint64_t, std::shared_ptr<Pending>> pending_;  // guarded by mutex_
  std::exception_ptr broken_;                             // guarded by mutex_: why the connection is lost
  bool is_over_ = false;      // guarded by mutex_: the store shut down cleanly, or kLeaveJob was sent
  bool is_stopping_ = false;  // guarded by mutex_

  std::mutex listener_mutex_;          // held while the listener is called; lock it before mutex_
  StoreListener* listener_ = nullptr;  // guarded by listener_mutex_
  std::optional<Failure> over_;        // guarded by listener_mutex_: the failure of the whole job

  Decoder decoder_;                                     // used by thread_ only
  std::chrono::steady_clock::time_point last_heard_{};  // used by thread_ only
  std::atomic<bool> has_new_listener_ = false;          // the activity of listener_ is not reported yet
  std::thread thread_;
};

}  // namespace lockstep
