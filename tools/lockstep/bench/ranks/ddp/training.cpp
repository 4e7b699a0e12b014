#include "bench/ranks/ddp/training.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/optim/sgd.h>

#include <lockstep/distributed_data_parallel.h>

#include "bench/ddp/plan.h"
#include "bench/ranks/ddp/model.h"

namespace lockstep::bench {
namespace {

constexpr double kLearningRate = 0.01;

class LocalTraining : public Training {
 public:
  explicit LocalTraining(const std::string& model)
      : module_(make_model(model)),
        parameters_(module_->parameters()),
        state_(parameters_),
        optimizer_(parameters_, torch::optim::SGDOptions(kLearningRate)) {
    for (const auto& buffer : module_->buffers()) state_.push_back(buffer);
    for (const auto& tensor : state_) first_.push_back(tensor.detach().clone());
  }

  void reset() override {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < state_.size(); ++i) state_[i].copy_(first_[i]);
  }

  void step(const Batch& batch) override {
    for (const auto& parameter : parameters_) parameter.mutable_grad().reset();  // what Python's zero_grad does
    at::cross_entropy_loss(forward(batch.input), batch.target).backward();
    optimizer_.step();
  }

  std::vector<at::Tensor> parameters() const override { return parameters_; }

 protected:
  virtual at::Tensor forward(const at::Tensor& input) { return module_->forward(input); }

  torch::nn::Sequential module_;              // constant after construction, its tensors excepted
  const std::vector<at::Tensor> parameters_;  // likewise
  std::vector<at::Tensor> state_;             // parameters and buffers; likewise
  std::vector<at::Tensor> first_;             // what they were; constant after construction
  torch::optim::SGD optimizer_;
};

class DdpTraining final : public LocalTraining {
 public:
  DdpTraining(const std::string& model, const ProcessGroup& group) : LocalTraining(model), ddp_(module_, group) {}

 private:
  at::Tensor forward(const at::Tensor& input) override { return ddp_(input); }

  DistributedDataParallel<torch::nn::SequentialImpl> ddp_;
};

}  // namespace

Batch make_batch(const std::string& model, int rank) {
  const auto random = at::detail::createCPUGenerator(static_cast<uint64_t>(rank));
  auto shape = input_shape(model);
  shape.insert(shape.begin(), kBatch);
  return {at::randn(shape, random, at::kFloat), at::randint(kClasses, {kBatch}, random, at::kLong)};
}

std::unique_ptr<Training> make_local_training(const std::string& model) {
  return std::make_unique<LocalTraining>(model);
}

std::unique_ptr<Training> make_ddp_training(const std::string& model, const ProcessGroup& group) {
  return std::make_unique<DdpTraining>(model, group);
}

}  // namespace lockstep::bench
