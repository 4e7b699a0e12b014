#include "bench/ddp_report.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/report_format.h"

namespace lockstep::bench {
namespace {

using json = nlohmann::ordered_json;

void add_times(json& object, const std::string& side, const std::optional<StepTimes>& times) {
  object[side + "_ms"] = times ? json(times->median_ms) : json();
  object[side + "_p10_ms"] = times ? json(times->p10_ms) : json();
  object[side + "_p90_ms"] = times ? json(times->p90_ms) : json();
}

constexpr const char* kDdpTimes = "{} {:<6} {:<7} {:>8} {:>8} {:>8} {:>5}\n";
constexpr const char* kDdpComparison = "{} {:<6} {:>8} {:>8} {:>10}{} {:>11} {:>11}\n";

std::string ddp_line(const DdpRow& row, const char* side, const StepTimes& times, const std::string& wrong) {
  return fmt::format(kDdpTimes, " ", row.model, side, milliseconds(times.median_ms), milliseconds(times.p10_ms),
                     milliseconds(times.p90_ms), wrong);
}

}  // namespace

std::optional<double> DdpRow::ratio_to_python() const {
  if (!python) return std::nullopt;
  return python->median_ms / ddp.median_ms;
}

std::optional<double> DdpRow::shared_ratio_to_local() const {
  if (!shared) return std::nullopt;
  return shared->median_ms / local.median_ms;
}

DdpRow make_ddp_row(const DdpPlan& plan, const DdpSetup& setting, const DdpSamples& samples) {
  DdpRow row;
  row.model = samples.model;
  row.ranks = plan.ranks;
  row.setting = setting;
  row.local = step_times(samples.local_us);
  row.ddp = step_times(samples.ddp_us);
  if (!samples.shared_us.empty()) row.shared = step_times(samples.shared_us);
  row.alone = step_times(samples.alone_us);
  if (!samples.python_us.empty()) row.python = step_times(samples.python_us);
  row.rounds = samples.ddp_us.size();
  row.steps = samples.steps;
  if (plan.check) row.wrong = samples.wrong;
  return row;
}

std::string to_json_line(const DdpRow& row) {
  json object{{"op", "ddp"},     {"model", row.model},   {"ranks", row.ranks}, {"backend", row.setting.backend},
              {"batch", kBatch}, {"rounds", row.rounds}, {"steps", row.steps}, {"mkldnn", row.setting.has_mkldnn}};
  add_times(object, "local", row.local);
  add_times(object, "ddp", row.ddp);
  add_times(object, "shared", row.shared);
  add_times(object, "alone", row.alone);
  add_times(object, "python", row.python);
  object["exposed_ms"] = row.exposed_ms();
  object["exposed_fraction"] = row.exposed_fraction();
  object["ratio_to_local"] = row.ratio_to_local();
  object["shared_ratio_to_local"] = or_null(row.shared_ratio_to_local());
  object["ratio_to_python"] = or_null(row.ratio_to_python());
  object["efficiency"] = row.efficiency();
  object["wrong"] = or_null(row.wrong);
  return object.dump();
}

std::string ddp_header() {
  return fmt::format(kDdpTimes, "#", "model", "side", "time", "p10", "p90", "wrong") +
         fmt::format(kDdpTimes, "#", "", "", "(ms)", "(ms)", "(ms)", "");
}

std::string ddp_lines(const DdpRow& row) {
  return ddp_line(row, "local", row.local, "") +
         ddp_line(row, "ddp", row.ddp, row.wrong ? std::to_string(*row.wrong) : "N/A") +
         (row.shared ? ddp_line(row, "shared", *row.shared, "") : "") + ddp_line(row, "alone", row.alone, "") +
         (row.python ? ddp_line(row, "python", *row.python, "") : "");
}

std::string ddp_comparison(const std::vector<DdpRow>& rows) {
  const bool has_shared = std::any_of(rows.begin(), rows.end(), [](const DdpRow& row) { return row.shared; });
  const auto shared = [&](const std::string& cell) { return has_shared ? fmt::format(" {:>13}", cell) : ""; };
  std::string text = "#\n" +
                     fmt::format(kDdpComparison, "#", "model", "exposed", "exposed", "ddp/local",
                                 shared("shared/local"), "python/ddp", "efficiency") +
                     fmt::format(kDdpComparison, "#", "", "(ms)", "(%)", "", shared(""), "", "(%)");
  const auto ratio = [](const std::optional<double>& value) { return value ? multiple(*value) : "-"; };
  for (const auto& row : rows)
    text += fmt::format(kDdpComparison, " ", row.model, fmt::format("{:.3f}", row.exposed_ms()),
                        fmt::format("{:.1f}", 100 * row.exposed_fraction()), multiple(row.ratio_to_local()),
                        shared(ratio(row.shared_ratio_to_local())), ratio(row.ratio_to_python()),
                        fmt::format("{:.1f}", 100 * row.efficiency()));
  return text;
}

DdpPrinter::DdpPrinter(const DdpPlan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress)
    : plan_(plan), options_(options), out_(out), progress_(progress) {}

void DdpPrinter::handle(const DdpMessage& message) {
  std::visit([this](const auto& kind) { print(kind); }, message);
}

void DdpPrinter::finish() {
  clear_progress();
  if (options_.json || rows_.empty()) return;
  const char* verdict = !plan_.check ? "results not checked" : has_wrong() ? "SOME RESULTS ARE WRONG" : "all correct";
  const auto [fewest, most] = std::minmax_element(rows_.begin(), rows_.end(),
                                                  [](const DdpRow& a, const DdpRow& b) { return a.rounds < b.rounds; });
  out_ << fmt::format("# {} rounds per model; {}\n", range(fewest->rounds, most->rounds), verdict)
       << ddp_comparison(rows_) << std::flush;
}

bool DdpPrinter::has_wrong() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const DdpRow& row) { return row.wrong.value_or(0) != 0; });
}

void DdpPrinter::print(const DdpSetup& setting) {
  setting_ = setting;
  if (options_.json) return;
  out_ << fmt::format("# batch {} on each rank, {}; backend {}; LibTorch {}; MKL-DNN {} for all sides\n", kBatch,
                      plan_.optimizer == "adamw" ? "AdamW" : "SGD", setting.backend, setting.libtorch,
                      setting.has_mkldnn ? "on" : "off")
       << ddp_header() << std::flush;
}

void DdpPrinter::print(const DdpModelStarted& progress) {
  ++models_begun_;
  if (!options_.shows_progress) return;
  clear_progress();
  progress_ << fmt::format("ddp {} of {}: {}", models_begun_, plan_.models.size(), progress.model) << std::flush;
}

void DdpPrinter::print(const DdpSamples& samples) {
  clear_progress();
  rows_.push_back(make_ddp_row(plan_, setting_, samples));
  out_ << (options_.json ? to_json_line(rows_.back()) + "\n" : ddp_lines(rows_.back())) << std::flush;
}

void DdpPrinter::clear_progress() {
  if (options_.shows_progress) progress_ << "\r\033[K" << std::flush;
}

}  // namespace lockstep::bench
