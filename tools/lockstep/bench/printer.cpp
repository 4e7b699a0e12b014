#include "bench/printer.h"

#include <algorithm>

#include <fmt/format.h>

#include "bench/sizes.h"
#include "bench/statistics.h"

namespace lockstep::bench {

Printer::Printer(const Plan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress)
    : plan_(plan), options_(options), table_(plan), out_(out), progress_(progress) {}

void Printer::take(const Message& message) {
  std::visit([this](const auto& kind) { take_kind(kind); }, message);
}

void Printer::finish() {
  clear_progress();
  if (!options_.json && !rows_.empty()) out_ << summary() << ratio_table(rows_) << std::flush;
}

bool Printer::has_wrong() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.wrong.value_or(0) != 0; });
}

void Printer::take_kind(const Progress& progress) {
  ++sizes_begun_;
  if (!options_.shows_progress) return;
  clear_progress();
  progress_ << fmt::format("{} {} of {}", name_of(plan_.operation), sizes_begun_, plan_.sizes.size());
  if (progress.bytes > 0) progress_ << fmt::format(": {} bytes", written_bytes(progress.bytes));
  progress_ << std::flush;
}

void Printer::take_kind(const RoundTrip& round_trip) {
  floor_.round_trip_us = median(round_trip.times_us);
  if (options_.json) return;
  if (plan_.ranks > 1)
    out_ << fmt::format("# a flag from one rank to another and back: {:.3f} us\n", floor_.round_trip_us);
  out_ << table_.header() << std::flush;
}

void Printer::take_kind(const Stream& stream) {
  floor_.bytes = stream.bytes;
  floor_.stream_us = median(stream.times_us);
}

void Printer::take_kind(const Samples& samples) {
  clear_progress();
  rows_.push_back(make_row(plan_, samples, floor_));
  out_ << (options_.json ? to_json_line(rows_.back()) + "\n" : table_.line(rows_.back())) << std::flush;
}

void Printer::clear_progress() {
  if (options_.shows_progress) progress_ << "\r\033[K" << std::flush;
}

std::string Printer::summary() const {
  const auto [fewest, most] =
      std::minmax_element(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) { return a.rounds < b.rounds; });
  const std::string rounds = fewest->rounds == most->rounds ? fmt::format("{}", most->rounds)
                                                            : fmt::format("{} to {}", fewest->rounds, most->rounds);
  const char* verdict = !plan_.check ? "results not checked" : has_wrong() ? "SOME RESULTS ARE WRONG" : "all right";
  return fmt::format("# {} rounds a size; {}\n", rounds, verdict);
}

}  // namespace lockstep::bench
