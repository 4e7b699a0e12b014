#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "bench/rank_protocol.h"
#include "bench/report_format.h"

namespace lockstep::bench {

/// What no implementation could be faster than on this machine.
struct Floor {
  double round_trip_us = 0;  // of a flag between two ranks
  double stream_us = 0;      // for all ranks to read and write a message's bytes, each its own
  int64_t bytes = 0;         // of that message
};

/// The larger of two times: for the bytes that must move through memory, and for one flag to reach another rank. None
/// for one rank alone, which moves nothing.
std::optional<double> floor_us(Operation operation, int ranks, const Floor& floor);

/// One line of the table: a backend with messages of one size in one kind of memory.
struct CollectiveRow {
  Operation operation = Operation::kAllReduce;
  std::string backend{};
  std::string memory{};
  int ranks = 2;
  int64_t bytes = 0;
  int64_t count = 0;
  std::string dtype{};
  std::string redop{};
  double time_us = 0;  // the median
  double p10_us = 0;
  double p90_us = 0;
  double algbw_gbps = 0;
  double busbw_gbps = 0;
  std::optional<int64_t> wrong{};
  std::optional<double> floor_us{};
  std::optional<double> floor_fraction{};  // the floor's time as a part of this one
  size_t rounds = 0;
  int calls = 1;
};

CollectiveRow make_collective_row(const CollectivePlan& plan, const CollectiveSamples& samples, const Floor& floor);

/// One object without a line end.
std::string to_json_line(const CollectiveRow& row);

/// The rows of one backend in one kind of memory: what is compared with others of its size, and one line of a plot.
struct Series {
  std::string backend{};
  std::string memory{};
  std::vector<CollectiveRow> rows{};

  /// "shm, allocated"; of a barrier, which has no memory, "shm".
  std::string name() const;
  /// nullptr when there is none of this size.
  const CollectiveRow* find(int64_t bytes) const;
};

/// In the order in which they first appear.
std::vector<Series> series_of(const std::vector<CollectiveRow>& rows);

/// nccl-tests' columns and ours, in lines that are as wide for every row. What is no row begins with '#'.
class CollectiveTable {
 public:
  explicit CollectiveTable(const CollectivePlan& plan);

  std::string header() const;
  std::string line(const CollectiveRow& row) const;

 private:
  const size_t backend_columns_;
};

/// How many times as long as the first backend the others take, size by size; empty when there is nothing to compare.
std::string ratio_table(const std::vector<CollectiveRow>& rows);

/// Prints rows as the ranks tell of them. One thread at a time.
class CollectivePrinter {
 public:
  CollectivePrinter(const CollectivePlan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress);

  void handle(const CollectiveMessage& message);

  /// After the last message: how the backends compare.
  void finish();

  const std::vector<CollectiveRow>& rows() const { return rows_; }
  bool has_wrong() const;

 private:
  void print(const SizeStarted& progress);
  void print(const RoundTripTimes& round_trip);
  void print(const StreamTimes& stream);
  void print(const CollectiveSamples& samples);
  void clear_progress();
  std::string summary() const;

  const CollectivePlan plan_;
  const PrinterOptions options_;
  const CollectiveTable table_;
  std::ostream& out_;
  std::ostream& progress_;
  size_t sizes_begun_ = 0;
  Floor floor_;
  std::vector<CollectiveRow> rows_;
};

}  // namespace lockstep::bench
