// Overview.
//
// log() stages the values of a step, because a step may fail and be repeated. end_step() adds them to the sums of the
// current window: on the host, or on the GPU that they are on. When a window is complete, flush() passes it to the
// reporter thread, which every rank has. The thread waits for the sums that are on a GPU, adds the window to the sums
// of the epoch, and sends it to rank 0, over a group that only these threads use. So ranks need not make the same step
// at the same time, and neither the training nor the GPU waits. Rank 0's thread merges the windows and writes the
// record.
//
// end_epoch() waits for the threads. It then merges the sums of the epoch of all ranks with a separate collective.

#include <lockstep/metric_log.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/error.h>
#include <lockstep/state_traits.h>

#include "base/error.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "comm/join.h"
#include "comm/run_and_agree.h"
#include "report/metric_files.h"
#include "report/metric_sums.h"
#include "report/non_finite.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using detail::MetricRecord;
using detail::MetricSums;

void check_name(std::string_view name) {
  const bool is_reserved = name == "type" || name == "step" || name == "epoch" || name == "seconds";
  if (name.empty() || is_reserved)
    throw UsageError(text("a metric has the name '", name, "', expected a name that is not empty and not one of ",
                          "type, step, epoch and seconds, which records have anyway"));
}

/// For calls that all ranks make equally often. Returns the group.
const ProcessGroup& check_log_call(const ProcessGroup& group, const char* call) {
  detail::refuse_in_join(group, call, "call log() inside of join(), and everything else outside of it");
  return group;
}

}  // namespace

namespace detail {

/// A value that is logged.
struct LoggedValue {
  std::string name;
  double value = 0;
  at::Tensor tensor{};  // instead of value: on a GPU
  MetricOptions options{};
};

}  // namespace detail

namespace {

using detail::LoggedValue;

LoggedValue logged(std::string_view name, const at::Tensor& value, const MetricOptions& options) {
  if (!value.defined() || value.numel() != 1 || value.is_complex())
    throw UsageError(text("metric '", name, "' is ",
                          value.defined() ? text("a tensor of sizes ", value.sizes(), " and type ", value.scalar_type())
                                          : "an undefined tensor",
                          ", expected a real tensor with one element; log its mean, for example"));
  if (value.is_cpu()) return {std::string(name), value.item<double>(), {}, options};
  return {std::string(name), 0, value.detach(), options};
}

}  // namespace

class MetricLog::Impl {
 public:
  Impl(ProcessGroup group, std::string folder, MetricLogOptions options);
  ~Impl();

  void stage(LoggedValue value);
  void add_to_epoch(const LoggedValue& value);
  void end_step(double epoch);
  void abandon_step() { staged_.clear(); }
  void flush();
  void wait();
  std::map<std::string, double> end_epoch();

  int64_t steps() const { return steps_; }
  int64_t epochs() const { return epochs_; }
  std::map<std::string, double> latest();
  TensorBoardWriter* tensorboard();

  Value state_dict();
  void load_state_dict(const Value& state);

  std::optional<std::string> take_non_finite();
  /// Throws UsageError inside of a join.
  void check_call(const char* call) const { check_log_call(group_, call); }

 private:
  /// The sums of consecutive steps.
  struct Window {
    MetricRecord record;  // of the last step, without values
    int64_t first_step;
    MetricSums sums;
    std::optional<detail::DeviceSums::Copy> on_device;

    /// Waits for the sums that are on a GPU, and returns them.
    MetricSums fetch() {
      MetricSums fetched;
      if (const auto copy = std::exchange(on_device, std::nullopt)) fetched = copy->wait();
      sums.merge(fetched);
      return fetched;
    }
  };
  using Windows = std::vector<Window>;

  bool writes() const { return group_.rank() == 0; }
  double seconds() const { return earlier_seconds_ + std::chrono::duration<double>(Clock::now() - began_).count(); }
  Window take_window(double epoch);
  MetricSums fetch_window();
  void report();
  void end_thread();
  void send(Windows& windows);
  detail::MetricFiles* files();
  void write(const MetricRecord& record);
  void rethrow();

