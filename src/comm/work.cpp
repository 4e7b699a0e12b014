#include <lockstep/work.h>

#include "comm/completion.h"

namespace lockstep {

Work::Work(std::shared_ptr<detail::Completion> completion) : completion_(std::move(completion)) {}

void Work::wait() const {
  completion_->wait();
}

bool Work::is_done() const {
  return completion_->is_done();
}

}  // namespace lockstep
