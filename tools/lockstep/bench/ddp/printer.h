#pragma once

#include <ostream>
#include <vector>

#include "bench/ddp/messages.h"
#include "bench/ddp/plan.h"
#include "bench/ddp/row.h"
#include "bench/printer.h"

namespace lockstep::bench {

/// Prints models as the ranks tell of them. One thread at a time.
class DdpPrinter {
 public:
  DdpPrinter(const DdpPlan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress);

  void take(const DdpMessage& message);

  /// After the last message: how the sides compare.
  void finish();

  bool has_wrong() const;

 private:
  void take_kind(const DdpSetting& setting);
  void take_kind(const DdpProgress& progress);
  void take_kind(const DdpSamples& samples);
  void clear_progress();

  const DdpPlan plan_;
  const PrinterOptions options_;
  std::ostream& out_;
  std::ostream& progress_;
  size_t models_begun_ = 0;
  DdpSetting setting_;
  std::vector<DdpRow> rows_;
};

}  // namespace lockstep::bench
