// update_batch_norm(): the statistics of batch normalization for averaged weights.

#include <lockstep/weight_average.h>

#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/batchnorm.h>

#include <lockstep/error.h>
#include <lockstep/sync_batch_norm.h>

#include "base/text.h"
#include "comm/torch_version.h"

namespace lockstep {
namespace {

/// A layer that tracks statistics, with its saved options and statistics.
struct TrackingLayer {
  torch::nn::BatchNormOptions* options;
  torch::nn::BatchNormOptions old_options;
  std::vector<at::Tensor> statistics;  // running mean, running variance, number of batches
  std::vector<at::Tensor> old_statistics;

  const at::Tensor& batches() const { return statistics[2]; }
  void reset() const {
    statistics[0].zero_();  // in place: SyncBatchNorm's conversion of a layer is a mark on this tensor
    statistics[1].fill_(1);
    statistics[2].zero_();
  }
  void restore_statistics() const { detail::copy_together(statistics, old_statistics); }
};

/// Adds the layer if it is of that class, tracks statistics and is not in the list yet.
template <class Layer>
void add_if_tracking(torch::nn::Module& module, std::vector<TrackingLayer>& layers) {
  auto* layer = dynamic_cast<Layer*>(&module);
  if (!layer || !layer->running_mean.defined()) return;
  for (const auto& known : layers)
    if (known.options == &layer->options) return;
  const std::vector<at::Tensor> statistics{layer->running_mean, layer->running_var, layer->num_batches_tracked};
  std::vector<at::Tensor> copies;
  for (const auto& tensor : statistics) copies.push_back(tensor.clone());
  layers.push_back({&layer->options, layer->options, statistics, std::move(copies)});
}

std::vector<TrackingLayer> tracking_layers_of(torch::nn::Module& model) {
  std::vector<TrackingLayer> layers;
  model.apply([&](torch::nn::Module& module) {
    add_if_tracking<torch::nn::BatchNorm1dImpl>(module, layers);
    add_if_tracking<torch::nn::BatchNorm2dImpl>(module, layers);
    add_if_tracking<torch::nn::BatchNorm3dImpl>(module, layers);
    add_if_tracking<SyncBatchNormImpl>(module, layers);
  });
  return layers;
}

/// Replaces the means over this rank's batches by the means over the batches of all ranks: one all-reduce of the sums.
void average_over_ranks(const std::vector<TrackingLayer>& layers, const ProcessGroup& group,
                        const CallOptions& options) {
  const auto wide = [&](const at::Tensor& tensor) { return tensor.reshape({-1}).to(group.device(), at::kDouble); };
  std::vector<at::Tensor> parts;
  std::vector<int64_t> sizes;
  for (const auto& layer : layers) {
    const auto batches = wide(layer.batches());
    for (const auto& part : {wide(layer.statistics[0]) * batches, wide(layer.statistics[1]) * batches, batches}) {
      parts.push_back(part);
      sizes.push_back(part.numel());
    }
  }
  const auto sums = at::cat(parts);
  group.all_reduce(sums, ReduceOp::kSum, options);
  parts = sums.split_with_sizes(sizes);
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto total = parts[3 * i + 2];
    for (size_t k : {0, 1}) layers[i].statistics[k].copy_(parts[3 * i + k] / total);
    layers[i].batches().copy_(total.reshape({}));
  }
}

void compute_statistics(torch::nn::Module& model, const ProcessGroup* group,
                        const std::function<void()>& forward_batches, const CallOptions& call) {
  if (group && !group->contains_me())
    throw UsageError(
        text("update_batch_norm: this rank is not in group '", group->name(), "'; pass a group that contains it"));
  const c10::NoGradGuard no_grad;
  const auto layers = tracking_layers_of(model);
  if (layers.empty()) return;
  std::vector<std::pair<torch::nn::Module*, bool>> modes;  // parents before children, whose mode they change
  model.apply([&](torch::nn::Module& module) { modes.emplace_back(&module, module.is_training()); });
  const auto restore_modes = [&] {
    for (const auto& [module, was_training] : modes) module->train(was_training);
    for (const auto& layer : layers) layer.options->momentum(layer.old_options.momentum());
  };
  try {
    model.train();
    for (const auto& layer : layers) {
      layer.reset();
      layer.options->momentum({});  // the mean of all batches
    }
    forward_batches();
    if (group) average_over_ranks(layers, *group, call);
    int64_t used = 0;
    for (const auto& layer : layers) {
      if (layer.batches().item<int64_t>() > 0)
        ++used;
      else
        layer.restore_statistics();
    }
    if (used == 0)
      throw UsageError(text("update_batch_norm: none of the ", layers.size(), " layers got a batch",
                            group ? " on any rank" : "",
                            "; forward_batches must call the model's forward at least once"));
  } catch (...) {
    for (const auto& layer : layers) layer.restore_statistics();
    restore_modes();
    throw;
  }
  restore_modes();
}

}  // namespace

void update_batch_norm(torch::nn::Module& model, const std::function<void()>& forward_batches) {
  compute_statistics(model, nullptr, forward_batches, {});
}

void update_batch_norm(torch::nn::Module& model, const ProcessGroup& group,
                       const std::function<void()>& forward_batches, const CallOptions& options) {
  compute_statistics(model, &group, forward_batches, options);
}

}  // namespace lockstep