  // Constant after construction.
  const ProcessGroup group_;
  const std::string folder_;
  const MetricLogOptions options_;
  const ProcessGroup reporters_;  // only report() uses it

  // Of the thread that trains.
  std::vector<LoggedValue> staged_;
  MetricSums window_;
  detail::DeviceSums window_on_device_;
  int64_t steps_ = 0, epochs_ = 0;
  int64_t steps_in_window_ = 0;
  Windows finished_;                                  // not yet passed to the reporter
  MetricSums epoch_only_;                             // of log_epoch()
  int64_t recorded_steps_ = 0, recorded_epochs_ = 0;  // steps and epochs that have records when the files are opened
  double earlier_seconds_ = 0;
  Clock::time_point began_ = Clock::now();
  detail::NonFiniteValue non_finite_;
  int64_t checked_steps_ = 0;  // that take_non_finite() has checked

  detail::NonFiniteWarnings warnings_;  // used by report() and, while that is idle, by end_epoch()

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Windows> queue_;
  bool is_busy_ = false, is_ending_ = false;
  std::exception_ptr error_;
  std::map<std::string, double> latest_;
  MetricSums epoch_;                            // sums of the windows that report() has processed
  std::unique_ptr<detail::MetricFiles> files_;  // on rank 0, when the first record is written
  bool has_warned_ = false;                     // has warned that the files cannot be opened
  std::thread thread_;                          // last: it uses the other members
};

MetricLog::Impl::Impl(ProcessGroup group, std::string folder, MetricLogOptions options)
    : group_(check_log_call(group, "MetricLog: the constructor")),
      folder_(std::move(folder)),
      options_(options),
      reporters_(group_.new_group(detail::all_ranks(group_))) {
  detail::run_and_agree(group_, [&] {
    if (folder_.empty()) throw UsageError(group_.rank(), "MetricLog: the folder's name is empty");
    if (options_.every < 0)
      throw UsageError(group_.rank(), text("MetricLog: every is ", options_.every, ", expected 0 or more"));
    if (writes()) {
      detail::make_folders(folder_);
      detail::check_own_files(folder_);
    }
  });
  try {
    detail::run_and_agree(group_, [&] { thread_ = start_thread("writing metrics", [this] { report(); }); });
  } catch (...) {
    end_thread();
    throw;
  }
}

MetricLog::Impl::~Impl() {
  end_thread();
}

void MetricLog::Impl::end_thread() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
    queue_.clear();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// --- the thread that trains

void MetricLog::Impl::stage(LoggedValue value) {
  check_name(value.name);
  staged_.push_back(std::move(value));
}

void MetricLog::Impl::add_to_epoch(const LoggedValue& value) {
  check_name(value.name);
  const double number = value.tensor.defined() ? value.tensor.item<double>() : value.value;
  epoch_only_.add(value.name, number, value.options);
  non_finite_.check_of_epoch(value.name, number, value.options, epochs_ + 1);
}

void MetricLog::Impl::end_step(double epoch) {
  for (const auto& [name, value, tensor, options] : std::exchange(staged_, {})) {
    if (tensor.defined()) {
      window_on_device_.add(name, tensor, options);
    } else {
      window_.add(name, value, options);
      non_finite_.check(name, value, options, steps_ + 1);
    }
  }
  ++steps_;
  if (++steps_in_window_ == options_.every) finished_.push_back(take_window(epoch));
}

MetricLog::Impl::Window MetricLog::Impl::take_window(double epoch) {
  Window window{.record = {.step = steps_, .epoch = epoch, .seconds = seconds()},
                .first_step = steps_ - steps_in_window_ + 1,
                .sums = std::exchange(window_, {}),
                .on_device = {}};
  if (!window_on_device_.empty()) window.on_device = window_on_device_.take();
  steps_in_window_ = 0;
  return window;
}

/// Waits for the sums of the current window that are on a GPU, and returns them. The sums are on the host then.
MetricSums MetricLog::Impl::fetch_window() {
  MetricSums fetched;
  if (!window_on_device_.empty()) fetched = window_on_device_.take().wait();
  window_.merge(fetched);
  return fetched;
}

