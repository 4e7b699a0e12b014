#include "parallel/ddp/step_recorder.h"

#include <utility>

namespace lockstep {

void StepRecorder::begin_forward() {
  std::lock_guard lock(mutex_);
  forward_begin_ = StepTimes::Clock::now();
}

void StepRecorder::end_forward() {
  std::lock_guard lock(mutex_);
  forward_end_ = StepTimes::Clock::now();
}

void StepRecorder::add(StepTimes step) {
  std::lock_guard lock(mutex_);
  step.number = ++count_;
  step.forward_begin = std::exchange(forward_begin_, {});
  step.forward_end = std::exchange(forward_end_, {});
  if (steps_.size() == kKept) steps_.pop_front();
  steps_.push_back(std::move(step));
}

std::vector<StepTimes> StepRecorder::steps() const {
  std::lock_guard lock(mutex_);
  return {steps_.begin(), steps_.end()};
}

}  // namespace lockstep
