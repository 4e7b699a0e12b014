#include "bench/ranks/gpu/model.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <lockstep/error.h>

#include "bench/ranks/ddp/model.h"

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

/// Attention and two linear layers, each behind a LayerNorm and around it.
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
    const auto x = input + through(projection_, attend(through(qkv_, norm1_(input))));
    return x + through(narrow_, at::gelu(through(widen_, norm2_(x))));
  }

 private:
  /// As in Python; Linear's own forward adds the bias in a step of its own.
  static at::Tensor through(const nn::Linear& layer, const at::Tensor& input) {
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
        places_(register_module("places", make_embedding(size.context, size.width))) {
    for (int64_t i = 0; i < size.layers; ++i)
      blocks_.push_back(register_module("block" + std::to_string(i), Block(size)));
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({size.width})));
  }

  at::Tensor forward(const at::Tensor& input) {
    auto x = tokens_(input) + places_(at::arange(input.size(1), input.options()));
    for (auto& block : blocks_) x = block(x);
    return at::linear(norm_(x), tokens_->weight).flatten(0, 1);
  }

 private:
  nn::Embedding tokens_, places_;
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

}  // namespace

GpuTask make_gpu_task(const std::string& name) {
  if (name == "mlp-small") return make_image_task("small");
  if (name == "cnn") return make_image_task("cnn");
  if (name == "gpt-6x384")
    return make_gpt_task({.layers = 6, .width = 384, .heads = 6, .context = 256, .vocabulary = 96, .batch = 64});
  if (name == "gpt-124m")
    return make_gpt_task({.layers = 12, .width = 768, .heads = 12, .context = 1024, .vocabulary = 50304, .batch = 8});
  throw UsageError("there is no model " + name);
}

}  // namespace lockstep::bench
