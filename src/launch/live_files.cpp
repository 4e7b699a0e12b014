#include "launch/live_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "base/file_descriptor.h"
#include "base/live_folder.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"
#include "rendezvous/process_id.h"

namespace lockstep {
namespace {

constexpr auto kBetweenUpdates = std::chrono::seconds(1);
constexpr auto kMaxEnd = std::chrono::seconds(2);

/// Returns the content of a small file; empty if it cannot be read.
std::string read_small_file(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file.is_open()) return "";
  std::array<char, PATH_MAX> bytes;
  const ssize_t got = ::read(file.get(), bytes.data(), bytes.size());
  return got > 0 ? std::string(bytes.data(), static_cast<size_t>(got)) : "";
}

double rounded_milliseconds(double seconds) {
  return std::round(seconds * 1e3) / 1e3;
}

}  // namespace

void OutputTail::add(const std::string& line) {
  kept_.append(line, 0, kMaxBytes / 2 - 1).append(1, '\n');
  if (kept_.size() <= kMaxBytes) return;
  kept_.erase(0, kept_.find('\n', kept_.size() - kMaxBytes / 2 - 1) + 1);
  has_file_ = false;
}

std::optional<OutputTail::Change> OutputTail::take_change() {
  if (has_file_ && in_file_ == kept_.size()) return std::nullopt;
  Change change{!has_file_, has_file_ ? kept_.substr(in_file_) : kept_};
  in_file_ = kept_.size();
  has_file_ = true;
  return change;
}

/// The files and changes that are written at one time.
struct LiveFiles::Batch {
  std::string folder;
  std::optional<LiveParticipants> participants;       // files of ranks and nodes that do not take part are removed
  std::map<std::string, OutputTail::Change> changes;  // by name

  /// Returns the first failure; empty if there was none.
  std::string write() const {
    auto failure = make_live_folder(folder);
    if (!failure.empty()) return failure;
    if (participants) remove_stale_live_files(folder, *participants);
    for (const auto& [name, change] : changes) {
      auto error = (change.is_whole ? replace_live_file : append_live_file)(folder, name, change.bytes);
      if (failure.empty()) failure = std::move(error);
    }
    return failure;
  }
};

struct LiveFiles::Writer {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_busy = false;     // guarded by mutex
  bool has_failed = false;  // guarded by mutex: since the last batch
  bool has_warned = false;  // guarded by mutex

  /// Blocks until the last batch is written, at most for `limit`. Returns whether it is written.
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, limit, [&] { return !is_busy; });
  }

  void finish(const std::string& failure) {
    std::lock_guard lock(mutex);
    is_busy = false;
    has_failed = has_failed || !failure.empty();
    changed.notify_all();
    if (failure.empty() || std::exchange(has_warned, true)) return;
    log_warning_async(text(failure, "; the job continues without the launcher's live files of its training run"));
  }
};

LiveFiles::LiveFiles(std::vector<std::string> command, const Plan& plan)
    : command_(std::move(command)),
      job_id_(plan.job_id),
      node_(plan.node),
      started_(unix_time()),
      writer_(std::make_shared<Writer>()),
      due_(Clock::now() + kBetweenUpdates) {
  prepare_background();
}

LiveFiles::~LiveFiles() {
  if (!has_ended_) write_last();
}

void LiveFiles::begin(const Layout& layout) {
  layout_ = layout;
  workers_.clear();
  is_new_folder_ = true;
}

void LiveFiles::update(const std::string& note_file, std::vector<Worker> workers) {
  workers_ = std::move(workers);
  due_ = Clock::now() + kBetweenUpdates;
  read_note(note_file);
  write();
}

void LiveFiles::end(const std::string& report) {
  report_ = report;
  write_last();
}

// A background thread may still be writing the previous state.
void LiveFiles::write_last() {
  has_ended_ = true;
  if (folder_.empty()) return;
  if (writer_->wait(kMaxEnd) && write()) writer_->wait(kMaxEnd);
}

void LiveFiles::read_note(const std::string& note_file) {
  const auto run_folder = note_file.empty() ? "" : read_small_file(note_file);
  if (!run_folder.starts_with('/') || live_folder(run_folder) == folder_) return;
  folder_ = live_folder(run_folder);
  is_new_folder_ = true;
  for (auto& [rank, output] : outputs_) output.forget_file();
}

/// Returns whether the background thread is writing now.
bool LiveFiles::write() {
  if (folder_.empty()) return false;
  {
    std::lock_guard lock(writer_->mutex);
    if (writer_->is_busy) return false;
    writer_->is_busy = true;
    if (std::exchange(writer_->has_failed, false))
      for (auto& [rank, output] : outputs_) output.forget_file();
  }
  Batch batch{folder_, {}, {}};
  if (std::exchange(is_new_folder_, false) && node_.rank == 0)
    batch.participants = {.ranks = INT_MAX, .outputs = layout_.world_size, .nodes = node_.nodes};
  for (auto& [rank, output] : outputs_)
    if (auto change = output.take_change()) batch.changes[live_output_file(rank)] = std::move(*change);
  batch.changes[live_node_file(node_.rank)] = {true, node_to_json()};
  try {
    run_in_background("the live files of a training run",
                      [writer = writer_, batch = std::move(batch)] { writer->finish(batch.write()); });
  } catch (const Error& error) {
    writer_->finish(error.what());
  }
  return true;
}

std::string LiveFiles::node_to_json() const {
  using Json = nlohmann::ordered_json;
  const auto process = this_process();
  Json json{{"format", kLiveFormat},
            {"job", job_id_},
            {"attempt", layout_.generation},
            {"node", node_.rank},
            {"nodes", node_.nodes},
            {"host", process.host},
            {"pid", process.pid},
            {"command", command_},
            {"started", rounded_milliseconds(started_)},
            {"updated", rounded_milliseconds(unix_time())},
            {"state", has_ended_ ? "ended" : "running"},
            {"workers", Json::array()}};
  for (const auto& worker : workers_)
    json["workers"].push_back({{"rank", worker.rank},
                               {"local_rank", worker.local_rank},
                               {"pid", worker.pid},
                               {"state", worker.has_ended ? "ended" : "running"},
                               {"failed", worker.has_failed},
                               {"how", worker.description},
                               {"seconds", rounded_milliseconds(worker.seconds)},
                               {"uncaught", worker.uncaught}});
  json["report"] = report_.empty() ? Json() : Json::parse(report_, nullptr, /*allow_exceptions=*/false);
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace lockstep
