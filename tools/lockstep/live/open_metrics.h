#pragma once

#include <map>
#include <string>
#include <vector>

#include "live/job_view.h"

namespace lockstep::live {

/// A run for OpenMetrics: its name, its job, and the last_metrics() of its folder.
struct RunView {
  std::string name{};
  JobView job{};
  std::map<std::string, double> metrics{};
};

/// The runs in the text format of OpenMetrics 1.0, which Prometheus scrapes (content type
/// "application/openmetrics-text; version=1.0.0; charset=utf-8"). Ranks are listed until an hour after the last update
/// of their job. Names of runs must differ. Pure.
///
///   lockstep_rank_up, _straggler                    1 or 0; labels run, rank, host
///   lockstep_rank_step, _samples_per_second, _news_age_seconds, _memory_resident_bytes
///   lockstep_rank_time_share{part="forward"|"backward"|"communication"|"data"|"other"}
///   lockstep_rank_gpu_utilization_ratio, _gpu_memory_used_bytes
///   lockstep_run_metric{run, metric}                the last value of each metric, with step, epoch and seconds
std::string open_metrics(const std::vector<RunView>& runs, double now);

}  // namespace lockstep::live
