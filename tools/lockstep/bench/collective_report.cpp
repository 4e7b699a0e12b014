#include "bench/collective_report.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/operation.h"
#include "bench/report_format.h"

namespace lockstep::bench {
namespace {

using json = nlohmann::ordered_json;

size_t longest(const std::vector<std::string>& names, const std::string& title) {
  size_t columns = title.size();
  for (const auto& name : names) columns = std::max(columns, name.size());
  return columns;
}

/// At least three significant digits, and all digits before the point.
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

// The floor is a bound: disturbances that make its measurement slower do not count.
constexpr double kFloorPart = 0.1;

constexpr const char* kLine = "{} {:>10} {:>9} {:>8} {:>5} {:<{}} {:<9} {:>7} {:>7} {:>7} {:>6} {:>6} {:>5} {:>5}\n";

}  // namespace

std::optional<double> floor_us(Operation operation, int ranks, const Floor& floor) {
  if (ranks == 1) return std::nullopt;
  const double streamed = 2.0 * ranks * static_cast<double>(floor.bytes);
  const double memory_us = streamed > 0 ? floor_traffic(operation, ranks, floor.bytes) * floor.stream_us / streamed : 0;
  return std::max(memory_us, floor.round_trip_us / 2);
}

CollectiveRow make_collective_row(const CollectivePlan& plan, const CollectiveSamples& samples, const Floor& floor) {
  CollectiveRow row;
  row.operation = plan.operation;
  row.backend = samples.backend;
  row.memory = samples.memory;
  row.ranks = plan.ranks;
  row.bytes = samples.bytes;
  row.dtype = plan.operation == Operation::kBarrier ? "none" : plan.dtype;
  row.redop = plan.redop;
  if (plan.operation != Operation::kBarrier)
    row.count = element_count(plan.operation, samples.bytes, element_bytes(plan.dtype), plan.ranks);
  row.time_us = median(samples.times_us);
  row.p10_us = percentile(samples.times_us, 0.1);
  row.p90_us = percentile(samples.times_us, 0.9);
  row.algbw_gbps = row.time_us > 0 ? static_cast<double>(samples.bytes) / row.time_us / 1000 : 0;
  row.busbw_gbps = row.algbw_gbps * bus_factor(plan.operation, plan.ranks);
  row.wrong = samples.wrong;
  row.floor_us = floor_us(plan.operation, plan.ranks, floor);
  if (row.floor_us && row.time_us > 0) row.floor_fraction = std::min(1.0, *row.floor_us / row.time_us);
  row.rounds = samples.times_us.size();
  row.calls = samples.calls;
  return row;
}

std::string to_json_line(const CollectiveRow& row) {
  const json object{{"op", name_of(row.operation)},
                    {"backend", row.backend},
                    {"memory", row.memory},
                    {"ranks", row.ranks},
                    {"bytes", row.bytes},
                    {"count", row.count},
                    {"dtype", row.dtype},
                    {"redop", row.redop},
                    {"time_us", row.time_us},
                    {"p10_us", row.p10_us},
                    {"p90_us", row.p90_us},
                    {"algbw_gbps", row.algbw_gbps},
                    {"busbw_gbps", row.busbw_gbps},
                    {"wrong", or_null(row.wrong)},
                    {"floor_us", or_null(row.floor_us)},
                    {"floor_fraction", or_null(row.floor_fraction)},
                    {"rounds", row.rounds},
                    {"calls", row.calls}};
  return object.dump();
}

std::string Series::name() const {
  return memory == "none" ? backend : backend + ", " + memory;
}

const CollectiveRow* Series::find(int64_t bytes) const {
  const auto found =
      std::find_if(rows.begin(), rows.end(), [&](const CollectiveRow& row) { return row.bytes == bytes; });
  return found == rows.end() ? nullptr : &*found;
}

std::vector<Series> series_of(const std::vector<CollectiveRow>& rows) {
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

CollectiveTable::CollectiveTable(const CollectivePlan& plan) : backend_columns_(longest(plan.backends, "backend")) {}

std::string CollectiveTable::header() const {
  return fmt::format(kLine, "#", "size", "count", "type", "redop", "backend", backend_columns_, "memory", "time", "p10",
                     "p90", "algbw", "busbw", "wrong", "floor") +
         fmt::format(kLine, "#", "(B)", "(elem.)", "", "", "", backend_columns_, "", "(us)", "(us)", "(us)", "(GB/s)",
                     "(GB/s)", "", "(%)");
}

std::string CollectiveTable::line(const CollectiveRow& row) const {
  return fmt::format(kLine, " ", row.bytes, row.count, row.dtype, row.redop, row.backend, backend_columns_, row.memory,
                     microseconds(row.time_us), microseconds(row.p10_us), microseconds(row.p90_us),
                     fmt::format("{:.2f}", row.algbw_gbps), fmt::format("{:.2f}", row.busbw_gbps),
                     row.wrong ? std::to_string(*row.wrong) : "N/A", percent(row.floor_fraction));
}

std::string ratio_table(const std::vector<CollectiveRow>& rows) {
  const auto series = series_of(rows);
  if (series.size() < 2) return "";
  std::string text = fmt::format("#\n# times relative to {}\n# {:>10}", series[0].name(), "size");
  for (size_t i = 1; i < series.size(); ++i) text += fmt::format("  {:>8}", series[i].name());
  text += "\n";
  for (const CollectiveRow& first : series[0].rows) {
    text += fmt::format("  {:>10}", format_size(first.bytes));
    for (size_t i = 1; i < series.size(); ++i) {
      const CollectiveRow* other = series[i].find(first.bytes);
      text += fmt::format("  {:>{}}", other && first.time_us > 0 ? short_multiple(other->time_us / first.time_us) : "-",
                          std::max<size_t>(series[i].name().size(), 8));
    }
    text += "\n";
  }
  return text;
}

CollectivePrinter::CollectivePrinter(const CollectivePlan& plan, PrinterOptions options, std::ostream& out,
                                     std::ostream& progress)
    : plan_(plan), options_(options), table_(plan), out_(out), progress_(progress) {}

void CollectivePrinter::handle(const CollectiveMessage& message) {
  std::visit([this](const auto& kind) { print(kind); }, message);
}

void CollectivePrinter::finish() {
  clear_progress();
  if (!options_.json && !rows_.empty()) out_ << summary() << ratio_table(rows_) << std::flush;
}

bool CollectivePrinter::has_wrong() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const CollectiveRow& row) { return row.wrong.value_or(0) != 0; });
}

