#include "report/progress_state.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "report/progress_line.h"

namespace lockstep {
namespace {

constexpr double kRecentSeconds = 20;
constexpr double kRecentSteps = 20;
constexpr double kMuchSlower = 10;

double seconds_between(ProgressState::Time begin, ProgressState::Time end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

void ProgressState::begin(std::string title, int64_t total, int64_t done, Time now) {
  title_ = std::move(title);
  total_ = total;
  done_ = done_before_ = done;
  begin_ = now;
  next_measurement_ = now;  // the first step is measured, so that it can be excluded later
  counts_ = measured_ = recent_ = {};
  measurements_ = 0;
  samples_ = steps_with_samples_ = 0;
  has_new_samples_ = false;
  was_slow_ = false;
  has_waiting_ = false;
}

void ProgressState::set(std::string_view name, double value) {
  for (auto& known : values_)
    if (known.name == name) return void(known.value = value);
  values_.push_back({std::string(name), value});
}

void ProgressState::measure(Time now) {
  next_measurement_ = now + kTick;
  counts_.steps = static_cast<double>(done_ - done_before_);
  counts_.seconds = seconds_between(begin_, now);
  const double steps = counts_.steps - measured_.steps;
  const double seconds = counts_.seconds - measured_.seconds;
  const double usual = recent_.steps > 0 ? steps * recent_.seconds / recent_.steps : seconds;
  const bool is_slow = seconds > kMuchSlower * usual;
  const bool starts_over = measurements_ < 2 || (is_slow && was_slow_);
  was_slow_ = is_slow;
  const double longest = std::max(kRecentSeconds, kMuchSlower * usual);
  const double factor = starts_over || seconds <= longest ? 1 : longest / seconds;
  const double age = std::min(factor * seconds / kRecentSeconds, steps / kRecentSteps);
  const double weight = starts_over ? 0 : std::exp(-age);
  recent_.steps = weight * recent_.steps + steps;
  recent_.seconds = weight * recent_.seconds + factor * seconds;
  recent_.waiting = weight * recent_.waiting + factor * (counts_.waiting - measured_.waiting);
  measured_ = counts_;
  ++measurements_;
}

ProgressView ProgressState::view_with(const Counts& rates) {
  ProgressView view;
  view.title = title_;
  view.done = done_;
  view.total = total_;
  for (auto& [name, value, keeps_zeros] : values_) {
    auto text = format_value(value, false);
    const bool has_point = text.find('.') != text.npos && text.find('e') == text.npos;
    keeps_zeros = keeps_zeros || (has_point && text == format_value(value, true));
    view.values.push_back({name, keeps_zeros ? format_value(value, true) : std::move(text)});
  }
  view.elapsed = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(rates.seconds));
  if (rates.seconds <= 0) return view;
  if (rates.steps > 0) view.steps_per_second = rates.steps / rates.seconds;
  if (rates.steps > 0 && steps_with_samples_ > 0)
    view.samples_per_second =
        *view.steps_per_second * static_cast<double>(samples_) / static_cast<double>(steps_with_samples_);
  if (has_waiting_) view.waiting = std::clamp(rates.waiting / rates.seconds, 0.0, 1.0);
  return view;
}

ProgressView ProgressState::view() {
  constexpr double kLongest = 1e9;  // 30 years, which nanoseconds can count
  auto view = view_with(recent_);
  view.elapsed = std::chrono::nanoseconds(static_cast<int64_t>(std::min(counts_.seconds, kLongest) * 1e9));
  if (total_ > 0 && view.steps_per_second) {
    const double left = static_cast<double>(std::max<int64_t>(total_ - done_, 0)) / *view.steps_per_second;
    view.left = std::chrono::nanoseconds(static_cast<int64_t>(std::min(left, kLongest) * 1e9));
  }
  return view;
}

ProgressView ProgressState::final_view(Time now) {
  counts_.steps = static_cast<double>(done_ - done_before_);
  counts_.seconds = seconds_between(begin_, now);
  auto view = view_with(counts_);
  view.has_ended = true;
  return view;
}

}  // namespace lockstep
