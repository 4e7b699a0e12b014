#include "bench/ranks/gpu/trainer.h"

#include <unistd.h>

#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <lockstep/captured_step.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/process_group.h>

#include "bench/ranks/gpu/model.h"

namespace lockstep::bench {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

const at::Device kFirstGpu(at::kCUDA, 0);
constexpr double kGpuLearningRate = 3e-4;  // gpu_trainer.py has the same

/// While it lives, this thread computes in bfloat16 what that is good enough for.
class Autocast {
 public:
  Autocast() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCUDA, true);
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCUDA, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

/// One model with its optimizer, on the GPU, with DistributedDataParallel where there is a group.
class GpuTraining {
 public:
  GpuTraining(GpuTask task, const std::optional<ProcessGroup>& group, bool is_captured) : task_(std::move(task)) {
    task_.model->to(kFirstGpu);
    task_.input = task_.input.to(kFirstGpu);
    task_.target = task_.target.to(kFirstGpu);
    if (group) ddp_.emplace(task_.model, *group);
    parameters_ = task_.model->parameters();
    optimizer_ = std::make_unique<FusedAdamW>(parameters_, torch::optim::AdamWOptions(kGpuLearningRate));
    if (is_captured) captured_.emplace(*group, Step{*this});
  }

  double train(int steps) {
    at::Tensor loss;
    for (int i = 0; i < steps; ++i)
      loss = captured_ ? (*captured_)(task_.input, task_.target) : step(task_.input, task_.target);
    const auto last = loss.item<double>();
    torch::cuda::synchronize();
    return last;
  }

 private:
  struct Step {
    at::Tensor operator()(const at::Tensor& input, const at::Tensor& target) { return training.step(input, target); }
    GpuTraining& training;
  };

  at::Tensor step(const at::Tensor& input, const at::Tensor& target) {
    for (const auto& parameter : parameters_) parameter.mutable_grad().reset();
    auto loss = forward(input, target);
    loss.backward();
    optimizer_->step();
    return loss.detach();
  }

  at::Tensor forward(const at::Tensor& input, const at::Tensor& target) {
    std::optional<Autocast> autocast;
    if (task_.in_bfloat16) autocast.emplace();
    return at::cross_entropy_loss(ddp_ ? (*ddp_)(input) : task_.model->forward(input), target);
  }

  GpuTask task_;
  std::optional<DistributedDataParallel<torch::nn::SequentialImpl>> ddp_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<FusedAdamW> optimizer_;
  std::optional<CapturedStep<Step>> captured_;
};

int64_t peak_bytes() {
  return allocator::getDeviceStats(0).allocated_bytes[0].peak;  // 0: of all pools together
}

std::string answer_request(const std::string& request, const std::optional<ProcessGroup>& group, bool is_captured,
                           std::unique_ptr<GpuTraining>& training) {
  std::istringstream words(request);
  std::string command, argument;
  words >> command >> argument;
  if (command == "train") return std::to_string(training->train(std::stoi(argument)));
  if (command == "peak") return std::to_string(peak_bytes());
  if (command != "model" && command != "drop") throw UsageError("there is no request " + command);
  training.reset();
  allocator::emptyCache();
  allocator::resetPeakStats(0);
  if (command == "model") training = std::make_unique<GpuTraining>(make_gpu_task(argument), group, is_captured);
  return "";
}

}  // namespace

std::vector<std::string> usable_gpus() {
  std::vector<std::string> names;
  for (int i = 0; i < static_cast<int>(torch::cuda::device_count()); ++i)
    names.emplace_back(at::cuda::getDeviceProperties(i)->name);
  return names;
}

void serve_trainer(const std::string& side) {
  const int answers = ::dup(STDOUT_FILENO);
  ::dup2(STDERR_FILENO, STDOUT_FILENO);  // whatever else is printed, by NCCL for one, is no answer
  const auto say = [answers](const std::string& answer) {
    const auto line = answer + "\n";
    if (::write(answers, line.data(), line.size()) < 0) throw SystemError("nobody listens any more");
  };
  at::globalContext().setFloat32MatmulPrecision("high");
  at::zeros({1}, kFirstGpu);  // makes the allocator ready to be asked
  std::optional<ProcessGroup> group;
  if (side != "plain") group = init_process_group({.backend = "nccl", .rank = 0, .world_size = 1, .device = kFirstGpu});
  std::unique_ptr<GpuTraining> training;
  say(TORCH_VERSION);
  for (std::string request; std::getline(std::cin, request);)
    say(answer_request(request, group, side == "captured", training));
}

}  // namespace lockstep::bench
