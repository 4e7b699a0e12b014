#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "live/job_view.h"
#include "top/styled_line.h"

namespace lockstep::top {

/// The order of rows. All orders except kRank begin with the ranks that need attention.
enum class Sort { kRank, kState, kStep, kSpeed, kCommunication };

/// "rank", "state", "step", "samples/s" or "communication".
const char* name_of(Sort sort);

/// The order after `sort`; after the last order, the first.
Sort next_of(Sort sort);

/// The ranks in that order. Equal ranks are in the order of their numbers. Pure.
std::vector<const live::RankView*> sorted(const live::JobView& job, Sort sort);

/// The table of the ranks: which columns it has, and how wide they are. Hosts are shown if there are several, GPUs if
/// there are any, and the other columns as far as the terminal is wide enough. Pure.
class RankTable {
 public:
  RankTable(const live::JobView& job, const Style& style);

  std::string header() const;
  std::string row(const live::RankView& rank, bool is_selected) const;

 private:
  void add_parts(StyledLine& line, const live::RankView& rank) const;

  const Style style_;
  // Widths; 0: the table does not have the column.
  size_t rank_ = 4, host_ = 0, state_ = 9, step_ = 4, speed_ = 6, share_ = 4, memory_ = 6, gpu_ = 0, gpu_memory_ = 0;
  size_t bar_ = 0;
};

/// "12.8k", "320", "4.25"; "-" if unknown.
std::string speed_text(const std::optional<double>& per_second);

/// "1:02:03" or "2:03".
std::string clock_text(double seconds);

}  // namespace lockstep::top