void CollectivePrinter::print(const SizeStarted& progress) {
  ++sizes_begun_;
  if (!options_.shows_progress) return;
  clear_progress();
  progress_ << fmt::format("{} {} of {}", name_of(plan_.operation), sizes_begun_, plan_.sizes.size());
  if (progress.bytes > 0) progress_ << fmt::format(": {} bytes", format_size(progress.bytes));
  progress_ << std::flush;
}

void CollectivePrinter::print(const RoundTripTimes& round_trip) {
  floor_.round_trip_us = percentile(round_trip.times_us, kFloorPart);
  if (options_.json) return;
  if (plan_.ranks > 1)
    out_ << fmt::format("# round trip of a flag between two ranks: {:.3f} us\n", floor_.round_trip_us);
  out_ << table_.header() << std::flush;
}

void CollectivePrinter::print(const StreamTimes& stream) {
  floor_.bytes = stream.bytes;
  floor_.stream_us = percentile(stream.times_us, kFloorPart);
}

void CollectivePrinter::print(const CollectiveSamples& samples) {
  clear_progress();
  rows_.push_back(make_collective_row(plan_, samples, floor_));
  out_ << (options_.json ? to_json_line(rows_.back()) + "\n" : table_.line(rows_.back())) << std::flush;
}

void CollectivePrinter::clear_progress() {
  if (options_.shows_progress) progress_ << "\r\033[K" << std::flush;
}

std::string CollectivePrinter::summary() const {
  const auto [fewest, most] = std::minmax_element(
      rows_.begin(), rows_.end(), [](const CollectiveRow& a, const CollectiveRow& b) { return a.rounds < b.rounds; });
  const std::string rounds = fewest->rounds == most->rounds ? fmt::format("{}", most->rounds)
                                                            : fmt::format("{} to {}", fewest->rounds, most->rounds);
  const char* verdict = !plan_.check ? "results not checked" : has_wrong() ? "SOME RESULTS ARE WRONG" : "all correct";
  return fmt::format("# {} rounds per size; {}\n", rounds, verdict);
}

}  // namespace lockstep::bench
