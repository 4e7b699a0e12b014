#include "live/live_files.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "base/text.h"
#include "live/file_text.h"

namespace lockstep::live {
namespace {

using Json = nlohmann::json;

constexpr const char* kLive = "live";  // the folder of the files
constexpr int64_t kFormat = 1;
constexpr size_t kMaxRankBytes = size_t{1} << 20;
constexpr size_t kMaxNodeBytes = size_t{8} << 20;  // of a node with thousands of workers
constexpr int64_t kMaxRanks = 1 << 20;

// --- values: an absent value, or a value of another type, is the default

const Json* find(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

std::optional<double> number_in(const Json& object, const char* key) {
  const Json* value = find(object, key);
  if (value == nullptr || !value->is_number()) return std::nullopt;
  const double number = value->get<double>();
  return std::isfinite(number) ? std::optional(number) : std::nullopt;
}

std::optional<int64_t> integer_in(const Json& object, const char* key) {
  constexpr double kLargest = 9007199254740992;  // every integer up to 2^53 is a double
  const auto number = number_in(object, key);
  if (!number || std::abs(*number) > kLargest) return std::nullopt;
  return static_cast<int64_t>(*number);
}

std::optional<double> share_in(const Json& object, const char* key) {
  const auto number = number_in(object, key);
  return number ? std::optional(std::clamp(*number, 0.0, 1.0)) : std::nullopt;
}

std::string string_in(const Json& object, const char* key) {
  const Json* value = find(object, key);
  return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
}

bool flag_in(const Json& object, const char* key) {
  const Json* value = find(object, key);
  return value != nullptr && value->is_boolean() && value->get<bool>();
}

/// The elements of a list; none if there is no list.
const Json& list_in(const Json& object, const char* key) {
  static const Json kNone = Json::array();
  const Json* value = find(object, key);
  return value != nullptr && value->is_array() ? *value : kNone;
}

/// The object, or null.
const Json* object_in(const Json& object, const char* key) {
  const Json* value = find(object, key);
  return value != nullptr && value->is_object() ? value : nullptr;
}

std::vector<std::string> strings_in(const Json& object, const char* key) {
  std::vector<std::string> strings;
  for (const auto& element : list_in(object, key))
    if (element.is_string()) strings.push_back(element.get<std::string>());
  return strings;
}

// --- the values that every file must have

template <class Value>
Value required(const std::optional<Value>& value, const char* key) {
  if (!value) throw Error(fmt::format("it has no number \"{}\"", key));
  return *value;
}

Json parse_object(std::string_view text) {
  if (text.empty()) throw Error("it is empty");
  Json object;
  try {
    object = Json::parse(text.begin(), text.end());
  } catch (const Json::parse_error& error) {
    throw Error(fmt::format("it is damaged: not valid JSON at byte {} of {}", error.byte, text.size()));
  } catch (const Json::exception&) {
    throw Error("it is damaged: a number is out of range");
  }
  if (!object.is_object()) throw Error("it is not a JSON object");
  const auto format = required(integer_in(object, "format"), "format");
  if (format > kFormat)
    throw Error(fmt::format("its format is {}, and this lockstep reads format {}: use the lockstep of the job", format,
                            kFormat));
  if (format != kFormat) throw Error(fmt::format("its format is {}, not {}", format, kFormat));
  return object;
}

int64_t required_number(const Json& object, const char* key) {
  const auto number = required(integer_in(object, key), key);
  if (number < 0 || number >= kMaxRanks) throw Error(fmt::format("its \"{}\" is {}", key, number));
  return number;
}

std::string required_state(const Json& object, const std::vector<std::string>& known) {
  auto state = string_in(object, "state");
  if (std::find(known.begin(), known.end(), state) == known.end())
    throw Error(fmt::format("its \"state\" is {}, not one of {}",
                            state.size() > 40 ? "a long text" : "\"" + printable(state) + "\"", enumerate(known)));
  return state;
}

// --- parts

std::optional<BlockedCall> call_in(const Json& object) {
  const Json* call = object_in(object, "call");
  if (call == nullptr) return std::nullopt;
  return BlockedCall{.operation = string_in(*call, "operation"),
                     .group = string_in(*call, "group"),
                     .where = string_in(*call, "where"),
                     .number = integer_in(*call, "number").value_or(0),
                     .seconds = std::max(0.0, number_in(*call, "seconds").value_or(0))};
}

std::optional<GpuFigures> gpu_in(const Json& object) {
  const Json* gpu = object_in(object, "gpu");
  if (gpu == nullptr) return std::nullopt;
  return GpuFigures{.name = string_in(*gpu, "name"),
                    .utilization = share_in(*gpu, "utilization"),
                    .memory_used_bytes = integer_in(*gpu, "memory_used_bytes").value_or(0),
                    .memory_total_bytes = integer_in(*gpu, "memory_total_bytes").value_or(0)};
}

std::optional<RankFailure> failure_in(const Json& object) {
  const Json* failure = object_in(object, "failure");
  if (failure == nullptr) return std::nullopt;
  RankFailure result{.kind = string_in(*failure, "kind"),
                     .message = string_in(*failure, "message"),
                     .flight_recorder = string_in(*failure, "flight_recorder")};
  for (const auto& call : list_in(*failure, "calls"))
    if (call.is_object())
      result.calls.push_back({.what = string_in(call, "what"),
                              .state = string_in(call, "state"),
                              .group = string_in(call, "group"),
                              .site = string_in(call, "site"),
                              .started_seconds_ago = number_in(call, "started_s_ago"),
                              .took_seconds = number_in(call, "took_s")});
  return result;
}

TimeShares shares_in(const Json& object) {
  const Json* time = object_in(object, "time");
  if (time == nullptr) return {};
  return {.forward = share_in(*time, "forward"),
          .backward = share_in(*time, "backward"),
          .communication = share_in(*time, "communication"),
          .data = share_in(*time, "data"),
          .other = share_in(*time, "other")};
}

std::vector<WorkerEntry> workers_in(const Json& object) {
  std::vector<WorkerEntry> workers;
  for (const auto& worker : list_in(object, "workers")) {
    const auto rank = integer_in(worker, "rank");
    if (!rank || *rank < 0 || *rank >= kMaxRanks) continue;
    workers.push_back({.rank = *rank,
                       .local_rank = integer_in(worker, "local_rank").value_or(0),
                       .pid = integer_in(worker, "pid").value_or(0),
                       .has_ended = string_in(worker, "state") == "ended",
                       .has_failed = flag_in(worker, "failed"),
                       .how = string_in(worker, "how"),
                       .uncaught = string_in(worker, "uncaught"),
                       .seconds = number_in(worker, "seconds").value_or(0)});
  }
  return workers;
}

std::optional<LaunchSummary> report_in(const Json& object) {
  const Json* report = object_in(object, "report");
  if (report == nullptr) return std::nullopt;
  LaunchSummary summary{.exit_code = integer_in(*report, "exit_code").value_or(0),
                        .restarts = integer_in(*report, "restarts").value_or(0),
                        .seconds = number_in(*report, "seconds").value_or(0),
                        .message = string_in(*report, "message"),
                        .notice = string_in(*report, "notice"),
                        .remedy = string_in(*report, "remedy")};
  if (const Json* culprit = object_in(*report, "culprit")) {
    summary.culprit_rank = integer_in(*culprit, "rank").value_or(0);
    summary.culprit_host = string_in(*culprit, "host");
    summary.culprit_how = string_in(*culprit, "how");
    summary.culprit_uncaught = string_in(*culprit, "uncaught");
    summary.culprit_pid = integer_in(*culprit, "pid").value_or(0);
    summary.culprit_lines = strings_in(*culprit, "stderr_tail");
  }
  return summary;
}

// --- files

/// 3 for "rank-00003.json" with the kind "rank-"; none for other names.
std::optional<int64_t> file_number(std::string_view name, std::string_view kind) {
  constexpr std::string_view kEnd = ".json";
  if (!name.starts_with(kind) || !name.ends_with(kEnd) || name.size() <= kind.size() + kEnd.size()) return std::nullopt;
  const auto number = parse_number<int64_t>(name.substr(kind.size(), name.size() - kind.size() - kEnd.size()));
  return number && *number >= 0 ? number : std::nullopt;
}

void add_rank_file(LiveFiles& files, const RunFolder& run, const std::filesystem::path& name, int64_t number) {
  const auto bytes = read_bytes(run, name, kMaxRankBytes);
  if (!bytes) return;  // removed since the folder was listed
  auto file = parse_rank_file(*bytes);
  if (file.rank != number) throw Error(fmt::format("its \"rank\" is {}", file.rank));
  files.ranks.emplace(number, std::move(file));
}

void add_node_file(LiveFiles& files, const RunFolder& run, const std::filesystem::path& name, int64_t number) {
  const auto bytes = read_bytes(run, name, kMaxNodeBytes);
  if (!bytes) return;
  auto file = parse_node_file(*bytes);
  if (file.node != number) throw Error(fmt::format("its \"node\" is {}", file.node));
  files.nodes.emplace(number, std::move(file));
}

}  // namespace

RankFile parse_rank_file(std::string_view text) {
  const auto object = parse_object(text);
  RankFile file;
  file.rank = required_number(object, "rank");
  file.updated = required(number_in(object, "updated"), "updated");
  file.reported = required_state(object, {"running", "finished", "stopped", "failed"});
  file.job = string_in(object, "job");
  file.host = string_in(object, "host");
  file.device = string_in(object, "device");
  file.attempt = integer_in(object, "attempt").value_or(0);
  file.world_size = integer_in(object, "world_size").value_or(0);
  file.local_rank = integer_in(object, "local_rank").value_or(0);
  file.pid = integer_in(object, "pid").value_or(0);
  file.started = number_in(object, "started").value_or(file.updated);
  file.step = integer_in(object, "step").value_or(0);
  file.batch = integer_in(object, "batch").value_or(0);
  file.batches = integer_in(object, "batches").value_or(0);
  file.epoch = number_in(object, "epoch").value_or(0);
  file.epochs = number_in(object, "epochs").value_or(0);
  file.steps_per_second = number_in(object, "steps_per_second");
  file.samples_per_second = number_in(object, "samples_per_second");
  file.time = shares_in(object);
  file.call = call_in(object);
  if (const Json* memory = object_in(object, "memory")) file.resident_bytes = integer_in(*memory, "resident_bytes");
  file.gpu = gpu_in(object);
  file.failure = failure_in(object);
  return file;
}

NodeFile parse_node_file(std::string_view text) {
  const auto object = parse_object(text);
  NodeFile file;
  file.node = required_number(object, "node");
  file.updated = required(number_in(object, "updated"), "updated");
  file.has_ended = required_state(object, {"running", "ended"}) == "ended";
  file.job = string_in(object, "job");
  file.host = string_in(object, "host");
  file.attempt = integer_in(object, "attempt").value_or(0);
  file.nodes = integer_in(object, "nodes").value_or(1);
  file.pid = integer_in(object, "pid").value_or(0);
  file.command = strings_in(object, "command");
  file.started = number_in(object, "started").value_or(file.updated);
  file.workers = workers_in(object);
  file.report = report_in(object);
  return file;
}

LiveFiles read_live_files(const std::filesystem::path& path) {
  LiveFiles files;
  const RunFolder run(path);
  std::vector<std::string> names;
  try {
    names = run.names(kLive);
  } catch (const Error& error) {
    files.problems.push_back(fmt::format("{}: {}", kLive, error.what()));
  }
  for (const auto& name : names) {
    const auto rank = file_number(name, "rank-");
    const auto node = file_number(name, "node-");
    const auto file = std::filesystem::path(kLive) / name;
    try {
      if (rank) add_rank_file(files, run, file, *rank);
      if (node) add_node_file(files, run, file, *node);
    } catch (const Error& error) {
      files.problems.push_back(fmt::format("{}: {}", file.string(), error.what()));
      if (rank && *rank < kMaxRanks) files.unreadable_ranks[*rank] = error.what();
    }
  }
  return files;
}

}  // namespace lockstep::live
