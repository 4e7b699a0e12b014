#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "optim/zero/sharded_buckets.h"

namespace lockstep::detail {

/// Overlap::kGradients: backward reduce-scatters the buckets. The shares of the gradients stay, for clipping and for a
/// GradScaler, and step() steps all pieces.
class ShardedGradients final : public ShardedBuckets {
 public:
  explicit ShardedGradients(std::shared_ptr<Shard> shard) : ShardedBuckets(std::move(shard)) {}

  Started update(const Bucket& bucket) override;
  void update_and_finish(const Bucket& bucket) override;

  void begin_step() override;
  void step(const at::Tensor& skip) override;
  std::optional<std::vector<at::Tensor>> sharded_gradients() const override;

 private:
  bool waits_for_step() const override { return true; }
  const char* describe_unfinished() const override { return "gradients of some parameters are missing"; }
  void note_gradients(const Bucket& bucket);
};

}  // namespace lockstep::detail
