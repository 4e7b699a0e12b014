// Overview.
//
// save() collects the state on all ranks (Impl::collect): rank 0 gets the whole checkpoint as a Value, and each rank
// its shard. If the save is asynchronous, the values are copied into separate memory. Then every rank runs
// Impl::write(), on the calling thread or on a background thread: ranks write their shards, rank 0 learns over a group
// that only these calls use whether all ranks succeeded, writes its file, which publishes the checkpoint, and sends the
// result to all ranks. So every rank has the result of the save, and an asynchronous save needs no calls of the user's
// threads.

#include <lockstep/checkpoint_directory.h>

#include <cmath>
#include <memory>
#include <optional>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "base/error.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"
#include "checkpoint/archive.h"
#include "checkpoint/checkpoint_loader.h"
#include "checkpoint/files.h"
#include "checkpoint/folder.h"
#include "checkpoint/pickle.h"
#include "checkpoint/shards.h"
#include "checkpoint/snapshot.h"
#include "comm/run_and_agree.h"

namespace lockstep {
namespace {

// Writing may take long on a slow disk. A rank that dies is noticed at once, whatever the time limit.
constexpr auto kWriteLimit = std::chrono::hours(24);

}  // namespace

class CheckpointDirectory::Impl {
 public:
  Impl(ProcessGroup group, std::string folder, CheckpointDirectoryOptions options);
  ~Impl() {
    if (writer_.joinable()) writer_.join();
    if (error_) outcome_ = message_of(error_);
    if (outcome_ && !outcome_->empty() && is_first()) log_warning(*outcome_);
  }

  bool save(int64_t number, const TrainingState& state, const std::map<std::string, double>& metrics);
  bool finish();
  const std::string& last_error() const { return last_error_; }
  int64_t resume(const TrainingState& state);
  int64_t load(const std::string& file, const TrainingState& state, const char* remedy);
  std::string in_folder(const std::string& name) const { return text(folder_, "/", name); }
  std::string name(int64_t number) const { return detail::checkpoint_name(options_.unit, number); }
  detail::FolderContents contents() const { return detail::read_folder(folder_, options_.unit); }

 private:
  /// What one save writes.
  struct Request {
    int64_t number = 0;
    Value checkpoint;  // only on rank 0
    Value shard;       // an empty dict if nothing is sharded
    std::string digits;
    std::map<std::string, double> metrics;
  };

  bool is_first() const { return group_.rank() == 0; }
  void check_options() const;
  void prepare_folder();
  void read_best();
  Request collect(int64_t number, const TrainingState& state, const std::map<std::string, double>& metrics) const;
  void gather_per_rank(const Value& own, Value& checkpoint) const;
  std::string write(Request& request);
  std::string describe_newest() const;
  void publish(Request& request, const std::vector<c10::IValue>& shards);
  void keep_best(const Request& request);
  void prune(int64_t saved) const;
  void warn_about_later_checkpoints(int64_t saved);
  void remove_unused_shards(const detail::FolderContents& found) const;

  // Constant after construction.
  const ProcessGroup group_;
  const std::string folder_;
  const CheckpointDirectoryOptions options_;
  const ProcessGroup writers_;  // only write() uses it
  const detail::CheckpointLoader loader_;
  FileDescriptor lock_;  // of rank 0

  // Of rank 0. While writer_ runs, only it uses them.
  std::optional<double> best_;
  bool has_warned_about_later_ = false;

