// Overview.
//
// save() collects the state on all ranks (Impl::collect): rank 0 gets the whole checkpoint as a Value, and each rank
// its shard. If the save is asynchronous, the values are copied into memory of their own. Then every rank runs
// Impl::write(), on its own thread or on a background thread: ranks write their shards, rank 0 learns from a group that
// only these calls use whether all of them succeeded, writes its file, which publishes the checkpoint, and tells all
// ranks the result. So every rank knows how the save ended, and an asynchronous save needs no calls of the user's
// threads.

#include <lockstep/checkpoint_directory.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "base/error.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"
#include "checkpoint/agree.h"
#include "checkpoint/archive.h"
#include "checkpoint/folder.h"
#include "checkpoint/shards.h"
#include "checkpoint/snapshot.h"

namespace lockstep {
namespace {

constexpr const char* kMetrics = "metrics";
constexpr const char* kWorldSize = "world_size";
constexpr const char* kVersion = "lockstep";
// Writing may take long on a slow disk. A rank that dies is noticed at once, whatever the time limit.
constexpr auto kWriteLimit = std::chrono::hours(24);

std::vector<int> all_ranks(const ProcessGroup& group) {
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

class CheckpointDirectory::Impl {
 public:
  Impl(ProcessGroup group, std::string folder, CheckpointDirectoryOptions options);
  ~Impl() {
    if (writer_.joinable()) writer_.join();
    if (error_) failure_ = message_of(error_);
    if (!failure_.empty() && is_first()) log_warning(failure_);
  }

  bool save(int64_t number, const TrainingState& state, const std::map<std::string, double>& metrics);
  bool finish();
  int64_t resume(const TrainingState& state);
  int64_t load_best(const TrainingState& state);
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
  void gather_per_rank(const Value& mine, Value& checkpoint) const;
  std::string write(Request& request);
  void publish(Request& request, const std::vector<c10::IValue>& shards);
  void keep_best(const Request& request);
  void prune() const;
  void remove_unused_shards(const detail::FolderContents& found) const;
  std::set<std::string> referenced_shards(const std::set<int64_t>& numbers) const;

  std::optional<Value> find_intact(std::vector<std::string> names) const;
  std::optional<Value> read_first_intact(std::vector<std::string>& names, std::string& chosen, int& damaged) const;
  std::string verify_shards(const std::vector<detail::ShardFile>& shards) const;
  void apply(const Value& checkpoint, const TrainingState& state) const;
  void apply_part(const detail::StatePart& part, const Value& checkpoint) const;

  // Constant after construction.
  const ProcessGroup group_;
  const std::string folder_;
  const CheckpointDirectoryOptions options_;
  const ProcessGroup writers_;  // only write() uses it
  FileDescriptor lock_;         // of rank 0

  std::optional<double> best_;  // of rank 0; while writer_ runs, only it uses best_
  detail::Snapshot checkpoint_memory_, shard_memory_;
  std::thread writer_;
  // Written by writer_, read after it has been joined.
  std::string failure_;
  std::exception_ptr error_;
};

// --- opening

CheckpointDirectory::Impl::Impl(ProcessGroup group, std::string folder, CheckpointDirectoryOptions options)
    : group_(std::move(group)),
      folder_(std::move(folder)),
      options_(std::move(options)),
      writers_(group_.new_group(all_ranks(group_), {.timeout = kWriteLimit})) {
  check_options();
  detail::run_and_agree(group_, [&] {
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
  // Nobody else uses the folder: what is unfinished belongs to processes that have died.
  const auto found = contents();
  for (const auto& file : found.unfinished) detail::remove_file(in_folder(file));
  remove_unused_shards(found);
  if (found.has_best && !options_.best.empty()) read_best();
}

void CheckpointDirectory::Impl::read_best() {
  try {
    const auto best = load_checkpoint(in_folder(detail::kBestFile), {.map_location = c10::kMeta});
    if (const auto* metric = best.at(kMetrics).find(options_.best)) best_ = metric->as_double();
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
    failure_ = write(request);
    return finish() && previous;
  }
  detail::run_and_agree(group_, [&] {
    request.checkpoint = checkpoint_memory_.take(request.checkpoint);
    request.shard = shard_memory_.take(request.shard);
  });
  writer_ = start_thread("saving a checkpoint", [this, request = std::move(request)]() mutable {
    try {
      failure_ = write(request);
    } catch (...) {
      error_ = std::current_exception();
    }
  });
  return previous;
}

/// Waits for the background thread, and reports how its save ended.
bool CheckpointDirectory::Impl::finish() {
  if (writer_.joinable()) writer_.join();
  if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  const auto failure = std::exchange(failure_, "");
  if (failure.empty()) return true;
  if (options_.on_error == OnSaveError::kThrow) throw CheckpointError(group_.rank(), failure);
  if (is_first()) log_warning(text(failure, "; earlier checkpoints are intact, training continues"));
  return false;
}

CheckpointDirectory::Impl::Request CheckpointDirectory::Impl::collect(
    int64_t number, const TrainingState& state, const std::map<std::string, double>& metrics) const {
  Request request{
      .number = number, .checkpoint = Value::dict(), .shard = Value::dict(), .digits = {}, .metrics = metrics};
  auto mine = Value::dict();
  detail::run_and_agree(group_, [&] {
    auto values = Value::dict();
    for (const auto& [name, metric] : metrics) values.set(name, metric);
    if (is_first()) {
      request.checkpoint = Value::dict({{kVersion, LOCKSTEP_VERSION_STRING},
                                        {options_.unit, number},
                                        {kMetrics, std::move(values)},
                                        {kWorldSize, group_.size()}});
    }
    for (const auto& part : state.parts()) {
      if (part.name == kVersion || part.name == kMetrics || part.name == kWorldSize || part.name == detail::kShards)
        throw UsageError(text("TrainingState: the name '", part.name, "' is used by CheckpointDirectory; rename it"));
      if (part.name == options_.unit)
        throw UsageError(text("TrainingState: '", part.name, "' is the number that save() is called with and resume() ",
                              "returns; leave it out, rename it, or choose another unit for the directory"));
      if (options_.sharded && part.save_shard) {
        request.shard.set(part.name, part.save_shard());
      } else if (part.is_per_rank) {
        mine.set(part.name, part.save(group_));
      } else {
        auto value = part.save(group_);
        if (is_first()) request.checkpoint.set(part.name, std::move(value));
      }
    }
  });
  if (mine.size() > 0) gather_per_rank(mine, request.checkpoint);
  if (request.shard.size() > 0)
    request.digits = group_.broadcast_object(is_first() ? detail::random_digits() : std::string(), 0).toStringRef();
  return request;
}

/// Adds a list with the values of all ranks for each entry of `mine`. Collective.
void CheckpointDirectory::Impl::gather_per_rank(const Value& mine, Value& checkpoint) const {
  detail::MemorySink bytes;
  detail::run_and_agree(group_, [&] { detail::write_archive(bytes, mine); });
  const auto all = group_.gather_object(bytes.take(), 0);
  if (!is_first()) return;
  for (const auto& [name, value] : mine.items()) checkpoint.set(name, Value::list());
  for (const auto& one : all) {
    const detail::MemorySource source(one.toStringRef());
    const auto values = detail::ArchiveReader(source).load({});
    for (const auto& [name, value] : values.items())
      const_cast<Value*>(checkpoint.find(name))->elements().push_back(value);
  }
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
    } catch (const std::exception& failure) {
      error = text("checkpoint ", name(request.number), " was not saved: ", failure.what());
      for (const auto& shard : shards) detail::remove_file(in_folder(shard.toTupleRef().elements()[1].toStringRef()));
    }
  }
  return writers_.broadcast_object(error, 0).toStringRef();
}

/// Writes the file of rank 0, which makes the checkpoint visible.
void CheckpointDirectory::Impl::publish(Request& request, const std::vector<c10::IValue>& shards) {
  std::vector<detail::ShardFile> files;
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
    prune();
  } catch (const Error& error) {
    log_warning(text("checkpoint ", name(request.number), " is saved, but: ", error.what()));
  }
}

void CheckpointDirectory::Impl::keep_best(const Request& request) {
  const auto found = request.metrics.find(options_.best);
  if (options_.best.empty() || found == request.metrics.end()) return;
  const double metric = found->second;
  const bool is_better = !best_ || (options_.better == Better::kHigher ? metric > *best_ : metric < *best_);
  if (std::isnan(metric) || !is_better) return;
  detail::link_file(in_folder(name(request.number)), in_folder(detail::kBestFile));
  best_ = metric;
}

/// Removes checkpoints that are not to be kept, each before its shards: a checkpoint without its shards would be taken
/// for a damaged one.
void CheckpointDirectory::Impl::prune() const {
  auto found = contents();
  for (int64_t number : detail::plan_removals(found.numbers, options_.keep_last, options_.keep_every)) {
    detail::remove_file(in_folder(name(number)));
    found.numbers.erase(number);
  }
  remove_unused_shards(found);
}

void CheckpointDirectory::Impl::remove_unused_shards(const detail::FolderContents& found) const {
  if (found.shards.empty()) return;
  const auto used = referenced_shards(found.numbers);
  for (const auto& file : found.shards)
    if (!used.count(file)) detail::remove_file(in_folder(file));
}

/// Returns the shards of these checkpoints and of the best one.
std::set<std::string> CheckpointDirectory::Impl::referenced_shards(const std::set<int64_t>& numbers) const {
  std::set<std::string> files;
  std::vector<std::string> names{detail::kBestFile};
  for (int64_t number : numbers) names.push_back(name(number));
  for (const auto& file : names) {
    try {
      for (const auto& shard : detail::shards_of(load_checkpoint(in_folder(file), {.map_location = c10::kMeta})))
        files.insert(shard.file);
    } catch (const Error&) {
      // Damaged or missing: resume() says so.
    }
  }
  return files;
}

// --- loading

int64_t CheckpointDirectory::Impl::resume(const TrainingState& state) {
  finish();
  std::vector<std::string> names;  // the newest last
  detail::run_and_agree(group_, [&] {
    if (!is_first()) return;
    for (int64_t number : contents().numbers) names.push_back(name(number));
  });
  const auto checkpoint = find_intact(std::move(names));
  if (!checkpoint) return 0;
  apply(*checkpoint, state);
  return checkpoint->at(options_.unit).as_int() + 1;
}

int64_t CheckpointDirectory::Impl::load_best(const TrainingState& state) {
  finish();
  const auto checkpoint = find_intact({detail::kBestFile});
  apply(checkpoint.value(), state);
  return checkpoint->at(options_.unit).as_int() + 1;
}

/// Returns, on all ranks, the last of the named checkpoints that is intact. `names` is used on rank 0. Returns none if
/// there are no names; throws CheckpointError if none is intact. Collective.
std::optional<Value> CheckpointDirectory::Impl::find_intact(std::vector<std::string> names) const {
  int damaged = 0;
  for (;;) {
    std::string chosen;
    std::optional<Value> checkpoint;
    detail::run_and_agree(group_, [&] {
      if (is_first()) checkpoint = read_first_intact(names, chosen, damaged);
    });
    chosen = group_.broadcast_object(chosen, 0).toStringRef();
    damaged = group_.broadcast(damaged, 0);
    if (chosen.empty() && damaged == 0) return std::nullopt;
    if (chosen.empty())
      throw CheckpointError(group_.rank(),
                            text("no checkpoint in ", folder_, " is intact (", damaged,
                                 " damaged, see the warnings of rank 0); remove them to start from the beginning"));
    // Rank 0 has compared the file with its checksums.
    detail::run_and_agree(group_, [&] {
      if (!is_first()) checkpoint = load_checkpoint(in_folder(chosen), {.verify = false});
    });
    const auto wrong = verify_shards(detail::shards_of(*checkpoint));
    if (wrong.empty()) return checkpoint;
    ++damaged;
    if (is_first()) log_warning(text("checkpoint ", in_folder(chosen), " is skipped: ", wrong));
  }
}

/// Loads the last checkpoint that is intact, and removes it and those after it from `names`.
std::optional<Value> CheckpointDirectory::Impl::read_first_intact(std::vector<std::string>& names, std::string& chosen,
                                                                  int& damaged) const {
  while (!names.empty()) {
    const auto name = names.back();
    names.pop_back();
    try {
      auto checkpoint = load_checkpoint(in_folder(name));
      checkpoint.at(options_.unit).as_int();
      chosen = name;
      return checkpoint;
    } catch (const Error& error) {
      ++damaged;
      log_warning(text(error.what(), "; it is skipped"));
    }
  }
  return std::nullopt;
}

/// Returns, on all ranks, what is wrong with the shards; empty if nothing is. The ranks divide the files. Collective.
std::string CheckpointDirectory::Impl::verify_shards(const std::vector<detail::ShardFile>& shards) const {
  if (shards.empty()) return "";
  std::string wrong;
  for (size_t i = static_cast<size_t>(group_.rank()); i < shards.size() && wrong.empty();
       i += static_cast<size_t>(group_.size()))
    wrong = detail::verify_shard(folder_, shards[i]);
  for (const auto& of_rank : group_.all_gather_object(wrong))
    if (!of_rank.toStringRef().empty()) return of_rank.toStringRef();
  return "";
}

void CheckpointDirectory::Impl::apply(const Value& checkpoint, const TrainingState& state) const {
  detail::run_and_agree(group_, [&] {
    for (const auto& part : state.parts()) {
      try {
        apply_part(part, checkpoint);
      } catch (const Error&) {
        rethrow_with_prefix(std::current_exception(), text("loading '", part.name, "': "));
      }
    }
  });
  const auto saved = checkpoint.at(kWorldSize).as_int();
  if (is_first() && saved != group_.size())
    log_info(text("the checkpoint was saved by ", saved, " ranks and is continued by ", group_.size()));
}

void CheckpointDirectory::Impl::apply_part(const detail::StatePart& part, const Value& checkpoint) const {
  const auto shards = detail::shards_of(checkpoint);
  if (!shards.empty() && !checkpoint.contains(part.name) && !part.is_per_rank) {
    const auto read = [&](size_t shard, const LoadOptions& options) {
      auto unverified = options;
      unverified.verify = false;  // verify_shards() has
      return load_checkpoint(in_folder(shards.at(shard).file), unverified).at(part.name);
    };
    if (part.load_shards) return part.load_shards(shards.size(), read);
    std::vector<Value> all;
    for (size_t i = 0; i < shards.size(); ++i) all.push_back(read(i, {}));
    return part.load(detail::merge_shards(all), group_);
  }
  const auto& value = checkpoint.at(part.name);
  if (!part.is_per_rank) return part.load(value, group_);
  if (const auto rank = static_cast<size_t>(group_.rank()); rank < value.size())
    part.load(value.elements()[rank], group_);
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

int64_t CheckpointDirectory::load_best(const TrainingState& state) {
  return impl_->load_best(state);
}

std::string CheckpointDirectory::path(int64_t number) const {
  return impl_->in_folder(impl_->name(number));
}

std::vector<int64_t> CheckpointDirectory::numbers() const {
  const auto found = impl_->contents().numbers;
  return {found.begin(), found.end()};
}

}  // namespace lockstep
