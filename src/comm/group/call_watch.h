#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include <lockstep/backend.h>

#include "comm/group/backoff.h"
#include "comm/group/connection.h"
#include "comm/group/departures.h"
#include "comm/group/queued_calls.h"
#include "comm/group/work_queue.h"
#include "comm/watch/job.h"

namespace lockstep::detail {

/// Watches the calls of a group that are in progress, and breaks the group when one of them cannot succeed: because it
/// failed on this or another rank, takes too long, differs from the calls of other ranks, or needs a rank that has
/// left. All later calls then fail with that cause. Thread-safe. The mutex of the FlightRecorder guards its state.
class CallWatch final : private JobListener {
 public:
  /// The arguments must outlive the object.
  CallWatch(const Membership& me, const Connection& connection, FlightRecorder& recorder, QueuedCalls& queued)
      : me_(me), connection_(connection), recorder_(recorder), queued_(queued), departures_(me) {}

  /// Start and stop receiving the job's events.
  void subscribe(Job& job) { job.subscribe(me_.name, *this); }
  void unsubscribe(Job& job) { job.unsubscribe(*this); }

  /// Adds a group of the same ranks that breaks when this group breaks. It must live as long as this group is used.
  void add_companion(CallWatch& companion);

  /// Why the group is broken; null if it is not.
  std::exception_ptr failure() const;
  /// Requires the mutex.
  bool has_failed() const { return failure_ != nullptr; }
  /// Requires the mutex.
  const Departures& departures() const { return departures_; }
  /// Throws the failure, if there is one, with `prefix` before its message.
  void check_working(const std::string& prefix);

  /// A recorded call on which a thread blocks. The constructor requires the mutex; the destructor locks it again.
  class Call {
   public:
    Call(CallWatch& watch, WorkQueue::Lock& lock, const CallRecord& record,
         std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now());
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    /// Throws if the group is broken, also because a rank has left before this call. Without the mutex.
    void check();
    CallInfo info(std::chrono::milliseconds timeout) const;
    /// Call it in a catch clause around the call. Breaks the group, and throws the cause. Without the mutex.
    [[noreturn]] void fail(std::chrono::milliseconds timeout);
    /// The outcome that the destructor records; kFailed without this call. kRunning leaves the record unchanged.
    void end(CallRecord::State outcome) { outcome_ = outcome; }

   private:
    friend class CallWatch;

    CallWatch& watch_;
    WorkQueue::Lock& lock_;
    const CallRecord& record_;
    const std::chrono::steady_clock::time_point begin_;
    std::exception_ptr refusal_{};  // constant: why the group was already broken
    bool breaks_group_ = false;     // constant: this call breaks the group, because a rank has left before it
    CallRecord::State outcome_ = CallRecord::State::kFailed;  // used by its thread
    Backoff backoff_;                                         // guarded by the mutex
  };

  /// Records finished calls of the device as done. Breaks the group if the device reports an error.
  void retire_queued();

  /// Breaks the group and notifies the other ranks: see Backend::abort. Callers that break several groups at once use
  /// the two steps below, so that no group takes the closed connections of another group for the cause.
  void abort(const std::exception_ptr& cause);
  /// Makes all later calls fail with the cause, or with an earlier cause if there is one. Returns the effective cause.
  std::exception_ptr mark_broken(const std::exception_ptr& cause);
  /// Wakes calls that block.
  void wake();

 private:
  [[noreturn]] void fail(const CallRecord& record, std::chrono::milliseconds timeout, std::exception_ptr error);
  std::exception_ptr find_cause(const CallRecord& record, std::chrono::milliseconds timeout,
                                const std::exception_ptr& error);
  void blame(const std::exception_ptr& cause);
  std::string flight_recorder_suffix(const std::exception_ptr& cause);
  std::vector<CallWatch*> companions() const;

  void on_failure(std::exception_ptr cause) override;
  void on_left(int rank_in_job, int64_t calls) override;
  void on_answers(const std::string& call_id, const std::vector<Answer>& answers) override;
  void on_tick() override;

  const Membership& me_;
  const Connection& connection_;
  FlightRecorder& recorder_;
  QueuedCalls& queued_;
  // All guarded by the recorder's mutex:
  std::exception_ptr failure_;
  Departures departures_;
  bool departure_came_first_ = false;  // a rank had left before the failure
  std::vector<Call*> calls_;
  std::vector<CallWatch*> companions_;
};

}  // namespace lockstep::detail
