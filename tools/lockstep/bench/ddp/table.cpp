#include "bench/ddp/table.h"

#include <fmt/format.h>

namespace lockstep::bench {
namespace {

constexpr const char* kDdpTimes = "{} {:<6} {:<7} {:>8} {:>8} {:>8} {:>5}\n";
constexpr const char* kDdpComparison = "{} {:<6} {:>8} {:>8} {:>10} {:>11} {:>11}\n";

std::string ddp_line(const DdpRow& row, const char* side, const StepTimes& times, const std::string& wrong) {
  return fmt::format(kDdpTimes, " ", row.model, side, milliseconds(times.median_ms), milliseconds(times.p10_ms),
                     milliseconds(times.p90_ms), wrong);
}

}  // namespace

std::string ddp_header() {
  return fmt::format(kDdpTimes, "#", "model", "side", "time", "p10", "p90", "wrong") +
         fmt::format(kDdpTimes, "#", "", "", "(ms)", "(ms)", "(ms)", "");
}

std::string ddp_lines(const DdpRow& row) {
  return ddp_line(row, "local", row.local, "") +
         ddp_line(row, "ddp", row.ddp, row.wrong ? std::to_string(*row.wrong) : "N/A") +
         ddp_line(row, "alone", row.alone, "") + (row.python ? ddp_line(row, "python", *row.python, "") : "");
}

std::string ddp_comparison(const std::vector<DdpRow>& rows) {
  std::string text =
      "#\n" + fmt::format(kDdpComparison, "#", "model", "exposed", "exposed", "ddp/local", "python/ddp", "efficiency") +
      fmt::format(kDdpComparison, "#", "", "(ms)", "(%)", "", "", "(%)");
  for (const auto& row : rows) {
    const auto to_python = row.ratio_to_python();
    text += fmt::format(kDdpComparison, " ", row.model, fmt::format("{:.3f}", row.exposed_ms()),
                        fmt::format("{:.1f}", 100 * row.exposed_fraction()), multiple(row.ratio_to_local()),
                        to_python ? multiple(*to_python) : "-", fmt::format("{:.1f}", 100 * row.efficiency()));
  }
  return text;
}

}  // namespace lockstep::bench
