#include "bench/ranks/ddp/sides.h"

#include "bench/ranks/ddp/checks.h"

namespace lockstep::bench {
namespace {

void train(const StepsOf& work) {
  for (int step = 0; step < work.steps; ++step) work.training.step(work.batch);
}

}  // namespace

void TogetherSide::run() {
  train(work_);
}

int64_t TogetherSide::count_wrong() {
  return check_ == Check::kNone ? 0 : count_out_of_step(work_.training.parameters(), page_);
}

void AloneSide::prepare(int64_t) {
  if (page_.rank() == 0) work_.training.reset();
}

void AloneSide::warm_up() {
  if (page_.rank() == 0) work_.training.step(work_.batch);
}

void AloneSide::run() {
  if (page_.rank() == 0) train(work_);
  page_.meet_asleep();
}

}  // namespace lockstep::bench
