#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "bench/rank_protocol.h"
#include "bench/report_format.h"

namespace lockstep::bench {

/// The step times of one model.
struct DdpRow {
  std::string model{};
  int ranks = 2;
  DdpSetup setting{};
  StepTimes local{};  // all ranks train without communication
  StepTimes ddp{};
  std::optional<StepTimes> shared{};  // with shared parameters, updated in backward
  StepTimes alone{};                  // one rank, while the other ranks sleep
  std::optional<StepTimes> python{};  // PyTorch's DistributedDataParallel in Python
  size_t rounds = 0;
  int steps = 1;                   // in each sample
  std::optional<int64_t> wrong{};  // none: not checked

  /// The time that communication adds to a step, not hidden by computation.
  double exposed_ms() const { return ddp.median_ms - local.median_ms; }
  double exposed_fraction() const { return exposed_ms() / ddp.median_ms; }
  double ratio_to_local() const { return ddp.median_ms / local.median_ms; }
  std::optional<double> shared_ratio_to_local() const;
  /// The speedup over PyTorch's DistributedDataParallel.
  std::optional<double> ratio_to_python() const;
  /// The speed of a rank when all ranks train, relative to a rank that trains alone.
  double efficiency() const { return alone.median_ms / ddp.median_ms; }
};

DdpRow make_ddp_row(const DdpPlan& plan, const DdpSetup& setting, const DdpSamples& samples);

/// One JSON object, without a newline.
std::string to_json_line(const DdpRow& row);

/// The table of step times, one line per side of a model. Lines that are not rows start with '#'.
std::string ddp_header();
std::string ddp_lines(const DdpRow& row);

/// The table that compares the sides of each model.
std::string ddp_comparison(const std::vector<DdpRow>& rows);

/// Prints models as messages arrive from the ranks. Not thread-safe.
class DdpPrinter {
 public:
  DdpPrinter(const DdpPlan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress);

  void handle(const DdpMessage& message);

  /// Prints the summary. Call it after the last message.
  void finish();

  bool has_wrong() const;

 private:
  void print(const DdpSetup& setting);
  void print(const DdpModelStarted& progress);
  void print(const DdpSamples& samples);
  void clear_progress();

  const DdpPlan plan_;
  const PrinterOptions options_;
  std::ostream& out_;
  std::ostream& progress_;
  size_t models_begun_ = 0;
  DdpSetup setting_;
  std::vector<DdpRow> rows_;
};

}  // namespace lockstep::bench
