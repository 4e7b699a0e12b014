#include "bench/ddp/printer.h"

#include <algorithm>

#include <fmt/format.h>

#include "bench/ddp/table.h"

namespace lockstep::bench {

DdpPrinter::DdpPrinter(const DdpPlan& plan, PrinterOptions options, std::ostream& out, std::ostream& progress)
    : plan_(plan), options_(options), out_(out), progress_(progress) {}

void DdpPrinter::take(const DdpMessage& message) {
  std::visit([this](const auto& kind) { take_kind(kind); }, message);
}

void DdpPrinter::finish() {
  clear_progress();
  if (options_.json || rows_.empty()) return;
  const char* verdict = !plan_.check ? "results not checked" : has_wrong() ? "SOME RESULTS ARE WRONG" : "all right";
  const auto [fewest, most] = std::minmax_element(rows_.begin(), rows_.end(),
                                                  [](const DdpRow& a, const DdpRow& b) { return a.rounds < b.rounds; });
  out_ << fmt::format("# {} rounds a model; {}\n", range(fewest->rounds, most->rounds), verdict)
       << ddp_comparison(rows_) << std::flush;
}

bool DdpPrinter::has_wrong() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const DdpRow& row) { return row.wrong.value_or(0) != 0; });
}

void DdpPrinter::take_kind(const DdpSetting& setting) {
  setting_ = setting;
  if (options_.json) return;
  out_ << fmt::format("# batch {} on each rank, SGD; backend {}; LibTorch {}; MKL-DNN {} on all sides\n", kBatch,
                      setting.backend, setting.libtorch, setting.has_mkldnn ? "on" : "off")
       << ddp_header() << std::flush;
}

void DdpPrinter::take_kind(const DdpProgress& progress) {
  ++models_begun_;
  if (!options_.shows_progress) return;
  clear_progress();
  progress_ << fmt::format("ddp {} of {}: {}", models_begun_, plan_.models.size(), progress.model) << std::flush;
}

void DdpPrinter::take_kind(const DdpSamples& samples) {
  clear_progress();
  rows_.push_back(make_ddp_row(plan_, setting_, samples));
  out_ << (options_.json ? to_json_line(rows_.back()) + "\n" : ddp_lines(rows_.back())) << std::flush;
}

void DdpPrinter::clear_progress() {
  if (options_.shows_progress) progress_ << "\r\033[K" << std::flush;
}

}  // namespace lockstep::bench
