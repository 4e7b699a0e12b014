#include "bench/ranks/gpu_trainer.h"

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
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/version.h>

#include <lockstep/captured_step.h>
#include <lockstep/compiled_module.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/process_group.h>

#include "bench/ranks/ddp_training.h"

namespace lockstep::bench {
namespace {

namespace nn = torch::nn;

constexpr uint64_t kModelSeed = 1, kDataSeed = 2;
constexpr int64_t kImages = 64;

struct GptSize {
  int64_t layers, width, heads, context, vocabulary, batch;
};

nn::Embedding make_embedding(int64_t count, int64_t width) {
  nn::Embedding embedding(count, width);
  nn::init::normal_(embedding->weight, 0, 0.02);
  return embedding;
}

/// A transformer block: attention and two linear layers, each with a LayerNorm before and a residual connection around
/// it.
class BlockImpl : public nn::Module {
 public:
  explicit BlockImpl(const GptSize& size)
      : heads_(size.heads),
        norm1_(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({size.width})))),
        qkv_(register_module("qkv", nn::Linear(size.width, 3 * size.width))),
        projection_(register_module("projection", nn::Linear(size.width, size.width))),
        norm2_(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({size.width})))),
        widen_(register_module("widen", nn::Linear(size.width, 4 * size.width))),
        narrow_(register_module("narrow", nn::Linear(4 * size.width, size.width))) {}

  at::Tensor forward(const at::Tensor& input) {
    const auto x = input + linear(projection_, attend(linear(qkv_, norm1_(input))));
    return x + linear(narrow_, at::gelu(linear(widen_, norm2_(x))));
  }

 private:
  /// Adds the bias in the kernel of the product, like Python; torch::nn::Linear::forward uses a separate kernel.
  static at::Tensor linear(const nn::Linear& layer, const at::Tensor& input) {
    return at::linear(input, layer->weight, layer->bias);
  }

  at::Tensor attend(const at::Tensor& qkv) const {
    const auto batch = qkv.size(0), context = qkv.size(1), width = qkv.size(2) / 3;
    const auto parts = qkv.view({batch, context, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    return attended.transpose(1, 2).reshape({batch, context, width});
  }

  const int64_t heads_;
  nn::LayerNorm norm1_;
  nn::Linear qkv_, projection_;
  nn::LayerNorm norm2_;
  nn::Linear widen_, narrow_;
};
TORCH_MODULE(Block);

class GptImpl : public nn::Module {
 public:
  explicit GptImpl(const GptSize& size)
      : tokens_(register_module("tokens", make_embedding(size.vocabulary, size.width))),
        positions_(register_module("positions", make_embedding(size.context, size.width))) {
    for (int64_t i = 0; i < size.layers; ++i)
      blocks_.push_back(register_module("block" + std::to_string(i), Block(size)));
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({size.width})));
  }

  at::Tensor forward(const at::Tensor& input) {
    auto x = tokens_(input) + positions_(at::arange(input.size(1), input.options()));
    for (auto& block : blocks_) x = block(x);
    return at::linear(norm_(x), tokens_->weight).flatten(0, 1);
  }

 private:
  nn::Embedding tokens_, positions_;
  std::vector<Block> blocks_;
  nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Gpt);

GpuTask make_gpt_task(const GptSize& size) {
  at::manual_seed(kModelSeed);
  GpuTask task{.model = nn::Sequential(Gpt(size)), .input = {}, .target = {}, .in_bfloat16 = true};
  at::manual_seed(kDataSeed);
  task.input = at::randint(size.vocabulary, {size.batch, size.context}, at::kLong);
  task.target = at::randint(size.vocabulary, {size.batch * size.context}, at::kLong);
  return task;
}

GpuTask make_image_task(const std::string& model) {
  GpuTask task{.model = make_model(model), .input = {}, .target = {}};
  at::manual_seed(kDataSeed);
  auto shape = input_shape(model);
  shape.insert(shape.begin(), kImages);
  task.input = at::randn(shape);
  task.target = at::randint(kClasses, {kImages}, at::kLong);
  return task;
}

namespace allocator = c10::cuda::CUDACachingAllocator;

const at::Device kFirstGpu(at::kCUDA, 0);
constexpr double kGpuLearningRate = 3e-4;  // gpu_trainer.py has the same

