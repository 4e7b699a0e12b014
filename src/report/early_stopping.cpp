#include <lockstep/early_stopping.h>

#include <utility>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

EarlyStopping::EarlyStopping(EarlyStoppingOptions options) : options_(std::move(options)) {
  if (options_.patience < 1)
    throw UsageError(text("EarlyStopping: patience is ", options_.patience, ", expected 1 or more"));
  if (!(options_.min_delta >= 0))
    throw UsageError(text("EarlyStopping: min_delta is ", options_.min_delta, ", expected 0 or more"));
}

bool EarlyStopping::update(double value) {
  const bool is_number = value == value;
  const double gain = !best_ ? 0 : options_.mode == MetricMode::kMax ? value - *best_ : *best_ - value;
  if (is_number && (!best_ || gain > options_.min_delta)) {
    best_ = value;
    without_improvement_ = 0;
  } else {
    ++without_improvement_;
  }
  return should_stop();
}

Value EarlyStopping::state_dict() const {
  return Value::dict({{"best", best_ ? Value(*best_) : Value()}, {"without_improvement", without_improvement_}});
}

void EarlyStopping::load_state_dict(const Value& state) {
  const auto& best = state.at("best");
  best_ = best.is_none() ? std::nullopt : std::optional(best.as_double());
  without_improvement_ = state.at("without_improvement").as_int();
}

}  // namespace lockstep
