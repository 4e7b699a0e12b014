#include "bench/ranks/ddp_training.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/optim/sgd.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "bench/rank_protocol.h"

namespace lockstep::bench {
namespace {

namespace nn = torch::nn;

constexpr uint64_t kSeed = 1;

/// Adds linear layers of these widths with ReLU between them.
void add_linear_layers(nn::Sequential& model, const std::vector<int64_t>& widths) {
  for (size_t i = 1; i < widths.size(); ++i) {
    if (i > 1) model->push_back(nn::ReLU());
    model->push_back(nn::Linear(widths[i - 1], widths[i]));
  }
}

/// Adds a convolution block that halves width and height.
void add_convolution(nn::Sequential& model, int64_t from_channels, int64_t to_channels) {
  model->push_back(nn::Conv2d(nn::Conv2dOptions(from_channels, to_channels, 3).padding(1)));
  model->push_back(nn::BatchNorm2d(to_channels));
  model->push_back(nn::ReLU());
  model->push_back(nn::MaxPool2d(2));
}

constexpr double kLearningRate = 0.01;
constexpr double kAdamLearningRate = 1e-3;

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<at::Tensor> parameters) {
  if (name == "adamw")
    return std::make_unique<FusedAdamW>(std::move(parameters), torch::optim::AdamWOptions(kAdamLearningRate));
  return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(kLearningRate));
}

class LocalTraining : public Training {
 public:
  explicit LocalTraining(const std::string& model, const std::string& optimizer)
      : module_(make_model(model)),
        parameters_(module_->parameters()),
        state_(parameters_),
        optimizer_(make_optimizer(optimizer, parameters_)) {
    for (const auto& buffer : module_->buffers()) state_.push_back(buffer);
    for (const auto& tensor : state_) first_.push_back(tensor.detach().clone());
  }

  void reset() override {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < state_.size(); ++i) state_[i].copy_(first_[i]);
  }

  void step(const Batch& batch) override {
    for (const auto& parameter : parameters_)
      parameter.mutable_grad().reset();  // as Python's zero_grad does by default
    at::cross_entropy_loss(forward(batch.input), batch.target).backward();
    optimizer_->step();
  }

  std::vector<at::Tensor> parameters() const override { return parameters_; }

 protected:
  virtual at::Tensor forward(const at::Tensor& input) { return module_->forward(input); }

  torch::nn::Sequential module_;              // constant after construction, its tensors excepted
  const std::vector<at::Tensor> parameters_;  // likewise
  std::vector<at::Tensor> state_;             // parameters and buffers; likewise
  std::vector<at::Tensor> first_;             // initial values of state_; constant after construction
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

class DdpTraining : public LocalTraining {
 public:
  DdpTraining(const std::string& model, const std::string& optimizer, const ProcessGroup& group)
      : LocalTraining(model, optimizer), ddp_(module_, group) {}

 protected:
  at::Tensor forward(const at::Tensor& input) override { return ddp_(input); }

  DistributedDataParallel<torch::nn::SequentialImpl> ddp_;
};

class SharedTraining final : public DdpTraining {
 public:
  SharedTraining(const std::string& model, const ProcessGroup& group) : DdpTraining(model, "adamw", group) {
    optimizer_ = std::make_unique<ZeroRedundancyOptimizer<FusedAdamW>>(
        ddp_, torch::optim::AdamWOptions(kAdamLearningRate),
        ZeroRedundancyOptions{.overlap = Overlap::kUpdate, .share_parameters = true});
  }
};

/// Relative error of a mean whose terms may be added in a different order.
constexpr double kRounding = 1e-4;
/// Absolute error, relative to the largest gradient: the gradient of a bias before a BatchNorm is only rounding noise.
constexpr double kNoise = 1e-6;

std::vector<at::Tensor> gradients_of(Training& training, const Batch& batch) {
  training.reset();
  training.step(batch);
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : training.parameters()) gradients.push_back(parameter.grad().to(at::kDouble));
  return gradients;
}