  detail::Snapshot checkpoint_memory_, shard_memory_;
  std::thread writer_;
  // The result of the save that finish() has not reported: why it failed, or empty. Written by writer_, read after it
  // has been joined.
  std::optional<std::string> outcome_;
  std::exception_ptr error_;
  std::string last_error_;
};

// --- opening

CheckpointDirectory::Impl::Impl(ProcessGroup group, std::string folder, CheckpointDirectoryOptions options)
    : group_(std::move(group)),
      folder_(std::move(folder)),
      options_(std::move(options)),
      writers_(group_.new_group(detail::all_ranks(group_), {.timeout = kWriteLimit})),
      loader_(group_, folder_, options_.unit, options_.strict) {
  detail::run_and_agree(group_, [&] {
    check_options();
    if (is_first()) prepare_folder();
  });
  const auto owner = group_.broadcast_object(is_first() ? detail::read_owner(folder_) : std::string(), 0).toStringRef();
  detail::run_and_agree(group_, [&] {
    if (detail::read_owner(folder_) != owner)
      throw CheckpointError(group_.rank(), text("does not see the checkpoint folder ", folder_,
                                                " of rank 0; use a folder that all ranks share"));
  });
}

void CheckpointDirectory::Impl::check_options() const {
  if (folder_.empty()) throw UsageError(group_.rank(), "CheckpointDirectory: the folder's name is empty");
  if (options_.keep_last < 0 || options_.keep_every < 0)
    throw UsageError(group_.rank(), text("CheckpointDirectory: keep_last is ", options_.keep_last,
                                         " and keep_every is ", options_.keep_every, "; expected 0 or more"));
  if (options_.unit.empty() || options_.unit.find_first_of("/.") != std::string::npos)
    throw UsageError(group_.rank(), text("CheckpointDirectory: unit is '", options_.unit,
                                         "', expected a word that can be part of a file name, such as \"epoch\""));
}

void CheckpointDirectory::Impl::prepare_folder() {
  lock_ = detail::lock_folder(folder_);
  // No other process uses the folder: unfinished files belong to processes that have died.
  const auto found = contents();
  for (const auto& file : found.unfinished) detail::remove_file(in_folder(file));
  remove_unused_shards(found);
  if (found.has_best && !options_.best.empty()) read_best();
}

void CheckpointDirectory::Impl::read_best() {
  try {
    const auto best = load_checkpoint(in_folder(detail::kBestFile), {.map_location = c10::kMeta});
    if (const auto* metric = best.at(detail::kMetrics).find(options_.best)) best_ = metric->as_double();
  } catch (const Error& error) {
    log_warning(text("the metric of the best checkpoint is unknown: ", error.what()));
  }
}

// --- saving

bool CheckpointDirectory::Impl::save(int64_t number, const TrainingState& state,
                                     const std::map<std::string, double>& metrics) {
  if (number < 0)
    throw UsageError(group_.rank(), text("CheckpointDirectory::save: number is ", number, ", expected 0 or more"));
  const bool previous = finish();
  auto request = collect(number, state, metrics);
  if (!options_.asynchronous) {
    outcome_ = write(request);
    return finish() && previous;
  }
  detail::run_and_agree(group_, [&] {
    request.checkpoint = checkpoint_memory_.take(request.checkpoint);
    request.shard = shard_memory_.take(request.shard);
  });
  const auto shared = std::make_shared<Request>(std::move(request));
  const auto write_all = [this, shared] {
    try {
      outcome_ = write(*shared);
    } catch (...) {
      error_ = std::current_exception();
    }
  };
  try {
    writer_ = start_thread("saving a checkpoint", write_all);
  } catch (const SystemError& error) {  // the other ranks wait for this rank
    log_warning(text(error.what(), "; this rank writes its part of the checkpoint at once"));
    write_all();
  }
  return previous;
}

/// Waits for the background thread, and reports how its save ended.
bool CheckpointDirectory::Impl::finish() {
  if (writer_.joinable()) writer_.join();
  if (const auto error = std::exchange(error_, nullptr)) {
    last_error_ = message_of(error);
    std::rethrow_exception(error);
  }
  const auto outcome = std::exchange(outcome_, std::nullopt);
  if (!outcome) return true;
  last_error_ = *outcome;
  if (outcome->empty()) return true;
  if (options_.on_error == OnSaveError::kThrow) throw CheckpointError(group_.rank(), *outcome);
  if (is_first()) log_warning(text(*outcome, "; the training continues; ", describe_newest()));
  return false;
}

/// Describes the newest checkpoint that is left after a failed save.
std::string CheckpointDirectory::Impl::describe_newest() const {
  std::set<int64_t> numbers;
  try {
    numbers = contents().numbers;
  } catch (const Error&) {
    // The folder itself may be gone.
  }
  if (numbers.empty()) return text("there is no checkpoint in ", folder_);
  return text("the newest checkpoint is ", name(*numbers.rbegin()));
}

CheckpointDirectory::Impl::Request CheckpointDirectory::Impl::collect(
    int64_t number, const TrainingState& state, const std::map<std::string, double>& metrics) const {
  Request request{
      .number = number, .checkpoint = Value::dict(), .shard = Value::dict(), .digits = {}, .metrics = metrics};
  auto own = Value::dict(), values = Value::dict();
  detail::check_same_parts(group_, state, options_.unit);
  for (const auto& [name, metric] : metrics) values.set(name, metric);
  if (is_first())
    request.checkpoint = Value::dict({{detail::kVersion, LOCKSTEP_VERSION_STRING},
                                      {options_.unit, number},
                                      {detail::kMetrics, std::move(values)},
                                      {detail::kWorldSize, group_.size()}});
  for (const auto& part : state.parts()) {
    const bool is_sharded = options_.sharded && part.save_shard;
    // Saving a part may be collective, so the ranks agree after each that all of them continue.
    detail::run_and_agree(group_, [&] {
      detail::about_part("saving", part.name, [&] {
        auto value = is_sharded ? part.save_shard() : part.save(group_);
        if (!is_sharded && !part.is_per_rank && !is_first()) return;
        detail::check_can_be_saved(value);
        (is_sharded ? request.shard : part.is_per_rank ? own : request.checkpoint).set(part.name, std::move(value));
      });
    });
  }
  if (own.size() > 0) gather_per_rank(own, request.checkpoint);
  if (request.shard.size() > 0)
    request.digits = group_.broadcast_object(is_first() ? detail::random_digits() : std::string(), 0).toStringRef();
  return request;
}

/// Adds a list with the values of all ranks for each entry of `own`. Collective.
void CheckpointDirectory::Impl::gather_per_rank(const Value& own, Value& checkpoint) const {
  detail::MemorySink bytes;
  detail::run_and_agree(group_, [&] { detail::write_archive(bytes, own); });
  const auto all = group_.gather_object(bytes.take(), 0);
  detail::run_and_agree(group_, [&] {
    if (!is_first()) return;
    for (const auto& [name, value] : own.items()) checkpoint.set(name, Value::list());
    for (const auto& one : all) {
      const detail::MemorySource source(one.toStringRef());
      const auto values = detail::ArchiveReader(source).load({});
      for (const auto& [name, value] : values.items()) checkpoint.at(name).elements().push_back(value);
    }
  });
}

/// Writes a checkpoint. Returns, on all ranks, why it failed; empty if it did not. Collective over writers_.
std::string CheckpointDirectory::Impl::write(Request& request) {
  std::vector<c10::IValue> shards;
  if (request.shard.size() > 0) {
    std::string error, digest;
    const auto file = detail::shard_name(options_.unit, request.number, group_.rank(), group_.size(), request.digits);
    try {
      digest = save_checkpoint(in_folder(file), request.shard);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    shards = writers_.gather_object(
        c10::ivalue::Tuple::create({c10::IValue(error), c10::IValue(file), c10::IValue(digest)}), 0);
  }
  std::string error;
  if (is_first()) {
    try {
      publish(request, shards);
    } catch (const detail::NotDurable& failure) {  // the checkpoint has its name, so its shards stay
      error =
          text("checkpoint ", name(request.number), " may not be on disk: ", failure.what(), "; older ones are kept");
    } catch (const std::exception& failure) {
      error = text("checkpoint ", name(request.number), " was not saved: ", failure.what());
      for (const auto& shard : shards) detail::remove_file(in_folder(shard.toTupleRef().elements()[1].toStringRef()));
    }
  }
  return writers_.broadcast_object(error, 0).toStringRef();
}

/// Writes the file of rank 0, which makes the checkpoint visible, and then removes older checkpoints. Throws
/// NotDurable, and removes nothing, if the file may be lost.
void CheckpointDirectory::Impl::publish(Request& request, const std::vector<c10::IValue>& shards) {
  std::vector<ShardFile> files;
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    const auto& parts = shards[rank].toTupleRef().elements();
    if (const auto& error = parts[0].toStringRef(); !error.empty())
      throw CheckpointError(text("rank ", rank, ": ", error));
    files.push_back({parts[1].toStringRef(), parts[2].toStringRef()});
  }
  if (!files.empty()) request.checkpoint.set(detail::kShards, detail::list_of_shards(files));
  save_checkpoint(in_folder(name(request.number)), request.checkpoint);
  try {
    keep_best(request);
    prune(request.number);
    warn_about_later_checkpoints(request.number);
  } catch (const std::exception& error) {
    log_warning(text("checkpoint ", name(request.number), " is saved, but: ", error.what()));
  }
}

void CheckpointDirectory::Impl::keep_best(const Request& request) {
  const auto found = request.metrics.find(options_.best);
  if (options_.best.empty() || found == request.metrics.end()) return;
  const double metric = found->second;
  const bool is_better = !best_ || (options_.best_mode == MetricMode::kMax ? metric > *best_ : metric < *best_);
  if (std::isnan(metric) || !is_better) return;
  try {
    detail::link_file(in_folder(name(request.number)), in_folder(detail::kBestFile));
  } catch (const detail::NotDurable&) {  // the link refers to the new checkpoint
    best_ = metric;
    throw;
  }
  best_ = metric;
}

/// Removes checkpoints that are not to be kept, each before its shards: a checkpoint without its shards would count as
/// damaged.
void CheckpointDirectory::Impl::prune(int64_t saved) const {
  auto found = contents();
  for (int64_t number : detail::plan_removals(found.numbers, saved, options_.keep_last, options_.keep_every)) {
    detail::remove_file(in_folder(name(number)));
    found.numbers.erase(number);
  }
  remove_unused_shards(found);
}

/// Warns the user, once, about checkpoints that resume() would prefer to the checkpoint `saved`.
void CheckpointDirectory::Impl::warn_about_later_checkpoints(int64_t saved) {
  const auto found = contents().numbers;
  if (has_warned_about_later_ || found.empty() || *found.rbegin() <= saved) return;
  has_warned_about_later_ = true;
  log_warning(text("checkpoint ", name(saved), " is saved, but resume() loads ", name(*found.rbegin()),
                   " first; if that is of an earlier run, remove it, or use another folder"));
}

/// Removes shards that no checkpoint lists. Removes none if a checkpoint cannot be read: the shards may be its own.
void CheckpointDirectory::Impl::remove_unused_shards(const detail::FolderContents& found) const {
  if (found.shards.empty()) return;
  std::vector<std::string> names;
  if (found.has_best) names.push_back(detail::kBestFile);
  for (int64_t number : found.numbers) names.push_back(name(number));
  std::set<std::string> used;
  for (const auto& file : names) {
    try {
      for (const auto& shard : shards_of(load_checkpoint(in_folder(file), {.map_location = c10::kMeta})))
        used.insert(shard.file);
    } catch (const Error&) {
      return;  // resume() reports it to the user
    }
  }
  for (const auto& file : found.shards)
    if (!used.count(file)) detail::remove_file(in_folder(file));
}

// --- loading

int64_t CheckpointDirectory::Impl::resume(const TrainingState& state) {
  finish();
  std::vector<std::string> names;  // the newest last
  detail::run_and_agree(group_, [&] {
    if (!is_first()) return;
    for (int64_t number : contents().numbers) names.push_back(name(number));
  });
  std::vector<std::string> damage;
  const auto checkpoint = loader_.find_intact(std::move(names), damage);
  if (!checkpoint && damage.empty()) return 0;
  if (!checkpoint)
    throw CheckpointError(group_.rank(), text("no checkpoint in ", folder_, " is intact (", damage.size(),
                                              " damaged, see the warnings of rank 0; the newest: ", damage[0],
                                              "); to start from the beginning, remove them"));
  loader_.apply(*checkpoint, state);
  return checkpoint->value.at(options_.unit).as_int() + 1;
}

int64_t CheckpointDirectory::Impl::load(const std::string& file, const TrainingState& state, const char* remedy) {
  finish();
  std::vector<std::string> damage;
  const auto checkpoint = loader_.find_intact({file}, damage);
  if (!checkpoint) throw CheckpointError(group_.rank(), text(damage.at(0), "; ", remedy));
  loader_.apply(*checkpoint, state);
  return checkpoint->value.at(options_.unit).as_int() + 1;
}

// --- public

CheckpointDirectory::CheckpointDirectory(ProcessGroup group, std::string folder, CheckpointDirectoryOptions options)
    : impl_(std::make_unique<Impl>(std::move(group), std::move(folder), std::move(options))) {}

CheckpointDirectory::~CheckpointDirectory() = default;

bool CheckpointDirectory::save(int64_t number, const TrainingState& state,
                               const std::map<std::string, double>& metrics) {
  return impl_->save(number, state, metrics);
}

bool CheckpointDirectory::wait() {
  return impl_->finish();
}

int64_t CheckpointDirectory::resume(const TrainingState& state) {
  return impl_->resume(state);
}

int64_t CheckpointDirectory::load(int64_t number, const TrainingState& state) {
  return impl_->load(impl_->name(number), state, "load another one");
}

int64_t CheckpointDirectory::load_best(const TrainingState& state) {
  return impl_->load(
      detail::kBestFile, state,
      "it is written if options.best names a metric that save() receives; resume() loads the newest one");
}

const std::string& CheckpointDirectory::last_error() const {
  return impl_->last_error();
}

std::string CheckpointDirectory::path(int64_t number) const {
  return impl_->in_folder(impl_->name(number));
}

std::vector<int64_t> CheckpointDirectory::numbers() const {
  const auto found = impl_->contents().numbers;
  return {found.begin(), found.end()};
}

}  // namespace lockstep
