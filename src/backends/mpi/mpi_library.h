#pragma once

#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/backend.h>

namespace lockstep::mpi {

/// MPI in this process: initialized once, before the first group, and finalized at exit. Thread-safe.
///
/// MPI_Finalize blocks until every process that mpirun started calls it. mpirun treats a process that exits without
/// MPI_Finalize as failed and ends the other processes. So MPI_Finalize is called at exit after all groups were
/// destroyed, but not when the program exits inside a group. After a failure MPI_Finalize gets only a few seconds,
/// because a rank that hangs would never call it.
class Library {
 public:
  /// The single instance. Never destroyed, because MPI's state belongs to the process.
  static Library& of_process();

  /// Initializes MPI unless it is initialized. Collective over all processes that mpirun started. Throws UsageError
  /// when the program initialized MPI without MPI_THREAD_MULTIPLE, or has finalized it.
  void begin(const BackendContext& context);

  /// Between enter() and leave() a thread makes progress on messages, even when no thread of this process waits for
  /// one: another process may. `in_order` is false when the group failed.
  void enter();
  void leave(bool in_order) noexcept;

  /// Between begin_message() and end_message() progress is made more often, for low latency.
  void begin_message();
  void end_message() noexcept;

  /// Keeps the tensor alive until the process ends, because MPI may still use its memory.
  void keep(const at::Tensor& tensor);

 private:
  Library() = default;

  void init();
  void move_messages();
  void on_exit();
  void finalize();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_future<void> begun_;    // guarded by mutex_
  std::thread mover_;                 // guarded by mutex_
  int groups_ = 0;                    // guarded by mutex_
  int messages_ = 0;                  // guarded by mutex_
  bool is_moving_ = false;            // guarded by mutex_: mover_ is inside MPI
  int process_ = 0;                   // constant once groups exist: the process that initialized MPI
  bool is_initialized_here_ = false;  // constant once groups exist: lockstep initialized MPI and must finalize it
  bool has_failed_ = false;           // guarded by mutex_ until the last leave(): some group failed
  bool is_exiting_ = false;           // guarded by mutex_
  std::vector<at::Tensor> kept_;      // guarded by mutex_
};

/// Blocks until the future is ready. Throws the cause when the job fails meanwhile, and TimeoutError, naming `call` and
/// the remedy, after the group's time-out. MPI itself would block forever on a dead rank.
void await(const std::shared_future<void>& future, const BackendContext& context, const char* call, const char* remedy);

/// Runs `body`, which may block inside MPI, on a detached thread.
std::shared_future<void> run_detached(const char* purpose, std::function<void()> body);

}  // namespace lockstep::mpi
