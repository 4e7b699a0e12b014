#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <lockstep/process_group.h>

#include "comm/watch/activity.h"
#include "comm/watch/job.h"
#include "report/gpu_status.h"

namespace lockstep::detail {

/// Writes live/rank-NNNNN.json of a training run: the current state of this rank (docs/file_formats.md). A separate
/// thread writes the file about once a second and when the state changes, so the file is also written while the rank
/// blocks in a call. If the file cannot be written, the thread logs one warning and tries again.
///
/// Create it with make_unique_owned: a forked child has no such thread. The training thread makes all calls, except for
/// those of the failure hook.
class LiveStatus {
 public:
  enum class State { kRunning, kFinished, kStopped, kFailed };
  /// The position of the training. The training thread writes, the thread of this object reads.
  struct Position {
    std::atomic<int64_t> step{0}, epochs{0}, batch{0}, batches{0};
    std::atomic<double> epoch{0};
    std::atomic<int64_t> samples{0};  // of this rank, in this start
  };

  /// Removes files of ranks that do not take part, and notes the folder for the launcher. Throws SystemError if no
  /// thread can be started.
  LiveStatus(const ProcessGroup& group, const std::string& run_folder);
  /// Writes the last state: failed if an exception is unwinding the stack, stopped if the run was not complete.
  ~LiveStatus();
  LiveStatus(const LiveStatus&) = delete;
  LiveStatus& operator=(const LiveStatus&) = delete;

  Position& position() { return position_; }
  Activity& activity() { return *activity_; }
  /// Does not wait until the state is written.
  void set_state(State state);
  /// The run fails with this error, which does not break the group. Waits until the state is written, at most 1 s.
  void fail(const std::exception_ptr& error);

 private:
  using Clock = std::chrono::steady_clock;
  struct Snapshot {
    Clock::time_point at{};
    int64_t step = 0, samples = 0;
    Activity::Times times{};
  };

  void run();
  void write();
  void on_group_failure();
  void write_failure();
  std::exception_ptr group_failure() const;
  std::exception_ptr failure();
  Snapshot take_snapshot() const;
  Snapshot begin_of_interval(const Snapshot& now);
  std::string to_json(const Snapshot& now);

  const ProcessGroup group_;
  const std::shared_ptr<Activity> activity_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const std::string folder_;  // live/
  const std::string name_;    // of the file
  const JobAttempt attempt_;
  const double started_;
  const int exceptions_;  // that were unwinding the stack at the construction
  const std::unique_ptr<GpuMonitor> gpu_;

  Position position_{};
  std::atomic<State> state_{State::kRunning};
  std::deque<Snapshot> history_{};  // used by the thread: at least one
  bool has_warned_ = false;         // used by the thread
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t requested_ = 1;     // guarded by mutex_: number of requested writes
  int64_t written_ = 0;       // guarded by mutex_: number of requested writes that are done
  bool is_ending_ = false;    // guarded by mutex_
  std::exception_ptr error_;  // guarded by mutex_: of fail()
  std::thread thread_;        // last, because it uses all members above
};

}  // namespace lockstep::detail
