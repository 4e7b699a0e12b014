#pragma once

#include <string>
#include <vector>

#include "bench/row.h"

namespace lockstep::bench {

/// nccl-tests' columns and ours. Lines that are not figures begin with '#'.
std::string table_header();

std::string table_line(const Row& row);

/// How many times as long as the first backend the others take, size by size; empty when there is nothing to compare.
std::string ratio_table(const std::vector<Row>& rows);

}  // namespace lockstep::bench
