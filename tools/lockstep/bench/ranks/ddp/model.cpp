#include "bench/ranks/ddp/model.h"

#include <mutex>

#include <ATen/Context.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <lockstep/error.h>

namespace lockstep::bench {
namespace {

namespace nn = torch::nn;

constexpr uint64_t kSeed = 1;

/// Linear layers of these widths, and a ReLU between two.
void add_linear_layers(nn::Sequential& model, const std::vector<int64_t>& widths) {
  for (size_t i = 1; i < widths.size(); ++i) {
    if (i > 1) model->push_back(nn::ReLU());
    model->push_back(nn::Linear(widths[i - 1], widths[i]));
  }
}

/// Halves width and height.
void add_convolution(nn::Sequential& model, int64_t from_channels, int64_t to_channels) {
  model->push_back(nn::Conv2d(nn::Conv2dOptions(from_channels, to_channels, 3).padding(1)));
  model->push_back(nn::BatchNorm2d(to_channels));
  model->push_back(nn::ReLU());
  model->push_back(nn::MaxPool2d(2));
}

}  // namespace

torch::nn::Sequential make_model(const std::string& name) {
  static std::mutex mutex;  // the random numbers of modules are the process's, but ranks may be threads
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
    throw UsageError("there is no model " + name);
  }
  return model;
}

std::vector<int64_t> input_shape(const std::string& model) {
  if (model == "cnn") return {1, 28, 28};
  return {784};
}

}  // namespace lockstep::bench
