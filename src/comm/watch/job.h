#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/watch/activity.h"
#include "comm/watch/flight_recorder.h"
#include "comm/watch/straggler_report.h"
#include "rendezvous/join_request.h"
#include "rendezvous/store/store_client.h"
#include "rendezvous/store/store_server.h"

namespace lockstep::detail {

/// The name of the group that contains all ranks.
inline constexpr const char* kWorld = "world";

/// Returns the prefix of the group's keys in the job's store.
std::string group_keys(const std::string& group);

/// Removes the device suffix: "world" for the groups "world" and "world:cpu". A failure of one of them breaks both.
std::string base_name(const std::string& group);

/// The name of this job, empty without a launcher, and how often it was restarted, from the environment.
struct JobAttempt {
  std::string job;
  int restarts = 0;
};
JobAttempt this_attempt();

/// Receives events of the job for one group. Called on a thread of the job, which the listener must not block. Never
/// called after unsubscribe().
class JobListener {
 public:
  virtual ~JobListener() = default;
  /// The group is broken.
  virtual void on_failure(std::exception_ptr cause) = 0;
  /// A rank of the job has left the group cleanly, after `calls` calls.
  virtual void on_left(int /*rank_in_job*/, int64_t /*calls*/) {}
  /// Another rank has called Job::note for this group. Returns whether this listener has used the note; if no listener
  /// has, a later listener gets it.
  virtual bool on_note(int /*rank_in_job*/, const std::string& /*content*/) { return false; }
  /// The answers to Job::ask have arrived.
  virtual void on_answers(const std::string& /*call_id*/, const std::vector<Answer>& /*answers*/) {}
  virtual void on_tick() {}
};

/// The state that all groups of one rank share: the peers, the store, the liveness connection (StoreClient), the flight
/// recorder and the activity of the rank. Thread-safe.
class Job final : private StoreListener {
 public:
  /// `client` and `server` are null for a single rank. `server` is null on ranks that do not host the store.
  /// `joins_before` (see count_join) distinguishes groups of this join from groups of other joins with the same name.
  Job(std::vector<Peer> peers, int rank, int joins_before, std::shared_ptr<Store> store, std::string key_prefix,
      std::shared_ptr<StoreClient> client, std::unique_ptr<StoreServer> server);
  /// Leaves the job cleanly, or as failed if an exception is unwinding the stack. The host of the store waits up to
  /// one second for the other ranks to leave.
  ~Job() override;

  /// Leaves the job as failed and sends the error to the other ranks.
  void give_up(const std::exception_ptr& error) noexcept;
  /// Leaves a group as failed because of an exception. For the world group, leaves the job.
  void give_up_group(const std::string& group, const std::string& rank_name) noexcept;

  int rank() const { return rank_; }
  const std::vector<Peer>& peers() const { return peers_; }
  const std::shared_ptr<Store>& store() const { return store_; }
  const std::shared_ptr<FlightRecorder>& recorder() const { return recorder_; }
  const std::shared_ptr<Activity>& activity() const { return activity_; }
  /// The address from which this host reaches the store; empty for a single rank.
  std::string address() const { return client_ ? client_->local_address() : std::string(); }

  /// Delivers events of the group to the listener until unsubscribe(). Events that already happened are delivered at
  /// once. Listeners must not call these two functions.
  void subscribe(const std::string& group, JobListener& listener);
  void unsubscribe(JobListener& listener);

  enum class Certainty {
    kSymptom,  // something else may be the cause: the store waits briefly for it
    kCertain,
  };
  /// Reports that a group is broken. Returns the first cause that the store knows.
  Failure report(const std::string& group, const Failure& failure, Certainty certainty);
  /// The same without blocking: on_failure of the listener receives the cause.
  void report(JobListener& listener, const std::string& group, const Failure& failure);
  /// The same without a result.
  void report_async(const std::string& group, const Failure& failure) noexcept;
  /// Reports to the store that this rank is about to throw this error because of its culprit, so that the launcher does
  /// not blame this rank. Does nothing if the failure has no culprit.
  void blame(const Failure& failure) noexcept;
  /// Announces a report. The store accepts no other cause for the group before that report.
  void will_report(const std::string& group);

  /// Asks all ranks about a call. Blocks. Returns no answers if the store is gone.
  std::vector<Answer> ask(const std::string& group, const std::string& call_id);
  /// The same without blocking: on_answers of the listener receives the answers.
  void ask(JobListener& listener, const std::string& group, const std::string& call_id);

  /// Sends a short text to the same group on another rank, without blocking.
  void note(int rank_in_job, const std::string& group, const std::string& content) noexcept;

  /// Writes the flight recorder to a file, at most once. Returns the path, or why the file could not be written.
  std::string dump_flight(const std::string& reason);

  /// Notifies the other ranks that this rank leaves the group after `calls` calls. When all `members` have left, the
  /// store erases the keys of the group.
  void leave(const std::string& group, int64_t calls, int members) noexcept;

 private:
  void on_failure(const std::string& group, const Failure& failure) override;
  void on_left(int rank, const std::string& group, int64_t calls) override;
  void on_note(int rank, const std::string& group, const std::string& content) override;
  std::string on_question(const std::string& group, const std::string& call_id) override;
  std::string doing() override { return recorder_->doing(); }
  void on_tick() override;
  void notify(JobListener& listener, const std::function<void()>& callback);
  std::string on_wire(const std::string& group) const { return prefix_ + group; }
  std::optional<std::string> from_wire(const std::string& group) const;

  const std::vector<Peer> peers_;
  const int rank_;
  const std::string prefix_;                   // of the names of groups in messages to the store
  const std::string key_prefix_;               // of the keys of store_
  const std::unique_ptr<StoreServer> server_;  // outlives client_
  std::shared_ptr<StoreClient> client_;        // constant until the destructor
  std::shared_ptr<Store> store_;               // constant until the destructor
  const std::shared_ptr<FlightRecorder> recorder_ = std::make_shared<FlightRecorder>();
  const std::shared_ptr<Activity> activity_ = std::make_shared<Activity>();

  std::mutex mutex_;                                                        // locked while listeners are called
  std::map<JobListener*, std::string> listeners_;                           // guarded by mutex_: with their groups
  std::map<std::string, std::vector<std::pair<int, int64_t>>> departures_;  // guarded by mutex_: by group: rank, calls
  std::map<std::string, std::vector<std::pair<int, std::string>>> notes_;   // guarded by mutex_: not yet used, by group
  std::map<std::string, std::exception_ptr> group_failures_;  // guarded by mutex_: first failure, by base_name
  std::exception_ptr failure_;                                // guarded by mutex_: why the whole job failed
  std::mutex flight_mutex_;                                   // so that the flight recorder is written once
};

}  // namespace lockstep::detail
