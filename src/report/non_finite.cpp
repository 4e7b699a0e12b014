#include "report/non_finite.h"

#include <cmath>
#include <map>
#include <utility>

#include "base/log.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

constexpr size_t kMaxListedRanks = 8;

/// "on rank 1", "on ranks 0 and 2", "on all 4 ranks".
std::string describe_ranks(const std::vector<size_t>& ranks, size_t world_size) {
  if (ranks.size() == 1) return text("on rank ", ranks[0]);
  if (ranks.size() == world_size) return text("on all ", world_size, " ranks");
  if (ranks.size() <= kMaxListedRanks) return text("on ranks ", enumerate(ranks));
  return text("on ", ranks.size(), " of ", world_size, " ranks, the first is rank ", ranks[0], ',');
}

bool is_bad(double value, const MetricOptions& options) {
  return !std::isfinite(value) && (options.reduce != MetricReduction::kMean || options.weight != 0);
}

}  // namespace

const char* const kNonFiniteRemedy = "lower the learning rate, clip gradients, or check the batches of these steps";

std::string describe_steps(int64_t first, int64_t last) {
  return first < last ? text("steps ", first, " to ", last) : text("step ", last);
}

std::string describe_non_finite(std::string_view metric, std::string_view when) {
  return text("metric '", metric, "' in ", when);
}

std::vector<std::string> non_finite_metrics(const MetricSums& sums) {
  std::vector<std::string> names;
  for (const auto& [name, sum] : sums.sums())
    if (!std::isfinite(sum.value)) names.push_back(name);
  return names;
}

std::string join_by_rank(const std::vector<std::vector<std::string>>& of_ranks) {
  std::map<std::string, std::vector<size_t>> ranks_of;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank)
    for (const auto& description : of_ranks[rank]) ranks_of[description].push_back(rank);
  std::vector<std::string> parts;
  for (const auto& [description, ranks] : ranks_of)
    parts.push_back(text(description, ' ', describe_ranks(ranks, of_ranks.size())));
  return enumerate(parts);
}

void NonFiniteValue::check(std::string_view metric, double value, const MetricOptions& options, int64_t step) {
  if (!found_ && is_bad(value, options)) found_ = describe_non_finite(metric, describe_steps(step, step));
}

void NonFiniteValue::check_of_epoch(std::string_view metric, double value, const MetricOptions& options,
                                    int64_t epoch) {
  if (!found_ && is_bad(value, options)) found_ = describe_non_finite(metric, text("epoch ", epoch));
}

void NonFiniteValue::check(const MetricSums& sums, int64_t first_step, int64_t last_step) {
  if (found_) return;
  if (const auto names = non_finite_metrics(sums); !names.empty())
    found_ = describe_non_finite(names[0], describe_steps(first_step, last_step));
}

std::optional<std::string> NonFiniteValue::take() {
  return std::exchange(found_, std::nullopt);
}

void NonFiniteWarnings::check(const std::vector<MetricSums>& ranks, std::string_view when) {
  std::vector<std::vector<std::string>> found(ranks.size());
  std::set<std::string> metrics;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (const auto& name : non_finite_metrics(ranks[rank])) {
      if (warned_.count(name)) continue;
      metrics.insert(name);
      found[rank].push_back(describe_non_finite(name, when));
    }
  if (metrics.empty()) return;
  warned_.merge(metrics);
  log_warning(text("NaN or infinite: ", join_by_rank(found),
                   " (the training continues; each metric is reported once); ", kNonFiniteRemedy,
                   "; with {.stop_on_nan = true} a TrainingRun stops all ranks instead"));
}

}  // namespace lockstep::detail
