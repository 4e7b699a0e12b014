#pragma once

#include <map>
#include <string>

#include "ui/run_catalog.h"

/// The answers to the requests of the page, without HTTP. docs/monitoring.md lists the requests.
namespace lockstep::ui {

struct Answer {
  int status = 200;
  std::string content_type = "application/json";
  std::string body{};
  std::string tag{};  // changes with the body; empty if the bodies must be compared
};

/// Parameters of a request by name; of several with one name, the last counts.
using Parameters = std::map<std::string, std::string>;

/// The runs, their settings, results and states.
Answer answer_runs(const RunCatalog& catalog);
/// The tag that answer_runs() would return, without the work.
std::string tag_of_runs(const RunCatalog& catalog);

/// One metric of several runs: runs (ids with commas), metric, x (step, epoch or time), from, to, points, smooth, logx.
Answer answer_curves(const RunCatalog& catalog, const Parameters& parameters);

/// The ranks of a run: run (id).
Answer answer_ranks(const RunCatalog& catalog, const Parameters& parameters);

/// The last output of a rank, or why the file cannot be read: run, rank, lines.
Answer answer_output(const RunCatalog& catalog, const Parameters& parameters);

/// The checkpoints of a run: run.
Answer answer_checkpoints(const RunCatalog& catalog, const Parameters& parameters);

/// All runs in the text format of OpenMetrics.
Answer answer_open_metrics(const RunCatalog& catalog);

}  // namespace lockstep::ui
