#pragma once

#include <string>
#include <vector>

#include "plot/metrics_file.h"

namespace lockstep::plot {

/// The arguments of `lockstep plot`.
struct PlotArguments {
  std::vector<std::string> runs{};     // folders with a metrics.jsonl, or such files
  std::vector<std::string> metrics{};  // empty: all
  std::vector<std::string> names{};    // of the runs; empty: from their paths
  XAxis x = XAxis::kStep;
  double smoothing = 0.6;
  bool is_logarithmic = false;
  std::string title{};
  std::string output = "curves.svg";  // "-": stdout
};

/// Reads the runs, writes the picture, and prints one line about it: on stdout, or on stderr if the picture is written
/// to stdout. Notes are printed on stderr. A file is replaced when the picture is complete: if that fails, an existing
/// file is unchanged. Throws UsageError for wrong arguments, and Error for files that are damaged, empty, or cannot be
/// read or written.
void draw_runs(const PlotArguments& arguments);

}  // namespace lockstep::plot
