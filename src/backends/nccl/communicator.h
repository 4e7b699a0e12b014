#pragma once

#include <nccl.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/Device.h>

#include <lockstep/backend.h>

namespace lockstep::nccl {

/// Some ranks, each with its GPU, as NCCL sees them. Made without waiting, so that a rank that does not come can be
/// given up. Thread-safe.
class Communicator {
 public:
  /// The ranks meet in the store, under a key that is theirs alone. The calling thread's current GPU is this rank's.
  Communicator(std::shared_ptr<Store> store, std::string key, int rank, int size);
  /// What the device still does for it goes on.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Whether all ranks have come; gets on with meeting them.
  bool is_ready();
  /// Returns when they have. TimeoutError after the deadline.
  void await(Deadline deadline);

  /// Makes calls of NCCL, once ready; `doing` is for errors. The first ones connect the ranks, for which the others
  /// must make theirs: only when has_begun() says so does the device have them, and more may be made.
  void begin(const char* doing, const std::function<ncclResult_t(ncclComm_t)>& calls);
  bool has_begun(const char* doing);
  /// Both, one after the other. TimeoutError after the deadline.
  void call(const char* doing, Deadline deadline, const std::function<ncclResult_t(ncclComm_t)>& calls);
  /// Throws when NCCL has found out that something is wrong since. Never waits.
  void check_health();

  /// Ends what waits, here and on the device; all of the above throw `cause` from then on. May take a while.
  void abort(std::exception_ptr cause) noexcept;

 private:
  bool is_aborted();
  void throw_if_aborted();
  void end();

  const std::shared_ptr<Store> store_;
  const std::string key_;
  const int rank_;
  const int size_;
  const c10::DeviceIndex gpu_;
  std::timed_mutex mutex_;
  std::atomic<ncclComm_t> raw_ = nullptr;  // guarded by mutex_, but for an abort that has waited for it long enough
  bool is_ready_ = false;                  // guarded by mutex_
  std::mutex cause_mutex_;
  std::exception_ptr cause_;  // guarded by cause_mutex_: why it is aborted
};

}  // namespace lockstep::nccl
