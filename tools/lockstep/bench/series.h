#pragma once

#include <string>
#include <vector>

#include "bench/row.h"

namespace lockstep::bench {

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

}  // namespace lockstep::bench
