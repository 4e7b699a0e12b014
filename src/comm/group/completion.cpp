#include "comm/group/completion.h"

#include <lockstep/work.h>

namespace lockstep {

Work::Work(std::shared_ptr<detail::Completion> completion) : completion_(std::move(completion)) {}

void Work::wait() const {
  completion_->check_process();
  completion_->wait();
}

void Work::synchronize() const {
  completion_->check_process();
  completion_->synchronize();
}

bool Work::is_done() const {
  completion_->check_process();
  return completion_->is_done();
}

std::chrono::steady_clock::time_point Work::done_at() const {
  completion_->check_process();
  return completion_->done_at();
}

}  // namespace lockstep
