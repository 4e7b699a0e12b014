#include "bench/series.h"

#include <algorithm>

namespace lockstep::bench {

std::string Series::name() const {
  return memory == "none" ? backend : backend + ", " + memory;
}

const Row* Series::find(int64_t bytes) const {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const Row& row) { return row.bytes == bytes; });
  return found == rows.end() ? nullptr : &*found;
}

std::vector<Series> series_of(const std::vector<Row>& rows) {
  std::vector<Series> all;
  for (const auto& row : rows) {
    auto found = std::find_if(all.begin(), all.end(), [&](const Series& series) {
      return series.backend == row.backend && series.memory == row.memory;
    });
    if (found == all.end()) found = all.insert(all.end(), {row.backend, row.memory, {}});
    found->rows.push_back(row);
  }
  return all;
}

}  // namespace lockstep::bench
