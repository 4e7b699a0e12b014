#pragma once

#include <string>
#include <vector>

#include "bench/plan.h"
#include "bench/row.h"

namespace lockstep::bench {

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

}  // namespace lockstep::bench
