#include "bench/table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "bench/sizes.h"

namespace lockstep::bench {
namespace {

/// A backend with one kind of memory.
using Series = std::pair<std::string, std::string>;

Series series_of(const Row& row) {
  return {row.backend, row.memory};
}

/// Four significant digits.
std::string figure(double value) {
  const int before = value < 1 ? 1 : static_cast<int>(std::log10(value)) + 1;
  return fmt::format("{:.{}f}", value, std::clamp(4 - before, 0, 2));
}

std::string ratio(double value) {
  return fmt::format("{:.{}f}x", value, value < 9.95 ? 2 : value < 99.5 ? 1 : 0);
}

std::vector<Series> all_series(const std::vector<Row>& rows) {
  std::vector<Series> found;
  for (const auto& row : rows)
    if (std::find(found.begin(), found.end(), series_of(row)) == found.end()) found.push_back(series_of(row));
  return found;
}

const Row* find_row(const std::vector<Row>& rows, int64_t bytes, const Series& series) {
  for (const auto& row : rows)
    if (row.bytes == bytes && series_of(row) == series) return &row;
  return nullptr;
}

}  // namespace

std::string table_header() {
  return fmt::format("#{:>11} {:>11} {:>8} {:>7}  {:<8} {:<9} {:>10} {:>10} {:>10} {:>8} {:>8} {:>6} {:>6}\n", "size",
                     "count", "type", "redop", "backend", "memory", "time", "p10", "p90", "algbw", "busbw", "wrong",
                     "floor") +
         fmt::format("#{:>11} {:>11} {:>8} {:>7}  {:<8} {:<9} {:>10} {:>10} {:>10} {:>8} {:>8} {:>6} {:>6}\n", "(B)",
                     "(elements)", "", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "(%)");
}

std::string table_line(const Row& row) {
  return fmt::format(" {:>11} {:>11} {:>8} {:>7}  {:<8} {:<9} {:>10} {:>10} {:>10} {:>8.2f} {:>8.2f} {:>6} {:>6.1f}\n",
                     row.bytes, row.count, row.dtype, row.redop, row.backend, row.memory, figure(row.time_us),
                     figure(row.p10_us), figure(row.p90_us), row.algbw_gbps, row.busbw_gbps,
                     row.wrong ? std::to_string(*row.wrong) : "N/A", 100 * row.floor_fraction);
}

std::string ratio_table(const std::vector<Row>& rows) {
  const auto series = all_series(rows);
  if (series.size() < 2) return "";
  const Series& first = series.front();
  std::string text =
      fmt::format("# time of each other, as a multiple of {} in {} memory\n#{:>11}", first.first, first.second, "size");
  for (size_t i = 1; i < series.size(); ++i) text += fmt::format(" {:>19}", series[i].first + "/" + series[i].second);
  text += "\n";
  for (const auto& row : rows) {
    if (series_of(row) != first) continue;
    text += fmt::format(" {:>11}", written_bytes(row.bytes));
    for (size_t i = 1; i < series.size(); ++i) {
      const Row* other = find_row(rows, row.bytes, series[i]);
      text += fmt::format(" {:>19}", other && row.time_us > 0 ? ratio(other->time_us / row.time_us) : "-");
    }
    text += "\n";
  }
  return text;
}

}  // namespace lockstep::bench
