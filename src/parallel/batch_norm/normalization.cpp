#include "parallel/batch_norm/normalization.h"

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

int64_t count_of(const at::Tensor& input) {
  return input.size(1) == 0 ? 0 : input.numel() / input.size(1);
}

/// Converts 16-bit types to float: some of LibTorch's kernels do not accept 16-bit types, and counts do not fit in
/// them.
at::Tensor widened(const at::Tensor& tensor) {
  return tensor.defined() && tensor.element_size() == 2 ? tensor.to(at::kFloat) : tensor;
}

/// Returns a matrix with one row of each rank. Collective.
at::Tensor gather_rows(const at::Tensor& row, const ProcessGroup& group) {
  auto rows = at::empty({group.size(), row.numel()}, row.options());
  group.all_gather(rows, row);
  return rows;
}

// --- on a CPU: LibTorch's evaluation kernels, with the moments of all ranks in place of the running statistics

at::Tensor transform(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const BatchMoments& moments, double eps) {
  if (input.numel() == 0) return at::empty_like(input);
  return std::get<0>(
      at::native_batch_norm(input, weight, bias, moments.mean, moments.spread, /*training=*/false, 0, eps));
}

void update_running(const at::Tensor& running, const at::Tensor& now, double momentum) {
  if (running.defined()) running.mul_(1 - momentum).add_(now.to(running.scalar_type()), momentum);
}

Normalized normalize_on_cpu(const at::Tensor& original, const NormalizingLayer& layer, const ProcessGroup& group) {
  const auto input = widened(original);
  const auto channels = input.size(1);
  const auto doubles = at::TensorOptions(at::kDouble);
  auto row = at::zeros({2 * channels + 1}, doubles);
  if (const auto count = count_of(input); count > 0) {
    auto [mean, variance] = at::batch_norm_update_stats(input, {}, {}, 0);
    row.narrow(0, 0, channels).copy_(mean);
    row.narrow(0, channels, channels).copy_(variance);
    row[2 * channels] = count;
  }
  const auto rows = gather_rows(row, group);
  const auto means = rows.narrow(1, 0, channels);
  const auto variances = rows.narrow(1, channels, channels);
  const auto counts = rows.narrow(1, 2 * channels, 1);
  const double total = counts.sum().item<double>();
  check_total(total, group);
  const auto mean = (means * counts).sum(0) / total;
  const auto variance = ((variances + (means - mean).square()) * counts).sum(0) / total;
  update_running(layer.running_mean, mean, layer.momentum);
  update_running(layer.running_var, variance * (total / (total - 1)), layer.momentum);
  const BatchMoments moments{mean.to(input.scalar_type()), variance.to(input.scalar_type()), counts};
  auto output = transform(input, widened(layer.weight), widened(layer.bias), moments, layer.eps);
  return {output.to(original.scalar_type()), moments};
}

NormalizationGradients gradients_on_cpu(const at::Tensor& output_gradient, const at::Tensor& original,
                                        const at::Tensor& original_weight, const BatchMoments& moments, double eps,
                                        bool wants_input, const ProcessGroup& group) {
  const auto input = widened(original);
  const auto weight = widened(original_weight);
  NormalizationGradients result{at::empty_like(input), at::zeros_like(moments.mean), at::zeros_like(moments.mean)};
  if (input.numel() > 0)
    std::tie(result.input, result.weight, result.bias) =
        at::native_batch_norm_backward(widened(output_gradient), input, weight, moments.mean, moments.spread, {}, {},
                                       /*train=*/false, eps, {wants_input, true, true});
  if (wants_input) {  // adds the gradient through the moments, which depend on the inputs of all ranks
    const auto sums = at::stack({result.weight, result.bias}).to(at::kDouble);
    group.all_reduce(sums);
    auto scale = (moments.spread.to(at::kDouble) + eps).rsqrt() / moments.counts.sum();
    if (weight.defined()) scale = scale * weight;
    const auto shares = (sums * scale).to(input.scalar_type());
    result.input.sub_(transform(input, shares[0], shares[1], moments, eps));
  }
  return {wants_input ? result.input.to(original.scalar_type()) : at::Tensor(), result.weight, result.bias};
}

// --- on a GPU: the kernels that LibTorch provides for Python's SyncBatchNorm

