#pragma once

#include <signal.h>

#include <memory>
#include <vector>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

struct PreemptionGuardOptions {
  /// The signals that ask for a stop. Schedulers and clouds send SIGTERM or SIGUSR1 before they end a job; SIGINT is
  /// Ctrl-C. A second SIGINT ends the process at once.
  std::vector<int> signals = {SIGTERM, SIGUSR1, SIGINT};
  /// In how many calls of should_stop() the ranks communicate once. With more than 1, a stop takes effect up to this
  /// many calls later. Must be equal on all ranks.
  int every = 1;
};

/// Lets all ranks stop after the same step when one of them is asked to stop:
///
///     lockstep::PreemptionGuard guard(world);
///     for (int64_t step = checkpoints.resume(state); step < steps; ++step) {
///       train(step);
///       if (guard.should_stop()) {
///         checkpoints.save(step, state);
///         checkpoints.wait();
///         if (!checkpoints.last_error().empty()) return 1;
///         return lockstep::PreemptionGuard::kExitCode;
///       }
///     }
///
/// With this exit code, `lockstep run` treats the worker as preempted, not as failed: with --max-restarts it starts the
/// workers again, unless the launcher itself has received a signal. Then the launcher exits with the same code, and the
/// next start of the job resumes (docs/checkpoints.md).
///
/// The constructor replaces the process's handlers of the signals, the destructor restores them. One guard at a time in
/// a process (ranks as threads share one handler). Not thread-safe.
class LOCKSTEP_EXPORT PreemptionGuard {
 public:
  static constexpr int kExitCode = 6;  // LaunchExit::kPreempted

  /// Collective. Throws UsageError for an invalid option, such as a signal that cannot be handled.
  explicit PreemptionGuard(ProcessGroup group, PreemptionGuardOptions options = {});
  ~PreemptionGuard();
  PreemptionGuard(const PreemptionGuard&) = delete;
  PreemptionGuard& operator=(const PreemptionGuard&) = delete;

  /// Returns, on all ranks, whether a rank was asked to stop. Collective: call it at the same place of the loop on
  /// every rank. One small all-reduce on the CPU; on a GPU it does not wait for queued work if the group supports CPU
  /// tensors.
  bool should_stop();

  /// Returns whether this process has received one of the signals. Not collective.
  static bool was_signalled();

 private:
  struct Handlers;
  const ProcessGroup group_;
  const PreemptionGuardOptions options_;
  std::unique_ptr<Handlers> handlers_;
  int64_t calls_ = 0;
  bool stops_ = false;
};

}  // namespace lockstep
