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
struct Row {
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

Row make_row(const Plan& plan, const Samples& samples, const Floor& floor);

/// One object without a line end.
std::string to_json_line(const Row& row);

/// The rows of one backend in one kind of memory: what is compared with others of its size, and one line of a plot.
struct Series {
  std::string backend{};
  std::string memory{};
  std::vector<Row> rows{};

  /// "shm, allocated"; of a barrier, which has no memory, "shm".
  std::string name() const;
  /// nullptr when there is none of this size.
  const Row* find(int64_t bytes) const;
};

/// In the order in which they first appear.
std::vector<Series> series_of(const std::vector<Row>& rows);

/// nccl-tests' columns and ours, in lines that are as wide for every row. What is no row begins with '#'.
class Table {
 public:
  explicit Table(const Plan& plan);

  std::string header() const;
  std::string line(const Row& row) const;

 private:
  const size_t backend_columns_;
};

/// How many times as long as the first backend the others take, size by size; empty when there is nothing to compare.
std::string ratio_table(const std::vector<Row>& rows);

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
