#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "bench/rank_protocol.h"
#include "bench/report_format.h"

namespace lockstep::bench {

/// One model, and how its sides compare.
struct DdpRow {
  std::string model{};
  int ranks = 2;
  DdpSetup setting{};
  StepTimes local{};  // all ranks at the same time, none talks
  StepTimes ddp{};
  StepTimes alone{};                  // one rank, while the others sleep
  std::optional<StepTimes> python{};  // PyTorch's own
  size_t rounds = 0;
  int steps = 1;                   // in each sample
  std::optional<int64_t> wrong{};  // none: not checked

  /// What talking adds to a step: the part of it that computing does not hide.
  double exposed_ms() const { return ddp.median_ms - local.median_ms; }
  double exposed_fraction() const { return exposed_ms() / ddp.median_ms; }
  double ratio_to_local() const { return ddp.median_ms / local.median_ms; }
  /// How many times as fast as PyTorch's own.
  std::optional<double> ratio_to_python() const;
  /// What is left of a rank's speed when all of them train together.
  double efficiency() const { return alone.median_ms / ddp.median_ms; }
};

DdpRow make_ddp_row(const DdpPlan& plan, const DdpSetup& setting, const DdpSamples& samples);

/// One object without a line end.
std::string to_json_line(const DdpRow& row);

/// The times of each side of each model. What is no row begins with '#'.
std::string ddp_header();
std::string ddp_lines(const DdpRow& row);

/// How the sides of each model compare.
std::string ddp_comparison(const std::vector<DdpRow>& rows);

/// Prints models as the ranks tell of them. One thread at a time.
class DdpPrinter {
 public:
  DdpPrinter(const DdpPlan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress);

  void handle(const DdpMessage& message);

  /// After the last message: how the sides compare.
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
