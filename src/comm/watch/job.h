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

#include "comm/watch/flight_recorder.h"
#include "comm/watch/straggler_report.h"
#include "rendezvous/roll_call.h"
#include "rendezvous/store/store_client.h"
#include "rendezvous/store/store_server.h"

namespace lockstep::detail {

/// The name of the group of all ranks.
inline constexpr const char* kWorld = "world";

/// What the names of a group for one device and its partner for another, "world" and "world:cpu", have in common: a
/// failure of one is a failure of both.
std::string base_name(const std::string& group);

/// What a group, or one that is being made, wants to know of the job. Called on a thread of the job, which must not be
/// kept waiting, and never after unsubscribing.
class JobListener {
 public:
  virtual ~JobListener() = default;
  /// The group is over.
  virtual void on_failure(std::exception_ptr cause) = 0;
  /// A rank of the job has left the group, in order, after so many calls.
  virtual void on_left(int /*rank_in_job*/, int64_t /*calls*/) {}
  /// What it has asked about is answered.
  virtual void on_answers(const std::string& /*call_id*/, const std::vector<Answer>& /*answers*/) {}
  virtual void on_tick() {}
};

/// What all groups of one rank share: who the others are, the store, the life client, and the record of calls.
/// Thread-safe.
class Job final : private StoreListener {
 public:
  /// A rank alone has neither line nor server, and a rank that does not host the store has no server. `joins_before`
  /// (see count_join) tells what is said about groups of this join from what is said about those of another.
  Job(std::vector<Peer> peers, int rank, int joins_before, std::shared_ptr<Store> store,
      std::shared_ptr<StoreClient> client, std::unique_ptr<StoreServer> server);
  /// Leaves the job in order; if an exception is on its way, the others are told that this rank failed. The host of the
  /// store gives the others a second to leave too.
  ~Job() override;

  /// Leaves the job, telling the others why this rank failed.
  void give_up(const std::exception_ptr& error) noexcept;
  /// An exception ends this rank's part in the group, and with the world all of its work.
  void give_up_group(const std::string& group, const std::string& who) noexcept;

  int rank() const { return rank_; }
  const std::vector<Peer>& peers() const { return peers_; }
  const std::shared_ptr<Store>& store() const { return store_; }
  const std::shared_ptr<FlightRecorder>& recorder() const { return recorder_; }
  /// This host's address on the way to the other hosts; empty for a rank alone.
  std::string address() const { return client_ ? client_->local_address() : std::string(); }

  /// Until unsubscribed, the listener hears what happens to the group. A job that is over already is told at once.
  /// The two must not be called by a listener.
  void subscribe(const std::string& group, JobListener& listener);
  void unsubscribe(JobListener& listener);

  enum class Certainty {
    kSymptom,  // something else may be the cause: wait for it a little
    kCertain,
  };
  /// Says that a group is over, and returns the first cause that the store knows.
  Failure report(const std::string& group, const Failure& failure, Certainty certainty);
  /// The same without waiting: the listener hears the cause by on_failure.
  void report(JobListener& listener, const std::string& group, const Failure& failure);
  /// The same without an answer.
  void report_async(const std::string& group, const Failure& failure) noexcept;
  /// Says that this rank is about to throw this error because of that rank of the job, so that the launcher does not
  /// take this one for the culprit.
  void blame(int rank_in_job, const Failure& failure) noexcept;
  /// Says that a report will follow: nothing that others take for the cause comes before it.
  void will_report(const std::string& group);

  /// Asks all ranks about a call.
  std::vector<Answer> ask(const std::string& group, const std::string& call_id);
  /// The same without waiting: the listener hears by on_answers.
  void ask(JobListener& listener, const std::string& group, const std::string& call_id);

  /// Writes down the last calls of this rank, once, and returns the path of the file, or why there is none.
  std::string dump_flight(const std::string& reason);

  /// This rank leaves the group.
  void leave(const std::string& group, int64_t calls) noexcept;

 private:
  void on_failure(const std::string& group, const Failure& failure) override;
  void on_left(int rank, const std::string& group, int64_t calls) override;
  std::string on_question(const std::string& group, const std::string& call_id) override;
  std::string doing() override { return recorder_->doing(); }
  void on_tick() override;
  void notify(JobListener& listener, const std::function<void()>& news);
  std::string on_wire(const std::string& group) const { return prefix_ + group; }
  std::optional<std::string> from_wire(const std::string& group) const;

  const std::vector<Peer> peers_;
  const int rank_;
  const std::string prefix_;                   // of the names of groups, on the line
  const std::unique_ptr<StoreServer> server_;  // outlives the line
  std::shared_ptr<StoreClient> client_;        // constant but for the destructor
  std::shared_ptr<Store> store_;               // constant but for the destructor
  const std::shared_ptr<FlightRecorder> recorder_ = std::make_shared<FlightRecorder>();

  std::mutex mutex_;                                                        // held while listeners are called
  std::map<JobListener*, std::string> listeners_;                           // guarded by mutex_: and their groups
  std::map<std::string, std::vector<std::pair<int, int64_t>>> departures_;  // guarded by mutex_: by group: rank, calls
  std::map<std::string, std::exception_ptr> group_failures_;                // guarded by mutex_: by family, the first
  std::exception_ptr failure_;  // guarded by mutex_: why the whole job is over
  std::mutex flight_mutex_;
  std::string flight_path_;  // guarded by flight_mutex_: empty until there is one
};

}  // namespace lockstep::detail
