#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "report/metric_sums.h"

// Finds metrics that are NaN or infinite, and describes them: name, steps and ranks.

namespace lockstep::detail {

/// "step 3", "steps 3 to 7".
std::string describe_steps(int64_t first, int64_t last);

/// "metric 'loss' in step 3".
std::string describe_non_finite(std::string_view metric, std::string_view when);

/// The names of the metrics whose sum is NaN or infinite, in alphabetical order.
std::vector<std::string> non_finite_metrics(const MetricSums& sums);

/// Appends the ranks to each description: "metric 'loss' in step 3 on ranks 0 and 2 and metric 'norm' in step 3 on all
/// 4 ranks". `of_ranks` has the descriptions of each rank.
std::string join_by_rank(const std::vector<std::vector<std::string>>& of_ranks);

/// The remedy for such values: a part of a message.
extern const char* const kNonFiniteRemedy;

/// Remembers the first value of this rank that is NaN or infinite.
class NonFiniteValue {
 public:
  /// Checks a value on the host. Ignores a value of a mean with weight 0, which does not count.
  void check(std::string_view metric, double value, const MetricOptions& options, int64_t step);
  void check_of_epoch(std::string_view metric, double value, const MetricOptions& options, int64_t epoch);
  /// Checks the sums of the values of consecutive steps.
  void check(const MetricSums& sums, int64_t first_step, int64_t last_step);

  /// Returns the description of the value and forgets it.
  std::optional<std::string> take();

 private:
  std::optional<std::string> found_{};
};

/// Logs a warning when the values of a record are NaN or infinite, once for each metric. Not thread-safe.
class NonFiniteWarnings {
 public:
  /// `ranks` has the sums of each rank for one record, `when` is the time of the record: "step 3".
  void check(const std::vector<MetricSums>& ranks, std::string_view when);

 private:
  std::set<std::string> warned_{};
};

}  // namespace lockstep::detail
