#include <lockstep/gradient_tools.h>

#include <cmath>
#include <map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>
#include "comm/torch_version.h"

#include "base/text.h"
#include "optim/gradient_clipping.h"

namespace lockstep {
namespace {

/// Gradients by device and dtype, in the order of the parameters.
using Lists = std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>>;

Lists by_device_and_dtype(const std::vector<at::Tensor>& gradients) {
  Lists lists;
  for (const auto& gradient : gradients) lists[{gradient.device().str(), gradient.scalar_type()}].push_back(gradient);
  return lists;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

/// Returns the parameters that have a gradient, each once.
std::vector<at::Tensor> with_gradients(const std::vector<at::Tensor>& parameters, const char* name) {
  std::vector<at::Tensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (gradient.layout() != c10::kStrided)
      throw UsageError(
          text(name, ": a parameter of sizes ", parameter.sizes(), " has a sparse gradient, expected a dense one"));
    result.push_back(parameter);
  }
  return result;
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const ClipGradNormOptions& options) {
  const auto used = with_gradients(parameters, "clip_grad_norm_");
  return detail::clip_gradients(gradients_of(used), max_norm, options,
                                [](const at::Tensor& norm, double) { return norm; });
}

at::Tensor detail::clip_gradients(const std::vector<at::Tensor>& gradients, double max_norm,
                                  const ClipGradNormOptions& options, const CombineNorms& combine) {
  if (!(max_norm >= 0)) throw UsageError(text("clip_grad_norm_: max_norm is ", max_norm, ", expected 0 or more"));
  const c10::NoGradGuard no_grad;
  const auto lists = by_device_and_dtype(gradients);
  const auto home = gradients.empty() ? at::Device(at::kCPU) : gradients.front().device();
  std::vector<at::Tensor> norms;
  for (const auto& [kind, list] : lists)
    for (const auto& norm : at::_foreach_norm(list, options.norm_type))
      norms.push_back(norm.to(home, norm.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  const auto total = combine(
      norms.empty() ? at::zeros({}) : at::linalg_vector_norm(at::stack(norms), options.norm_type), options.norm_type);
  if (options.error_if_nonfinite && !std::isfinite(total.item<double>()))
    throw Error(text("clip_grad_norm_: the norm of the gradients is ", total.item<double>(),
                     "; the loss or a gradient is not finite"));

  if (gradients.empty()) return total;
  auto scale = (max_norm / (total + 1e-6)).clamp_max(1.0);
  if (home.is_cpu() && scale.item<double>() == 1) return total;
  for (const auto& [kind, list] : lists)
    detail::multiply_together(list, scale.to(list.front().device(), list.front().scalar_type()));
  return total;
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double max_value) {
  if (!(max_value >= 0)) throw UsageError(text("clip_grad_value_: max_value is ", max_value, ", expected 0 or more"));
  const c10::NoGradGuard no_grad;
  for (const auto& [kind, list] : by_device_and_dtype(gradients_of(with_gradients(parameters, "clip_grad_value_"))))
    detail::clamp_together(list, max_value);
}

size_t drop_zero_gradients(const std::vector<at::Tensor>& parameters) {
  const c10::NoGradGuard no_grad;
  const auto used = with_gradients(parameters, "drop_zero_gradients");
  if (used.empty()) return 0;
  std::vector<at::Tensor> facts;
  for (const auto& parameter : used) facts.push_back(parameter.grad().ne(0).any().to(used.front().device()));
  const auto is_other = at::stack(facts).cpu();
  size_t dropped = 0;
  for (size_t i = 0; i < used.size(); ++i) {
    if (is_other.data_ptr<bool>()[i]) continue;
    used[i].mutable_grad().reset();
    ++dropped;
  }
  return dropped;
}

}  // namespace lockstep
