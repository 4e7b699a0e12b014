// Ranks that save checkpoints until something happens to them. The arguments of test_ranks resuming_rank:
//
//   save FOLDER          saves without end; prints "saved NUMBER"
//   train FOLDER STEPS   trains with a PreemptionGuard; prints "resumed at NUMBER" and "step NUMBER"

#include <iostream>
#include <string>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "ranks/test_ranks.h"

namespace {

using namespace lockstep;

int save_without_end(const ProcessGroup& world, const std::string& folder) {
  auto tensor = torch::zeros({100000});
  int64_t count = 0;
  auto state = TrainingState{}.add("tensor", tensor).add("count", count);
  CheckpointDirectory checkpoints(world, folder, {.keep_last = 2});
  for (int64_t number = checkpoints.resume(state);; ++number) {
    if (number > 0 && count != number - 1) return 1;
    count = number;
    tensor.fill_(static_cast<double>(number));
    checkpoints.save(number, state);
    std::cout << "saved " << number << std::endl;
  }
}

int train_and_save_at_a_signal(const ProcessGroup& world, const std::string& folder, int64_t steps) {
  auto sum = torch::zeros({1}, torch::kLong);
  auto state = TrainingState{}.add("sum", sum);
  CheckpointDirectory checkpoints(world, folder, {.asynchronous = true});
  PreemptionGuard guard(world);
  int64_t step = checkpoints.resume(state);
  if (world.rank() == 0) std::cout << "resumed at " << step << std::endl;
  for (; step < steps; ++step) {
    auto term = torch::full({1}, step, torch::kLong);
    world.all_reduce(term, ReduceOp::kMax);
    sum += term;
    std::cout << "step " << step << std::endl;
    if (guard.should_stop()) {
      checkpoints.save(step, state);
      checkpoints.wait();
      std::cout << "stopped after " << step << std::endl;
      return PreemptionGuard::kExitCode;
    }
  }
  std::cout << "sum " << sum.item<int64_t>() << std::endl;
  return 0;
}

}  // namespace

int run_resuming_rank(const std::vector<std::string>& words) {
  const auto world = init_process_group();
  if (words.at(0) == "save") return save_without_end(world, words.at(1));
  return train_and_save_at_a_signal(world, words.at(1), std::stoll(words.at(2)));
}