double largest(const at::Tensor& tensor) {
  return tensor.abs().max().item<double>();
}

/// A hash in which every bit counts: each step is invertible.
int64_t fingerprint(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous();
  const auto* bytes = static_cast<const char*>(dense.data_ptr());
  uint64_t hash = 0;
  for (size_t done = 0; done < dense.nbytes(); done += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + done, std::min(sizeof word, dense.nbytes() - done));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32;
  }
  return static_cast<int64_t>(hash);
}

}  // namespace

torch::nn::Sequential make_model(const std::string& name) {
  static std::mutex mutex;  // modules use the global random generator, but ranks may be threads
  const std::lock_guard lock(mutex);
  at::manual_seed(kSeed);
  nn::Sequential model;
  if (name == "small") {
    add_linear_layers(model, {784, 128, 128, kClasses});
  } else if (name == "mlp") {
    add_linear_layers(model, {784, 2048, 2048, 2048, kClasses});
  } else if (name == "cnn") {
    add_convolution(model, 1, 32);
    add_convolution(model, 32, 64);
    model->push_back(nn::Flatten());
    add_linear_layers(model, {3136, 128, kClasses});
  } else {
    throw UsageError("unknown model " + name);
  }
  return model;
}

std::vector<int64_t> input_shape(const std::string& model) {
  if (model == "cnn") return {1, 28, 28};
  return {784};
}

Batch make_batch(const std::string& model, int rank) {
  const auto random = at::detail::createCPUGenerator(static_cast<uint64_t>(rank));
  auto shape = input_shape(model);
  shape.insert(shape.begin(), kBatch);
  return {at::randn(shape, random, at::kFloat), at::randint(kClasses, {kBatch}, random, at::kLong)};
}

std::unique_ptr<Training> make_local_training(const std::string& model, const std::string& optimizer) {
  return std::make_unique<LocalTraining>(model, optimizer);
}

std::unique_ptr<Training> make_ddp_training(const std::string& model, const std::string& optimizer,
                                            const ProcessGroup& group) {
  return std::make_unique<DdpTraining>(model, optimizer, group);
}

std::unique_ptr<Training> make_shared_training(const std::string& model, const ProcessGroup& group) {
  return std::make_unique<SharedTraining>(model, group);
}

int64_t count_different_parameters(Training& one, Training& other, const Batch& batch) {
  constexpr int kSteps = 2;
  for (auto* training : {&one, &other}) {
    training->reset();
    for (int step = 0; step < kSteps; ++step) training->step(batch);
  }
  const auto first = one.parameters(), second = other.parameters();
  int64_t different = 0;
  for (size_t i = 0; i < first.size(); ++i)
    if (!at::equal(first[i], second[i])) ++different;
  return different;
}

int64_t count_wrong_gradients(Training& ddp, Training& local, const std::string& model, int rank, int ranks) {
  auto expected = gradients_of(local, make_batch(model, 0));
  for (int other = 1; other < ranks; ++other) {
    const auto gradients = gradients_of(local, make_batch(model, other));
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += gradients[i];
  }
  double most = 0;
  for (const auto& gradient : expected) most = std::max(most, largest(gradient.div_(ranks)));
  const auto got = gradients_of(ddp, make_batch(model, rank));
  int64_t wrong = 0;
  for (size_t i = 0; i < expected.size(); ++i)
    if (!(largest(got[i] - expected[i]) <= kRounding * largest(expected[i]) + kNoise * most))
      ++wrong;  // true also for NaN
  return wrong;
}

int64_t count_diverged(const std::vector<at::Tensor>& tensors, SharedPage& page) {
  int64_t wrong = 0;
  for (const auto& tensor : tensors) {
    const int64_t own_fingerprint = fingerprint(tensor);
    if (page.broadcast(own_fingerprint) != own_fingerprint) ++wrong;
  }
  return wrong;
}

}  // namespace lockstep::bench
