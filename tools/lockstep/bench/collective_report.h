#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "bench/rank_protocol.h"
#include "bench/report_format.h"

namespace lockstep::bench {

/// Measurements for the floor: the time that no implementation can beat on this machine.
struct Floor {
  double round_trip_us = 0;  // of a flag between two ranks
  double stream_us = 0;      // time for all ranks to read and write one message each, in their own memory
  int64_t bytes = 0;         // size of that message
};

/// The floor of one call: the larger of the time to move the required bytes through memory and the time for a flag to
/// reach another rank. None for a single rank, which moves nothing.
std::optional<double> floor_us(Operation operation, int ranks, const Floor& floor);

/// One row of the table: one backend, message size and kind of memory.
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
  std::optional<double> floor_fraction{};  // floor_us / time_us
  size_t rounds = 0;
  int calls = 1;
};

CollectiveRow make_collective_row(const CollectivePlan& plan, const CollectiveSamples& samples, const Floor& floor);

/// One JSON object, without a newline.
std::string to_json_line(const CollectiveRow& row);

/// The rows of one backend and one kind of memory; one line in a plot.
struct Series {
  std::string backend{};
  std::string memory{};
  std::vector<CollectiveRow> rows{};

  /// "shm, allocated"; for a barrier, which uses no memory, "shm".
  std::string name() const;
  /// The row of this size, or nullptr.
  const CollectiveRow* find(int64_t bytes) const;
};

/// Groups rows into series, in the order of first appearance.
std::vector<Series> series_of(const std::vector<CollectiveRow>& rows);

/// Formats the table: the columns of nccl-tests and some more. All lines have the same width. Lines that are not rows
/// start with '#'.
class CollectiveTable {
 public:
  explicit CollectiveTable(const CollectivePlan& plan);

  std::string header() const;
  std::string line(const CollectiveRow& row) const;

 private:
  const size_t backend_columns_;
};

/// The times of the other series as multiples of the first, size by size; empty if there is only one series.
std::string ratio_table(const std::vector<CollectiveRow>& rows);

/// Prints rows as messages arrive from the ranks. Not thread-safe.
class CollectivePrinter {
 public:
  CollectivePrinter(const CollectivePlan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress);

  void handle(const CollectiveMessage& message);

  /// Prints the summary. Call it after the last message.
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
