#include "report/watched_metrics.h"

#include <cmath>
#include <filesystem>
#include <vector>

#include "base/log.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

using Metrics = std::map<std::string, double>;

std::string refusal(const char* option, const std::string& metric, const Metrics& results, int64_t epoch,
                    const char* when) {
  std::vector<std::string> names;
  for (const auto& [name, value] : results) names.push_back(name);
  return text(option, " the metric '", metric, "', which was not logged in epoch ", epoch, "; ",
              names.empty() ? "no metric was" : text("logged were ", enumerate(names)),
              ". Correct the name, or log the metric in ", when);
}

}  // namespace

WatchedMetrics::WatchedMetrics(const TrainingRunOptions& options) : best_(options.best) {
  if (options.early_stopping) early_stopping_.emplace(*options.early_stopping);
}

std::string WatchedMetrics::update(const Metrics& results, int64_t epoch, bool must_save) {
  if (early_stopping_) {
    const auto& metric = early_stopping_->options().metric;
    const auto found = results.find(metric);
    if (found == results.end()) return refusal("early_stopping watches", metric, results, epoch, "every epoch");
    early_stopping_->update(found->second);
  }
  if (best_.empty()) return "";
  const auto found = results.find(best_);
  if (found != results.end() && !std::isnan(found->second)) has_best_value_ = true;
  if (found == results.end() && (must_save || should_stop()))
    return refusal("best is", best_, results, epoch, "every epoch after which save_every_epochs saves a checkpoint");
  return "";
}

void WatchedMetrics::warn_without_best(const std::string& run_folder, const std::string& best_file) const {
  std::error_code ignored;
  if (best_.empty() || has_best_value_ || std::filesystem::exists(best_file, ignored)) return;
  log_warning(text("the run ", run_folder, " has no best.pt: no epoch had a value of the metric '", best_,
                   "' other than NaN; check how the program computes the metric"));
}

void WatchedMetrics::load_state_dict(const Value& state) {
  if (early_stopping_ && !state.is_none()) early_stopping_->load_state_dict(state);
}

}  // namespace lockstep::detail