/// Enables autocast to bfloat16 on this thread while it exists.
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

/// One model with its optimizer on the GPU, with DistributedDataParallel if there is a group.
class GpuTraining {
 public:
  /// `compiled_file` is empty, or the file of the same model, which is trained instead.
  GpuTraining(GpuTask task, const std::optional<ProcessGroup>& group, bool is_captured,
              const std::string& compiled_file)
      : task_(std::move(task)) {
    task_.input = task_.input.to(kFirstGpu);
    task_.target = task_.target.to(kFirstGpu);
    if (compiled_file.empty()) {
      task_.model->to(kFirstGpu);
      if (group) ddp_.emplace(task_.model, *group);
      parameters_ = task_.model->parameters();
    } else {
      task_.model = nullptr;
      compiled_.emplace(CompiledModule(compiled_file, kFirstGpu), *group);
      parameters_ = compiled_->parameters();
    }
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
    if (compiled_) return (*compiled_)(input, target).toTensor();
    std::optional<Autocast> autocast;
    if (task_.in_bfloat16) autocast.emplace();
    return at::cross_entropy_loss(ddp_ ? (*ddp_)(input) : task_.model->forward(input), target);
  }

  GpuTask task_;
  std::optional<DistributedDataParallel<torch::nn::SequentialImpl>> ddp_;
  std::optional<DistributedDataParallel<CompiledModuleImpl>> compiled_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<FusedAdamW> optimizer_;
  std::optional<CapturedStep<Step>> captured_;
};

int64_t peak_bytes() {
  return allocator::getDeviceStats(0).allocated_bytes[0].peak;  // 0: aggregate over all pools
}

std::string answer_request(const std::string& request, const std::optional<ProcessGroup>& group,
                           const std::string& side, std::unique_ptr<GpuTraining>& training) {
  std::istringstream words(request);
  std::string command, argument, file;
  words >> command >> argument >> file;
  if (command == "train") return std::to_string(training->train(std::stoi(argument)));
  if (command == "peak") return std::to_string(peak_bytes());
  if (command != "model" && command != "drop") throw UsageError("unknown request " + command);
  training.reset();
  allocator::emptyCache();
  allocator::resetPeakStats(0);
  if (command == "model")
    training = std::make_unique<GpuTraining>(make_gpu_task(argument), group, side.ends_with("captured"),
                                             side.starts_with("compiled") ? file : "");
  return "";
}

}  // namespace

GpuTask make_gpu_task(const std::string& name) {
  if (name == "mlp-small") return make_image_task("small");
  if (name == "cnn") return make_image_task("cnn");
  if (name == "gpt-6x384")
    return make_gpt_task({.layers = 6, .width = 384, .heads = 6, .context = 256, .vocabulary = 96, .batch = 64});
  if (name == "gpt-124m")
    return make_gpt_task({.layers = 12, .width = 768, .heads = 12, .context = 1024, .vocabulary = 50304, .batch = 8});
  throw UsageError("unknown model " + name);
}

std::vector<std::string> usable_gpus() {
  std::vector<std::string> names;
  for (int i = 0; i < static_cast<int>(torch::cuda::device_count()); ++i)
    names.emplace_back(at::cuda::getDeviceProperties(i)->name);
  return names;
}

void serve_trainer(const std::string& side) {
  const int answers = ::dup(STDOUT_FILENO);
  ::dup2(STDERR_FILENO, STDOUT_FILENO);  // other output, such as that of NCCL, must not mix with the answers
  const auto print_answer = [answers](const std::string& answer) {
    const auto line = answer + "\n";
    if (::write(answers, line.data(), line.size()) < 0)
      throw SystemError("cannot write the answer: the parent process has ended");
  };
  at::globalContext().setFloat32MatmulPrecision("high");
  at::zeros({1}, kFirstGpu);  // initializes CUDA's caching allocator
  std::optional<ProcessGroup> group;
  if (side != "plain") group = init_process_group({.backend = "nccl", .rank = 0, .world_size = 1, .device = kFirstGpu});
  std::unique_ptr<GpuTraining> training;
  print_answer(TORCH_VERSION);
  for (std::string request; std::getline(std::cin, request);)
    print_answer(answer_request(request, group, side, training));
}

}  // namespace lockstep::bench
