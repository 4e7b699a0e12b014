#include "backends/nccl/communicator.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include <c10/cuda/CUDAFunctions.h>

#include <lockstep/error.h>

#include "backends/nccl/nccl.h"
#include "base/start_thread.h"
#include "base/text.h"

namespace lockstep::nccl {
namespace {

constexpr auto kStatePause = std::chrono::microseconds(50);
constexpr auto kMinPollInterval = std::chrono::microseconds(100);
constexpr auto kMaxPollInterval = std::chrono::milliseconds(10);
constexpr auto kMaxCall = std::chrono::milliseconds(250);

std::string fresh_id() {
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "creating a communicator");
  return {id.internal, sizeof(id.internal)};
}

ncclUniqueId to_id(const std::string& bytes) {
  ncclUniqueId id;
  if (bytes.size() != sizeof(id.internal))
    throw MismatchError(
        "the NCCL communicator id has a different size on this rank; use the same NCCL version on all ranks");
  std::memcpy(id.internal, bytes.data(), bytes.size());
  return id;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Store> store, std::string key, int rank, int size)
    : store_(std::move(store)), key_(std::move(key)), rank_(rank), size_(size), gpu_(c10::cuda::current_device()) {
  prepare_background();
  if (rank_ == 0) store_->set(key_, fresh_id());
}

// Destroying a communicator takes NCCL 0.5 s, and as long as a CUDA graph with captured calls exists. So a background
// thread does it. At the end of the process it may be too late; then run_in_background does nothing.
Communicator::~Communicator() {
  if (!raw_ || cause_) return;
  const auto destroy = [raw = raw_.load(), gpu = gpu_] {
    c10::cuda::set_device(gpu);
    ncclCommDestroy(raw);
  };
  try {
    run_in_background("destroying an NCCL communicator", destroy);
  } catch (const Error&) {  // no thread available: destroys it on this thread
    destroy();
  }
}

bool Communicator::is_aborted() {
  std::lock_guard lock(cause_mutex_);
  return cause_ != nullptr;
}

void Communicator::throw_if_aborted() {
  std::lock_guard lock(cause_mutex_);
  if (cause_) std::rethrow_exception(cause_);
}

// Requires mutex_. The longer the id is missing, the less often the store is asked.
bool Communicator::is_published() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_poll_) return false;
  if (store_->check({key_})) return true;
  poll_interval_ =
      std::clamp<std::chrono::steady_clock::duration>(2 * poll_interval_, kMinPollInterval, kMaxPollInterval);
  next_poll_ = std::chrono::steady_clock::now() + poll_interval_;
  return false;
}

bool Communicator::is_ready() {
  std::lock_guard lock(mutex_);
  throw_if_aborted();
  if (is_ready_) return true;
  if (!raw_) {
    if (!is_published()) return false;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t made = nullptr;
    auto result =
        ncclCommInitRankConfig(&made, size_, to_id(store_->get(key_, std::chrono::seconds(10))), rank_, &config);
    if (result != ncclSuccess && result != ncclInProgress) fail(result, "creating a communicator", nullptr);
    raw_ = made;
    if (is_aborted()) end();  // abort() ran before raw_ was set
    throw_if_aborted();
  }
  ncclResult_t state = ncclSuccess;
  check(ncclCommGetAsyncError(raw_, &state), "creating a communicator", raw_);
  if (state != ncclSuccess && state != ncclInProgress) fail(state, "creating a communicator", raw_);
  is_ready_ = state == ncclSuccess;
  return is_ready_;
}

void Communicator::await(Deadline deadline) {
  while (!is_ready()) {
    if (std::chrono::steady_clock::now() >= deadline)
      throw TimeoutError("NCCL: timed out: not all ranks joined the communicator");
    std::this_thread::sleep_for(kStatePause);
  }
}

void Communicator::begin(const char* doing, const std::function<ncclResult_t(ncclComm_t)>& calls) {
  std::lock_guard lock(mutex_);
  throw_if_aborted();
  const auto result = calls(raw_);
  throw_if_aborted();
  if (result != ncclInProgress) check(result, doing, raw_);
}

bool Communicator::has_begun(const char* doing) {
  std::lock_guard lock(mutex_);
  throw_if_aborted();
  ncclResult_t state = ncclSuccess;
  check(ncclCommGetAsyncError(raw_, &state), doing, raw_);
  if (state == ncclInProgress) return false;
  check(state, doing, raw_);
  return true;
}

void Communicator::call(const char* doing, Deadline deadline, const std::function<ncclResult_t(ncclComm_t)>& calls) {
  begin(doing, calls);
  while (!has_begun(doing)) {
    if (std::chrono::steady_clock::now() >= deadline)
      throw TimeoutError("NCCL: timed out: not all ranks made the call that connects them");
    std::this_thread::sleep_for(kStatePause);
  }
}

void Communicator::check_health() {
  throw_if_aborted();
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !is_ready_) return;  // a call in progress checks the state itself, and may block until an abort
  throw_if_aborted();
  ncclResult_t state = ncclSuccess;
  check(ncclCommGetAsyncError(raw_, &state), "reading the error state", raw_);
  if (state != ncclSuccess && state != ncclInProgress) fail(state, "an asynchronous call", raw_);
}

void Communicator::abort(std::exception_ptr cause) noexcept {
  {
    std::lock_guard lock(cause_mutex_);
    if (cause_) return;
    cause_ = std::move(cause);
  }
  // A thread that holds mutex_ may be blocked in NCCL because the device accepts no more work. Only the abort below
  // ends that, so the wait for the mutex is limited.
  ncclComm_t raw = nullptr;
  {
    std::unique_lock lock(mutex_, kMaxCall);
    raw = raw_.exchange(nullptr);
  }
  c10::cuda::set_device(gpu_);
  // Without mutex_: ncclCommAbort may block until the CUDA graphs that captured this communicator are destroyed, and
  // the thread that owns them may need mutex_ while an exception unwinds its stack.
  if (raw) ncclCommAbort(raw);
}

void Communicator::end() {
  if (auto raw = raw_.exchange(nullptr)) ncclCommAbort(raw);
}

}  // namespace lockstep::nccl
