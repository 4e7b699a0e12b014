#include "optim/zero/update_in_step.h"

#include "comm/capture.h"
#include "optim/zero/first_step_check.h"

namespace lockstep::detail {

void UpdateInStep::step(const at::Tensor& skip) {
  const auto& parameters = shard_->parameters();
  if (!is_checked_ && !is_capturing(shard_->group().device())) is_checked_ = check_alike_on_all_ranks(parameters);
  shard_->prepare_step();
  const auto inner = shard_->inner_parameters();
  for (size_t i = 0; i < inner.size(); ++i) inner[i].mutable_grad() = parameters.gradient(parameters.pieces()[i]);
  shard_->step(skip, parameters.memories().size());
}

}  // namespace lockstep::detail
