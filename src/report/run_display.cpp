#include "report/run_display.h"

#include <algorithm>
#include <iomanip>

#include <lockstep/print.h>

#include "base/text.h"

namespace lockstep::detail {

void RunDisplay::begin_epoch(int64_t epoch, int64_t epochs) {
  epoch_began_ = Clock::now();
  title_ = text("epoch ", epoch, "/", epochs);
}

void RunDisplay::begin_loop(int64_t batches, int64_t done) {
  progress_.begin(title_, batches, done);
  has_bar_ = true;
}

void RunDisplay::end_step(int64_t batches) {
  if (!has_bar_) begin_loop(0, 0);  // steps without batches()
  progress_.advance(std::max<int64_t>(batches, 1));
}

void RunDisplay::end_epoch(const std::map<std::string, double>& results) {
  auto line = title_;
  for (const auto& [name, value] : results) line += text("  ", name, " ", std::setprecision(4), value);
  const std::chrono::duration<double> took = Clock::now() - epoch_began_;
  progress_.end(text(line, "  ", std::fixed, std::setprecision(1), took.count(), " s"));
  has_bar_ = false;
}

void RunDisplay::add_metric(std::string_view name) {
  if (std::find(metrics_.begin(), metrics_.end(), name) == metrics_.end()) metrics_.emplace_back(name);
}

void RunDisplay::show(std::map<std::string, double> record) {
  if (group_.rank() != 0 || record == shown_record_) return;
  for (const auto& name : metrics_)
    if (const auto found = record.find(name); found != record.end())
      progress_.set(name, smoothed_[name].add(found->second));
  if (const auto rate = record.find("lr"); rate != record.end()) progress_.set("lr", rate->second);
  shown_record_ = std::move(record);
}

void RunDisplay::print_line(const std::string& line) const {
  if (is_on_) print(group_, line);
}

}  // namespace lockstep::detail
