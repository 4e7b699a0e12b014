#pragma once

#include <ostream>
#include <vector>

#include "bench/messages.h"
#include "bench/plan.h"
#include "bench/row.h"
#include "bench/table.h"

namespace lockstep::bench {

struct PrinterOptions {
  bool json = false;            // one object a line, in place of the table
  bool shows_progress = false;  // one line on a terminal, rewritten
};

/// Prints rows as the ranks tell of them. One thread at a time.
class Printer {
 public:
  Printer(const Plan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress);

  void take(const Message& message);

  /// After the last message: how the backends compare.
  void finish();

  const std::vector<Row>& rows() const { return rows_; }
  bool has_wrong() const;

 private:
  void take_kind(const Progress& progress);
  void take_kind(const RoundTrip& round_trip);
  void take_kind(const Stream& stream);
  void take_kind(const Samples& samples);
  void clear_progress();
  std::string summary() const;

  const Plan plan_;
  const PrinterOptions options_;
  const Table table_;
  std::ostream& out_;
  std::ostream& progress_;
  size_t sizes_begun_ = 0;
  Floor floor_;
  std::vector<Row> rows_;
};

}  // namespace lockstep::bench
