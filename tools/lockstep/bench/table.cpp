#include "bench/table.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "bench/series.h"
#include "bench/sizes.h"

namespace lockstep::bench {
namespace {

size_t longest(const std::vector<std::string>& names, const std::string& title) {
  size_t columns = title.size();
  for (const auto& name : names) columns = std::max(columns, name.size());
  return columns;
}

/// Three digits at least, all of those before the point.
std::string microseconds(double value) {
  const int before = value < 10 ? 1 : static_cast<int>(std::log10(value)) + 1;
  return fmt::format("{:.{}f}", value, std::clamp(4 - before, 0, 2));
}

std::string short_multiple(double value) {
  if (value < 0.1) return fmt::format("{:.2g}x", value);
  return fmt::format("{:.{}f}x", value, value < 9.95 ? 2 : value < 99.5 ? 1 : 0);
}

std::string percent(const std::optional<double>& fraction) {
  return fraction ? fmt::format("{:.1f}", 100 * *fraction) : "N/A";
}

constexpr const char* kLine = "{} {:>10} {:>9} {:>8} {:>7}  {:<{}} {:<9} {:>8} {:>8} {:>8} {:>6} {:>6} {:>5} {:>6}\n";

}  // namespace

Table::Table(const Plan& plan) : backend_columns_(longest(plan.backends, "backend")) {}

std::string Table::header() const {
  return fmt::format(kLine, "#", "size", "count", "type", "redop", "backend", backend_columns_, "memory", "time", "p10",
                     "p90", "algbw", "busbw", "wrong", "floor") +
         fmt::format(kLine, "#", "(B)", "(elem.)", "", "", "", backend_columns_, "", "(us)", "(us)", "(us)", "(GB/s)",
                     "(GB/s)", "", "(%)");
}

std::string Table::line(const Row& row) const {
  return fmt::format(kLine, " ", row.bytes, row.count, row.dtype, row.redop, row.backend, backend_columns_, row.memory,
                     microseconds(row.time_us), microseconds(row.p10_us), microseconds(row.p90_us),
                     fmt::format("{:.2f}", row.algbw_gbps), fmt::format("{:.2f}", row.busbw_gbps),
                     row.wrong ? std::to_string(*row.wrong) : "N/A", percent(row.floor_fraction));
}

std::string ratio_table(const std::vector<Row>& rows) {
  const auto series = series_of(rows);
  if (series.size() < 2) return "";
  std::string text = fmt::format("#\n# times as multiples of those of {}\n# {:>10}", series[0].name(), "size");
  for (size_t i = 1; i < series.size(); ++i) text += fmt::format("  {:>8}", series[i].name());
  text += "\n";
  for (const Row& first : series[0].rows) {
    text += fmt::format("  {:>10}", written_bytes(first.bytes));
    for (size_t i = 1; i < series.size(); ++i) {
      const Row* other = series[i].find(first.bytes);
      text += fmt::format("  {:>{}}", other && first.time_us > 0 ? short_multiple(other->time_us / first.time_us) : "-",
                          std::max<size_t>(series[i].name().size(), 8));
    }
    text += "\n";
  }
  return text;
}

}  // namespace lockstep::bench
