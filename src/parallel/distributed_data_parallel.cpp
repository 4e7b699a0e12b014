#include <lockstep/distributed_data_parallel.h>

#include <torch/torch.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/coalesced.h"
#include "parallel/model_check.h"
#include "parallel/reducer.h"

namespace lockstep::detail {
namespace {

constexpr int kSource = 0;  // the rank whose parameters and buffers everyone takes

std::vector<NamedParameter> trained_parameters(const torch::nn::Module& module) {
  std::vector<NamedParameter> result;
  for (const auto& item : module.named_parameters())
    if (item.value().requires_grad()) result.push_back({item.key(), item.value()});
  return result;
}

/// The options that must be equal on all ranks, or they would reduce different things.
std::vector<ModelFact> facts_of(const DistributedDataParallelOptions& options) {
  auto word = [](bool on) { return on ? "true" : "false"; };
  return {
      {"option broadcast_buffers", word(options.broadcast_buffers)},
      {"option find_unused_parameters", word(options.find_unused_parameters)},
      {"option buckets", text("first_bytes ", options.buckets.first_bytes, ", cap_bytes ", options.buckets.cap_bytes)}};
}

}  // namespace

/// This rank's copy of the model, kept equal to the others'.
class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, ProcessGroup group, const DistributedDataParallelOptions& options)
      : module_(std::move(module)), group_(std::move(group)), options_(options) {
    check_model(*module_, facts_of(options), group_);
    broadcast_coalesced(group_, module_->parameters(), kSource);
    broadcast_coalesced(group_, module_->buffers(), kSource);
    reducer_ = std::make_unique<Reducer>(trained_parameters(*module_), group_,
                                         ReducerOptions{options.buckets, options.find_unused_parameters});
  }

  // Evaluation sends nothing, so that ranks may evaluate different numbers of batches, or one rank alone.
  void before_forward() {
    reducer_->check_finished();
    if (options_.broadcast_buffers && module_->is_training() && torch::GradMode::is_enabled() && reducer_->is_enabled())
      broadcast_coalesced(group_, module_->buffers(), kSource);
  }

  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }

 private:
  const std::shared_ptr<torch::nn::Module> module_;
  const ProcessGroup group_;
  const DistributedDataParallelOptions options_;
  std::unique_ptr<Reducer> reducer_;  // constant after construction
};

NoSync::NoSync(std::shared_ptr<Replica> replica)
    : replica_(std::move(replica)), was_enabled_(replica_->reducer().is_enabled()) {
  replica_->reducer().set_enabled(false);
}

NoSync::~NoSync() {
  replica_->reducer().set_enabled(was_enabled_);
}

std::shared_ptr<Replica> make_replica(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                                      const DistributedDataParallelOptions& options) {
  if (!module) throw UsageError(text("rank ", group.rank(), ": DistributedDataParallel: the module is empty"));
  return std::make_shared<Replica>(std::move(module), std::move(group), options);
}

void before_forward(Replica& replica) {
  replica.before_forward();
}

const BucketPlan& bucket_plan(const Replica& replica) {
  return replica.reducer().plan();
}

}  // namespace lockstep::detail
