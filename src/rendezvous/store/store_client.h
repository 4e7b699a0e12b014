#pragma once

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
#include "rendezvous/net/socket.h"
#include "rendezvous/net/tls.h"
#include "rendezvous/process_id.h"
#include "rendezvous/store/protocol.h"

namespace lockstep {

/// What a rank wants to hear from its job. Every function is called on the line's own thread and must not wait for the
/// line.
class StoreListener {
 public:
  virtual ~StoreListener() = default;

  /// A group, or the whole job when `group` is empty, is over.
  virtual void on_failure(const std::string& group, const Failure& failure) = 0;
  /// A rank has left a group, in order, after so many calls.
  virtual void on_left(int rank, const std::string& group, int64_t calls) = 0;
  /// What this rank knows about a subject.
  virtual std::string on_question(const std::string& group, const std::string& subject) = 0;
  /// What this rank is doing, for people.
  virtual std::string doing() = 0;
  /// Some time has passed.
  virtual void on_tick() = 0;
};

/// A process's connection to the store of its job: requests and their answers, and, once the process has enrolled, its
/// life line. A thread of its own listens and sends heartbeats. Thread-safe.
class StoreClient {
 public:
  using Fields = std::vector<std::string>;
  using Deadline = std::chrono::steady_clock::time_point;

  struct Options {
    Endpoint endpoint;
    std::string key;  // see Secret::key
    int generation = 0;
    Deadline deadline{};
    std::chrono::milliseconds heartbeat_limit = std::chrono::seconds(5);
    OnWait on_wait{};  // called while it connects, and never later
  };

  /// Connects. TimeoutError when nobody answers by the deadline, PeerError when the store does not know this secret or
  /// something else listens there.
  explicit StoreClient(const Options& options);
  /// Says goodbye, and waits half a second at most for the store to hear it.
  ~StoreClient();
  StoreClient(const StoreClient&) = delete;
  StoreClient& operator=(const StoreClient&) = delete;

  /// Makes a request and returns what it is answered. PeerError when the store is gone, UsageError when it refuses and
  /// in a forked child, the job's failure when the job is over.
  Fields call(Verb verb, Fields fields);
  /// The same for a kGet, which may wait; none when the deadline comes first, with the keys that are missing in `late`.
  std::optional<Fields> call(Verb verb, Fields fields, Deadline deadline, Fields& late);
  /// The same without waiting: `done` gets the answer on the line's thread, or nothing when there is none; nothing and
  /// at once when the line is broken.
  void call(Verb verb, Fields fields, std::function<void(std::optional<Fields>)> done);
  /// Says something that needs no answer. Nothing happens when the line is broken.
  void send_async(Verb verb, Fields fields) noexcept;

  /// From here on until stop_listening the listener hears what comes, and heartbeats tell what it does. When the job is
  /// over already, it is told so at once, on this thread.
  void listen(StoreListener* listener);
  void stop_listening();

  /// Ends the life line: the others are told why this process failed, if it did.
  void say_goodbye(const std::optional<Failure>& failure) noexcept;

  /// Why the whole job is over, if it is; not for the listener to ask.
  std::optional<Failure> over();

  /// This host's address on the way to the store.
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
  void break_down(const std::string& how, bool in_order);
  void tell_failure(const std::string& group, const Failure& failure);
  std::string describe_host() const;

  const Options options_;
  const OwnerProcess owner_{};
  const TlsContext tls_;
  FileDescriptor socket_;      // constant after construction
  FileDescriptor waker_;       // constant after construction
  std::string local_address_;  // constant after construction
  ProcessId host_;             // constant after construction: where the store runs
  std::string host_role_;      // constant after construction

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<TlsSession> session_;                   // guarded by mutex_
  std::string unsent_;                                    // guarded by mutex_
  uint64_t next_id_ = 1;                                  // guarded by mutex_
  std::map<uint64_t, std::shared_ptr<Pending>> pending_;  // guarded by mutex_
  std::exception_ptr broken_;                             // guarded by mutex_: why there will be no answers
  bool is_over_ = false;      // guarded by mutex_: the store ended in order, or we said goodbye
  bool is_stopping_ = false;  // guarded by mutex_

  std::mutex listener_mutex_;          // held while the listener is called; before mutex_
  StoreListener* listener_ = nullptr;  // guarded by listener_mutex_
  std::optional<Failure> over_;        // guarded by listener_mutex_: why the whole job is

  Decoder decoder_;                                     // the thread's
  std::chrono::steady_clock::time_point last_heard_{};  // the thread's
  std::chrono::steady_clock::time_point next_beat_{};   // the thread's
  std::thread thread_;
};

}  // namespace lockstep