/// Values on the host were checked when their step ended. Of values on a GPU only the sums are known.
std::optional<std::string> MetricLog::Impl::take_non_finite() {
  for (auto& window : finished_)
    non_finite_.check(window.fetch(), std::max(window.first_step, checked_steps_ + 1), window.record.step);
  non_finite_.check(fetch_window(), std::max(steps_ - steps_in_window_, checked_steps_) + 1, steps_);
  checked_steps_ = steps_;
  return non_finite_.take();
}

void MetricLog::Impl::flush() {
  rethrow();
  if (finished_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::exchange(finished_, {}));
  }
  changed_.notify_all();
}

void MetricLog::Impl::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return (queue_.empty() && !is_busy_) || error_; });
  lock.unlock();
  rethrow();
}

void MetricLog::Impl::rethrow() {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

std::map<std::string, double> MetricLog::Impl::end_epoch() {
  if (steps_in_window_ > 0) finished_.push_back(take_window(static_cast<double>(epochs_ + 1)));
  flush();
  wait();
  MetricSums own = std::exchange(epoch_only_, {});
  {
    const std::lock_guard lock(mutex_);
    own.merge(std::exchange(epoch_, {}));
  }
  std::vector<MetricSums> ranks;
  for (const auto& sums : group_.all_gather_object(own.to_ivalue())) ranks.push_back(MetricSums::from_ivalue(sums));
  ++epochs_;
  auto results = detail::merged(ranks).results();
  if (writes()) {
    warnings_.check(ranks, text("epoch ", epochs_));
    write({.is_epoch = true,
           .step = steps_,
           .epoch = static_cast<double>(epochs_),
           .seconds = seconds(),
           .values = results});
  }
  return results;
}

/// Returns null if the files cannot be opened; the next call tries again. The reporter is idle when the thread that
/// trains calls this.
detail::MetricFiles* MetricLog::Impl::files() {
  const std::lock_guard lock(mutex_);
  if (files_) return files_.get();
  try {
    files_ = std::make_unique<detail::MetricFiles>(folder_, options_, recorded_steps_, recorded_epochs_);
  } catch (const Error& error) {
    if (!std::exchange(has_warned_, true))
      log_warning(text(error.what(), "; metrics are lost until it can be written again"));
  }
  return files_.get();
}

void MetricLog::Impl::write(const MetricRecord& record) {
  if (auto* opened = files()) opened->write(record);
}

std::map<std::string, double> MetricLog::Impl::latest() {
  const std::lock_guard lock(mutex_);
  return latest_;
}

TensorBoardWriter* MetricLog::Impl::tensorboard() {
  auto* opened = writes() ? files() : nullptr;
  return opened ? opened->tensorboard() : nullptr;
}

// --- the reporter

void MetricLog::Impl::report() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty() || is_ending_; });
    if (is_ending_) return;
    auto windows = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      send(windows);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    is_busy_ = false;
    if (error) error_ = error;
    changed_.notify_all();
    if (error) return;
  }
}

void MetricLog::Impl::send(Windows& windows) {
  std::vector<c10::IValue> own;
  for (auto& window : windows) {
    window.fetch();
    own.push_back(window.sums.to_ivalue());
    const std::lock_guard lock(mutex_);
    epoch_.merge(window.sums.of_epochs());
  }
  if (options_.every == 0) return;
  const auto ranks = reporters_.gather_object(c10::ivalue::Tuple::create(std::move(own)), 0);
  if (!writes()) return;
  for (size_t i = 0; i < windows.size(); ++i) {
    std::vector<MetricSums> of_window;
    for (const auto& rank : ranks) of_window.push_back(MetricSums::from_ivalue(rank.toTupleRef().elements().at(i)));
    auto record = windows[i].record;
    warnings_.check(of_window, detail::describe_steps(windows[i].first_step, record.step));
    record.values = detail::merged(of_window).results();
    write(record);
    const std::lock_guard lock(mutex_);
    latest_ = std::move(record.values);
  }
}

// --- checkpoints

