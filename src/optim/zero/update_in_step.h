#pragma once

#include <memory>
#include <utility>

#include "optim/zero/shard.h"
#include "optim/zero/update_strategy.h"

namespace lockstep::detail {

/// ZeRO stage 1, Overlap::kNone: backward has averaged all gradients on all ranks. step() sets the gradients of the
/// inner optimizer's pieces to their ranges of the gradients, steps the inner optimizer, and all-gathers the pieces. If
/// the ranks share the parameters, a barrier replaces the all-gather.
class UpdateInStep final : public UpdateStrategy {
 public:
  explicit UpdateInStep(std::shared_ptr<Shard> shard) : shard_(std::move(shard)) {}

  void begin_step() override { shard_->accept_writes(); }
  void step(const at::Tensor& skip) override;

 private:
  const std::shared_ptr<Shard> shard_;
  bool is_checked_ = false;  // all ranks had the same parameters and gradients
};

}  // namespace lockstep::detail
