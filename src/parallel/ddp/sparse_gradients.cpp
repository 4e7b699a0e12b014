#include "parallel/ddp/sparse_gradients.h"

#include <numeric>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/embedding.h>

namespace lockstep {
namespace {

const CallOptions kForSparse{.site = {"backward of DistributedDataParallel, for sparse gradients", 0}};

/// The rows of a sparse gradient: their indices and their values.
struct Rows {
  at::Tensor indices;  // [rows]
  at::Tensor values;   // [rows, ...]

  int64_t count() const { return indices.numel(); }
};

Rows rows_of(const at::Tensor& gradient, const at::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  if (!gradient.defined()) {
    sizes[0] = 0;
    return {at::empty({0}, parameter.options().dtype(at::kLong)), at::empty(sizes, parameter.options())};
  }
  const bool has_rows = gradient.is_sparse() && gradient.sparse_dim() == 1;
  const auto dense = [&] { return gradient.is_sparse() ? gradient.to_dense() : gradient; };
  const auto sparse = (has_rows ? gradient : dense().to_sparse(1)).coalesce();
  return {sparse.indices()[0].contiguous(), sparse.values().contiguous()};
}

std::vector<at::Tensor> places_for(const at::Tensor& own, const std::vector<int64_t>& counts) {
  std::vector<at::Tensor> places;
  auto sizes = own.sizes().vec();
  for (const auto count : counts) {
    sizes[0] = count;
    places.push_back(at::empty(sizes, own.options()));
  }
  return places;
}

at::Tensor gathered(const ProcessGroup& group, const at::Tensor& own, const std::vector<int64_t>& counts) {
  const auto all = places_for(own, counts);
  group.all_gather(all, own, kForSparse);
  return at::cat(all);
}

}  // namespace

std::vector<const c10::TensorImpl*> sparse_weights_of(const torch::nn::Module& module) {
  std::vector<const c10::TensorImpl*> weights;
  auto visit = [&](const torch::nn::Module& layer) {
    if (const auto* table = layer.as<torch::nn::EmbeddingImpl>(); table && table->options.sparse())
      weights.push_back(table->weight.unsafeGetTensorImpl());
    if (const auto* table = layer.as<torch::nn::EmbeddingBagImpl>(); table && table->options.sparse())
      weights.push_back(table->weight.unsafeGetTensorImpl());
  };
  visit(module);
  for (const auto& layer : module.modules(/*include_self=*/false)) visit(*layer);
  return weights;
}

std::vector<at::Tensor> average_sparse(const ProcessGroup& group, const std::vector<at::Tensor>& gradients,
                                       const std::vector<at::Tensor>& parameters) {
  const c10::NoGradGuard no_grad;
  const auto tensors = static_cast<int64_t>(parameters.size());
  std::vector<Rows> own;
  auto counts = at::empty({tensors}, at::kLong);
  for (int64_t i = 0; i < tensors; ++i) {
    own.push_back(rows_of(gradients[i], parameters[i]));
    counts.data_ptr<int64_t>()[i] = own.back().count();
  }
  auto all_counts = at::empty({group.size(), tensors}, at::TensorOptions(at::kLong).device(group.device()));
  group.all_gather(all_counts, counts.to(group.device()), kForSparse);
  all_counts = all_counts.cpu();

  std::vector<at::Tensor> averages;
  for (int64_t i = 0; i < tensors; ++i) {
    std::vector<int64_t> rows;
    for (int rank = 0; rank < group.size(); ++rank) rows.push_back(all_counts[rank][i].item<int64_t>());
    const auto indices = gathered(group, own[i].indices, rows);
    const auto values = gathered(group, own[i].values, rows);
    auto sum = at::sparse_coo_tensor(indices.unsqueeze(0), values, parameters[i].sizes()).coalesce();
    sum.values().div_(group.size());
    averages.push_back(std::move(sum));
  }
  return averages;
}

}  // namespace lockstep
