#include "live/open_metrics.h"

#include <cmath>
#include <functional>
#include <optional>

#include <fmt/format.h>

namespace lockstep::live {
namespace {

constexpr double kListedSeconds = 3600;

/// A label's value in quotes.
std::string quoted(const std::string& value) {
  std::string result = "\"";
  for (char letter : printable(value)) {
    if (letter == '"' || letter == '\\') result += '\\';
    result += letter;
  }
  return result + '"';
}

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

/// A family of samples: its header and a line for each sample.
class Family {
 public:
  Family(std::string name, const std::string& unit, const std::string& help) : name_(std::move(name)) {
    text_ = fmt::format("# TYPE {} gauge\n", name_);
    if (!unit.empty()) text_ += fmt::format("# UNIT {} {}\n", name_, unit);
    text_ += fmt::format("# HELP {} {}\n", name_, help);
  }

  void add(const std::string& labels, double value) {
    text_ += fmt::format("{}{{{}}} {}\n", name_, labels, number_text(value));
    is_empty_ = false;
  }

  std::string text() const { return is_empty_ ? "" : text_; }

 private:
  const std::string name_;
  std::string text_;
  bool is_empty_ = true;
};

/// One value of each rank, such as its step.
struct RankGauge {
  const char *name, *unit, *help;
  std::function<std::optional<double>(const RankView&)> value;
};

std::optional<double> as_double(const std::optional<int64_t>& number) {
  return number ? std::optional(static_cast<double>(*number)) : std::nullopt;
}

const std::vector<RankGauge>& rank_gauges() {
  static const std::vector<RankGauge> kGauges{
      {"up", "", "Whether the rank runs and has news.",
       [](const RankView& rank) { return rank.state == RankState::kRunning ? 1.0 : 0.0; }},
      {"straggler", "", "Whether the other ranks wait for this one.",
       [](const RankView& rank) { return rank.is_straggler ? 1.0 : 0.0; }},
      {"failed", "", "Whether the rank has failed.",
       [](const RankView& rank) { return rank.state == RankState::kFailed ? 1.0 : 0.0; }},
      {"news_age_seconds", "seconds", "Time since the rank wrote its live file.",
       [](const RankView& rank) { return rank.has_file ? std::optional(rank.age) : std::nullopt; }},
      {"step", "", "Steps of the run.",
       [](const RankView& rank) {
         return rank.has_file ? std::optional(static_cast<double>(rank.step)) : std::nullopt;
       }},
      {"samples_per_second", "", "Samples per second of the rank.",
       [](const RankView& rank) { return rank.samples_per_second; }},
      {"memory_resident_bytes", "bytes", "Resident memory of the process.",
       [](const RankView& rank) { return as_double(rank.resident_bytes); }},
      {"gpu_utilization_ratio", "ratio", "Utilization of the GPU of the rank.",
       [](const RankView& rank) { return rank.gpu ? rank.gpu->utilization : std::nullopt; }},
      {"gpu_memory_used_bytes", "bytes", "Memory in use on the GPU of the rank.", [](const RankView& rank) {
         return rank.gpu ? std::optional(static_cast<double>(rank.gpu->memory_used_bytes)) : std::nullopt;
       }}};
  return kGauges;
}

/// A rank with its labels.
struct ListedRank {
  const RankView* rank;
  std::string labels;
};

std::vector<ListedRank> listed_ranks(const std::vector<RunView>& runs, double now) {
  std::vector<ListedRank> listed;
  for (const auto& run : runs) {
    if (!run.job.is_live && now - run.job.updated > kListedSeconds) continue;
    for (const auto& rank : run.job.ranks)
      listed.push_back(
          {&rank, fmt::format("run={},rank=\"{}\",host={}", quoted(run.name), rank.rank, quoted(rank.host))});
  }
  return listed;
}

std::string time_shares(const std::vector<ListedRank>& ranks) {
  Family family("lockstep_rank_time_share", "", "Share of the time of the last interval, 0 to 1.");
  for (const auto& [rank, labels] : ranks) {
    const auto add = [&](const char* part, const std::optional<double>& share) {
      if (share) family.add(fmt::format("{},part=\"{}\"", labels, part), *share);
    };
    add("forward", rank->time.forward);
    add("backward", rank->time.backward);
    add("communication", rank->time.communication);
    add("data", rank->time.data);
    add("other", rank->time.other);
  }
  return family.text();
}

std::string run_metrics(const std::vector<RunView>& runs) {
  Family family("lockstep_run_metric", "", "Last value of a metric of the run.");
  for (const auto& run : runs)
    for (const auto& [name, value] : run.metrics)
      family.add(fmt::format("run={},metric={}", quoted(run.name), quoted(name)), value);
  return family.text();
}

}  // namespace

std::string open_metrics(const std::vector<RunView>& runs, double now) {
  const auto ranks = listed_ranks(runs, now);
  std::string text;
  for (const auto& gauge : rank_gauges()) {
    Family family(fmt::format("lockstep_rank_{}", gauge.name), gauge.unit, gauge.help);
    for (const auto& [rank, labels] : ranks)
      if (const auto value = gauge.value(*rank)) family.add(labels, *value);
    text += family.text();
  }
  return text + time_shares(ranks) + run_metrics(runs) + "# EOF\n";
}

}  // namespace lockstep::live
