#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/Device.h>

#include <lockstep/backend.h>

namespace lockstep::nccl {

/// An NCCL communicator, created without blocking, so that the caller can time out when a rank does not arrive.
/// Thread-safe.
class Communicator {
 public:
  /// The ranks exchange the communicator id in the store under `key`, which must be unique. The communicator uses the
  /// calling thread's current GPU.
  Communicator(std::shared_ptr<Store> store, std::string key, int rank, int size);
  /// Does not wait for calls that the device still executes.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Returns whether all ranks have joined. Also advances the initialization, so call it repeatedly.
  bool is_ready();
  /// Blocks until all ranks have joined. Throws TimeoutError after the deadline.
  void await(Deadline deadline);

  /// Makes NCCL calls; requires is_ready(). `doing` names the call in errors. The first calls connect the ranks, for
  /// which the other ranks must make the same calls. Once has_begun() returns true, the calls are queued on the device
  /// and further calls may be made.
  void begin(const char* doing, const std::function<ncclResult_t(ncclComm_t)>& calls);
  bool has_begun(const char* doing);
  /// begin(), then blocks until has_begun(). Throws TimeoutError after the deadline.
  void call(const char* doing, Deadline deadline, const std::function<ncclResult_t(ncclComm_t)>& calls);
  /// Throws when NCCL has reported an asynchronous error, or the cause after an abort. Never blocks.
  void check_health();

  /// Aborts calls on the host and on the device. All functions above throw `cause` afterwards. May block.
  void abort(std::exception_ptr cause) noexcept;

 private:
  bool is_published();
  bool is_aborted();
  void throw_if_aborted();
  void end();

  const std::shared_ptr<Store> store_;
  const std::string key_;
  const int rank_;
  const int size_;
  const c10::DeviceIndex gpu_;
  std::timed_mutex mutex_;
  std::atomic<ncclComm_t> raw_ = nullptr;  // guarded by mutex_, except in an abort that could not lock it in time
  bool is_ready_ = false;                  // guarded by mutex_
  // When to look for the id in the store again: rank 0 may be late by minutes. Guarded by mutex_.
  std::chrono::steady_clock::time_point next_poll_{};
  std::chrono::steady_clock::duration poll_interval_{};
  std::mutex cause_mutex_;
  std::exception_ptr cause_;  // guarded by cause_mutex_: why the communicator was aborted
};

}  // namespace lockstep::nccl
