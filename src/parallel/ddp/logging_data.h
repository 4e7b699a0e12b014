#pragma once

#include <string>
#include <vector>

#include <lockstep/ddp_logging_data.h>

#include "parallel/ddp/step_recorder.h"

namespace lockstep {

/// Fills in what a step says.
void describe_step(const StepTimes& step, DdpLoggingData& data);

/// The steps of a rank as events in Chrome's trace format, separated by commas: forward, backward and waiting on one
/// track, buckets on another. Times are of the machine's clock, so ranks of one host fit together.
std::string trace_events(int rank, const std::vector<StepTimes>& steps);

/// A whole file of them, which Perfetto and chrome://tracing open.
std::string trace_file(const std::vector<std::string>& events_of_ranks);

}  // namespace lockstep
