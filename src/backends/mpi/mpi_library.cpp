#include "backends/mpi/mpi_library.h"

#include <unistd.h>

#include <cstdlib>

#include <lockstep/error.h>

#include "backends/mpi/mpi.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"

namespace lockstep::mpi {
namespace {

// Pauses between progress calls into MPI, which cost about 20 us each. Collectives rarely need them: only while
// connections are being established and while sockets are full.
constexpr auto kPause = std::chrono::milliseconds(20);
constexpr auto kPauseWithMessages = std::chrono::milliseconds(1);
constexpr auto kPollInterval = std::chrono::milliseconds(10);
constexpr auto kFinalizeAfterFailure = std::chrono::seconds(5);

bool answer(int (*question)(int*)) {
  int yes = 0;
  question(&yes);
  return yes != 0;
}

}  // namespace

std::string describe_error(int code) {
  char words[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, words, &length) != MPI_SUCCESS) return text("error ", code);
  return {words, static_cast<size_t>(length)};
}

void check(int code, const char* call) {
  if (code != MPI_SUCCESS) throw SystemError(text(call, ": ", describe_error(code)));
}

std::shared_future<void> run_detached(const char* purpose, std::function<void()> body) {
  auto task = std::make_shared<std::packaged_task<void()>>(std::move(body));
  start_thread(purpose, [task] { (*task)(); }).detach();
  return task->get_future().share();
}

void await(const std::shared_future<void>& future, const BackendContext& context, const char* call,
           const char* remedy) {
  auto deadline = deadline_after(context.timeout);
  std::mutex mutex;
  std::exception_ptr cause;  // guarded by mutex
  auto ring = [&](std::exception_ptr error) {
    std::lock_guard lock(mutex);
    cause = error;
  };
  auto alarm = context.on_failure ? context.on_failure(ring) : nullptr;
  while (future.wait_for(kPollInterval) != std::future_status::ready) {
    std::lock_guard lock(mutex);
    if (cause) std::rethrow_exception(cause);
    if (std::chrono::steady_clock::now() >= deadline)
      throw TimeoutError(text(call, " did not return within ", context.timeout.count(), " ms; ", remedy));
  }
  future.get();
}

Library& Library::of_process() {
  static auto* library = new Library;
  return *library;
}

void Library::begin(const BackendContext& context) {
  std::shared_future<void> begun;
  {
    std::lock_guard lock(mutex_);
    if (!begun_.valid()) begun_ = run_detached("MPI_Init_thread", [this] { init(); });
    begun = begun_;
  }
  await(
      begun, context, "MPI_Init_thread",
      "it blocks until every process that mpirun started calls it; put all of them into a group of backend 'mpi', for "
      "example the world group");
  if (answer(MPI_Finalized))
    throw UsageError(
        "MPI_Finalize was called before this group was created; call it after the last group is destroyed");
}

void Library::init() {
  int level = MPI_THREAD_SINGLE;
  const bool is_begun = answer(MPI_Initialized);
  if (is_begun && answer(MPI_Finalized)) return;
  if (is_begun)
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  else
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  {
    std::lock_guard lock(mutex_);
    process_ = ::getpid();
    is_initialized_here_ = !is_begun;
    mover_ = start_thread("MPI's messages", [this] { move_messages(); });
    std::atexit([] { of_process().on_exit(); });
  }
  if (level == MPI_THREAD_MULTIPLE) return;
  throw UsageError(is_begun
                       ? "the program initialized MPI without MPI_THREAD_MULTIPLE; pass it to MPI_Init_thread, or let "
                         "lockstep initialize MPI"
                       : "this MPI was built without support for threads (MPI_THREAD_MULTIPLE); use another MPI");
}

void Library::enter() {
  std::lock_guard lock(mutex_);
  ++groups_;
  changed_.notify_all();
}

void Library::leave(bool in_order) noexcept {
  std::unique_lock lock(mutex_);
  has_failed_ |= !in_order;
  if (--groups_ > 0) return;
  changed_.wait(lock, [&] { return !is_moving_; });  // the program may call MPI_Finalize next
  if (!is_exiting_) return;
  lock.unlock();
  finalize();
}

void Library::begin_message() {
  std::lock_guard lock(mutex_);
  if (++messages_ == 1) changed_.notify_all();
}

void Library::end_message() noexcept {
  std::lock_guard lock(mutex_);
  --messages_;
}

// Any call into MPI makes progress on all messages.
void Library::move_messages() {
  std::unique_lock lock(mutex_);
  while (!is_exiting_) {
    if (groups_ == 0) {
      changed_.wait(lock);
      continue;
    }
    is_moving_ = true;
    lock.unlock();
    int has_message = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, 0, MPI_COMM_SELF, &has_message, MPI_STATUS_IGNORE);
    lock.lock();
    is_moving_ = false;
    changed_.notify_all();
    changed_.wait_for(lock, messages_ > 0 ? kPauseWithMessages : kPause);
  }
}

// Runs at exit. Groups in static variables are destroyed later. A forked child has neither the thread nor MPI.
void Library::on_exit() {
  if (::getpid() != process_) return;
  std::unique_lock lock(mutex_);
  is_exiting_ = true;
  changed_.notify_all();
  const bool is_last = groups_ == 0;
  lock.unlock();
  mover_.join();
  if (is_last) finalize();
}

void Library::finalize() {
  if (!is_initialized_here_ || answer(MPI_Finalized)) return;
  if (!has_failed_) {
    MPI_Finalize();
    return;
  }
  if (run_detached("MPI_Finalize", [] { MPI_Finalize(); }).wait_for(kFinalizeAfterFailure) != std::future_status::ready)
    log_warning("MPI_Finalize did not return: another rank does not exit. This process exits without it");
}

void Library::keep(const at::Tensor& tensor) {
  std::lock_guard lock(mutex_);
  kept_.push_back(tensor);
}

}  // namespace lockstep::mpi