// Count of a rank without values. The kernel divides by the running sum of counts, which would be 0 if the first ranks
// have no values.
constexpr double kNoValues = 1e-30;

/// Returns the tensor contiguous in the memory format that the kernels require.
at::Tensor dense(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.contiguous(like.suggest_memory_format());
}

Normalized normalize_on_gpu(const at::Tensor& original, const NormalizingLayer& layer, const ProcessGroup& group) {
  const auto input = dense(original, original);
  const auto channels = input.size(1);
  const auto count = count_of(input);
  const auto floats = input.options().dtype(input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  auto mean = at::zeros({channels}, floats), invstd = at::ones({channels}, floats);
  if (count > 0) std::tie(mean, invstd) = at::batch_norm_stats(input, layer.eps);
  const auto counted = at::full({1}, count > 0 ? static_cast<double>(count) : kNoValues, floats);
  const auto rows = gather_rows(at::cat({mean, invstd, counted}), group);
  const auto counts = rows.narrow(1, 2 * channels, 1).flatten();
  if (count < 2) check_total(counts.sum().item<double>(), group);  // item() blocks; skip it if the total is at least 2
  const auto running_mean = widened(layer.running_mean), running_var = widened(layer.running_var);
  std::tie(mean, invstd) =  // the first argument only determines the dtype of the results
      at::batch_norm_gather_stats_with_counts(mean, rows.narrow(1, 0, channels), rows.narrow(1, channels, channels),
                                              running_mean, running_var, layer.momentum, layer.eps, counts);
  if (!running_mean.is_same(layer.running_mean)) {
    layer.running_mean.copy_(running_mean);
    layer.running_var.copy_(running_var);
  }
  auto output = count > 0
                    ? at::batch_norm_elemt(input, widened(layer.weight), widened(layer.bias), mean, invstd, layer.eps)
                    : at::empty_like(input);
  return {output, {mean, invstd, counts}};
}

NormalizationGradients gradients_on_gpu(const at::Tensor& output_gradient, const at::Tensor& original,
                                        const at::Tensor& original_weight, const BatchMoments& moments,
                                        bool wants_input, const ProcessGroup& group) {
  const auto input = dense(original, original);
  const auto weight = widened(original_weight);
  const auto gradient = dense(output_gradient, input);
  const auto& [mean, invstd, counts] = moments;
  auto by_mean = at::zeros_like(mean), by_spread = at::zeros_like(mean);
  NormalizationGradients result{{}, at::zeros_like(mean), at::zeros_like(mean)};
  const bool has_values = input.numel() > 0;
  const bool has_weight = weight.defined();
  if (has_values)
    std::tie(by_mean, by_spread, result.weight, result.bias) = at::batch_norm_backward_reduce(
        gradient, input, mean, invstd, weight, wants_input || !has_weight, has_weight, has_weight);
  if (!has_weight) result.bias = by_mean;
  if (!wants_input) return result;
  const auto sums = at::stack({by_mean, by_spread});  // a copy: the all-reduce must not change the bias gradient
  group.all_reduce(sums);
  result.input = has_values ? at::batch_norm_backward_elemt(gradient, input, mean, invstd, weight, sums[0], sums[1],
                                                            counts.to(at::kInt))
                            : at::empty_like(input);
  return result;
}

}  // namespace

void check_total(double total, const ProcessGroup& group) {
  if (total < 2)
    throw UsageError(group.rank(),
                     text("the batches of all ranks together have ", total,
                          " values per channel, expected at least 2 in training; call eval() or use larger batches"));
}

Normalized normalize_over_ranks(const at::Tensor& input, const NormalizingLayer& layer, const ProcessGroup& group) {
  return input.is_cuda() ? normalize_on_gpu(input, layer, group) : normalize_on_cpu(input, layer, group);
}

NormalizationGradients gradients_over_ranks(const at::Tensor& output_gradient, const at::Tensor& input,
                                            const at::Tensor& weight, const BatchMoments& moments, double eps,
                                            bool wants_input, const ProcessGroup& group) {
  return input.is_cuda() ? gradients_on_gpu(output_gradient, input, weight, moments, wants_input, group)
                         : gradients_on_cpu(output_gradient, input, weight, moments, eps, wants_input, group);
}

}  // namespace lockstep