Value MetricLog::Impl::state_dict() {
  flush();
  wait();
  fetch_window();
  const auto all = group_.all_gather_object(
      c10::ivalue::Tuple::create({window_.to_ivalue(), epoch_.to_ivalue(), epoch_only_.to_ivalue()}));
  std::vector<Value> ranks;
  for (const auto& sums : all) ranks.push_back(detail::value_of(sums));
  return Value::dict({{"steps", steps_},
                      {"epochs", epochs_},
                      {"steps_in_window", steps_in_window_},
                      {"seconds", seconds()},
                      {"sums", Value::list(std::move(ranks))}});
}

void MetricLog::Impl::load_state_dict(const Value& state) {
  wait();
  steps_ = state.at("steps").as_int();
  steps_in_window_ = state.at("steps_in_window").as_int();
  recorded_steps_ = steps_ - steps_in_window_;
  checked_steps_ = steps_;
  epochs_ = recorded_epochs_ = state.at("epochs").as_int();
  earlier_seconds_ = state.at("seconds").as_double();
  began_ = Clock::now();
  staged_.clear();
  finished_.clear();
  const std::lock_guard lock(mutex_);
  window_.clear();
  epoch_.clear();
  epoch_only_.clear();
  files_.reset();
  const auto& ranks = state.at("sums").elements();
  // With fewer ranks than before, rank 0 adds the sums of the removed ranks to its own.
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const bool is_own_rank = static_cast<int>(rank) == group_.rank();
    const bool is_of_removed_rank = static_cast<int>(rank) >= group_.size() && group_.rank() == 0;
    if (!is_own_rank && !is_of_removed_rank) continue;
    const auto sums = detail::ivalue_of(ranks[rank]);
    const auto& parts = sums.toTupleRef().elements();
    window_.merge(MetricSums::from_ivalue(parts.at(0)), is_of_removed_rank);
    epoch_.merge(MetricSums::from_ivalue(parts.at(1)), is_of_removed_rank);
    epoch_only_.merge(MetricSums::from_ivalue(parts.at(2)), is_of_removed_rank);
  }
}

// --- public

MetricLog::MetricLog(ProcessGroup group, std::string folder, MetricLogOptions options)
    : impl_(std::make_unique<Impl>(std::move(group), std::move(folder), options)) {}
MetricLog::~MetricLog() = default;

void MetricLog::log(std::string_view name, double value, const MetricOptions& options) {
  impl_->stage({std::string(name), value, {}, options});
}
void MetricLog::log(std::string_view name, const at::Tensor& value, const MetricOptions& options) {
  impl_->stage(logged(name, value, options));
}
void MetricLog::log_epoch(std::string_view name, double value, const MetricOptions& options) {
  impl_->add_to_epoch({std::string(name), value, {}, options});
}
void MetricLog::log_epoch(std::string_view name, const at::Tensor& value, const MetricOptions& options) {
  impl_->add_to_epoch(logged(name, value, options));
}
void MetricLog::end_step(double epoch) {
  impl_->check_call("MetricLog: end_step()");
  impl_->end_step(epoch);
}
void MetricLog::abandon_step() {
  impl_->abandon_step();
}
void MetricLog::flush() {
  impl_->check_call("MetricLog: flush()");
  impl_->flush();
}
void MetricLog::wait() {
  impl_->wait();
}
std::map<std::string, double> MetricLog::end_epoch() {
  impl_->check_call("MetricLog: end_epoch()");
  return impl_->end_epoch();
}
int64_t MetricLog::steps() const {
  return impl_->steps();
}
int64_t MetricLog::epochs() const {
  return impl_->epochs();
}
std::map<std::string, double> MetricLog::latest() const {
  return impl_->latest();
}
TensorBoardWriter* MetricLog::tensorboard() {
  return impl_->tensorboard();
}
Value MetricLog::state_dict() const {
  impl_->check_call("MetricLog: state_dict()");
  return impl_->state_dict();
}
void MetricLog::load_state_dict(const Value& state) {
  impl_->load_state_dict(state);
}
std::optional<std::string> MetricLog::take_non_finite() {
  return impl_->take_non_finite();
}

}  // namespace lockstep
