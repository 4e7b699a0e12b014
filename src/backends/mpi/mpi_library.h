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

/// MPI in this process: begun once, before the first group, and ended when the program ends. Thread-safe.
///
/// MPI_Finalize waits for every process that mpirun started, and mpirun takes a process that ends without it for a
/// failure. So it is called at exit when all groups were left in order, and not when the program ends in the middle of
/// one: mpirun then ends the others. After a failure it is given a few seconds only, since a rank that hangs would not
/// come.
class Library {
 public:
  /// The only one, which is never destroyed: MPI's state belongs to the process.
  static Library& of_process();

  /// Begins MPI, unless it has begun. Collective over all processes that mpirun started. UsageError when the program
  /// began MPI itself, and in a way that allows no threads, or has ended it.
  void begin(const BackendContext& context);

  /// While a group uses MPI its messages move, also when no thread of this process waits for one: others may.
  void enter();
  void leave(bool in_order) noexcept;

  /// From one to the other a message between two ranks is under way, which should not take long.
  void begin_message();
  void end_message() noexcept;

  /// Keeps the tensor until the process ends: MPI may still use its memory.
  void keep(const at::Tensor& tensor);

 private:
  Library() = default;

  void init();
  void move_messages();
  void on_exit();
  void finalize();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_future<void> begun_;  // guarded by mutex_
  std::thread mover_;               // guarded by mutex_
  int groups_ = 0;                  // guarded by mutex_
  int messages_ = 0;                // guarded by mutex_
  bool is_moving_ = false;          // guarded by mutex_: the mover is inside MPI
  int process_ = 0;                 // constant once groups are made: whose MPI this is
  bool is_ours_ = false;            // constant once groups are made: we began MPI, and shall end it
  bool has_failed_ = false;         // guarded by mutex_ until the last group is left: some was not left in order
  bool is_exiting_ = false;         // guarded by mutex_
  std::vector<at::Tensor> kept_;    // guarded by mutex_
};

/// Waits for what was started elsewhere, but no longer than the group's time-out, nor when the job fails meanwhile:
/// MPI itself would wait for ever for a rank that is gone. The TimeoutError names `call` and the remedy.
void await(const std::shared_future<void>& future, const BackendContext& context, const char* call, const char* remedy);

/// Runs `body`, which may wait inside MPI, on a thread that can be left behind.
std::shared_future<void> run_apart(const char* purpose, std::function<void()> body);

}  // namespace lockstep::mpi
