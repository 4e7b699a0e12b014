#include <lockstep/grad_scaler.h>

#include <cmath>
#include <map>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "base/text.h"
#include "comm/capture.h"
#include "optim/zero/sharded_memory.h"

namespace lockstep {
namespace {

using torch::optim::Optimizer;

using GradientLists = std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>>;

[[noreturn]] void refuse_half(const at::Tensor& parameter) {
  throw UsageError(text("GradScaler: a parameter of sizes ", parameter.sizes(),
                        " has a gradient in float16, which would overflow when it is unscaled; keep the parameters in "
                        "float32 and use lockstep::autocast"));
}

/// Of a sparse gradient, the values are scaled.
GradientLists gradients_of_optimizer(const Optimizer& optimizer) {
  GradientLists lists;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& gradient = parameter.mutable_grad();
      if (gradient.scalar_type() == at::kHalf) refuse_half(parameter);
      if (gradient.is_sparse()) gradient = gradient.coalesce();
      const auto values = gradient.is_sparse() ? gradient._values() : gradient;
      lists[{values.device().str(), values.scalar_type()}].push_back(values);
    }
  return lists;
}

GradientLists lists_of(const std::vector<at::Tensor>& gradients) {
  GradientLists lists;
  for (const auto& gradient : gradients) {
    if (gradient.scalar_type() == at::kHalf) refuse_half(gradient);
    lists[{gradient.device().str(), gradient.scalar_type()}].push_back(gradient);
  }
  return lists;
}

/// Multiplies the gradients by `inverse` and sets `found` to 1 if one of them is not finite.
void check_and_unscale(const std::vector<at::Tensor>& gradients, at::Tensor found, const at::Tensor& inverse) {
  if (found.is_cuda()) return at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
  bool is_finite = true;
  for (auto gradient : gradients) {
    gradient.mul_(inverse.to(gradient.scalar_type()));
    is_finite = is_finite && at::isfinite(gradient).all().item<bool>();
  }
  if (!is_finite) found.fill_(1);
}

void check_positive(const char* name, double value, bool is_valid, const char* expected) {
  if (!is_valid) throw UsageError(text("GradScaler: ", name, " is ", value, ", expected ", expected));
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)), next_scale_(options_.init_scale) {
  if (!options_.enabled) return;
  check_positive("init_scale", options_.init_scale, options_.init_scale > 0 && std::isfinite(options_.init_scale),
                 "a positive number");
  check_positive("growth_factor", options_.growth_factor, options_.growth_factor > 1, "more than 1");
  check_positive("backoff_factor", options_.backoff_factor, options_.backoff_factor > 0 && options_.backoff_factor < 1,
                 "a number between 0 and 1");
  check_positive("growth_interval", static_cast<double>(options_.growth_interval), options_.growth_interval > 0,
                 "1 or more");
}

void GradScaler::prepare(c10::Device device) {
  if (scale_.defined()) return;
  if (detail::is_capturing(device))
    throw UsageError(
        "GradScaler: the first scale() cannot be captured, because it allocates the scale; run one step "
        "before the capture");
  scale_ = at::full({}, next_scale_, at::TensorOptions(device).dtype(at::kFloat));
  growth_tracker_ = at::full({}, next_tracker_, at::TensorOptions(device).dtype(at::kInt));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  prepare(loss.device());
  return loss * scale_.to(loss.device());
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!options_.enabled) return;
  if (!scale_.defined()) throw UsageError("GradScaler: unscale_() or step() was called before scale()");
  auto& state = stages_[&optimizer];
  if (state.stage != Stage::kReady)
    throw UsageError(text("GradScaler: unscale_() was called after ",
                          state.stage == Stage::kUnscaled ? "unscale_()" : "step()",
                          " of the same optimizer; call update() between two steps"));
  const c10::NoGradGuard no_grad;
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  auto found_inf = at::zeros({1}, scale_.options());
  const auto* zero = dynamic_cast<const ZeroRedundancyOptimizerBase*>(&optimizer);
  const auto sharded = zero ? zero->sharded_gradients() : std::nullopt;
  for (const auto& [kind, gradients] : sharded ? lists_of(*sharded) : gradients_of_optimizer(optimizer)) {
    const auto device = gradients.front().device();
    auto found = device == scale_.device() ? found_inf : at::zeros({1}, scale_.options().device(device));
    check_and_unscale(gradients, found, inverse.to(device));
    if (!found.is_same(found_inf)) found_inf.add_(found.to(scale_.device())).clamp_max_(1);
  }
  if (sharded) zero->join_group().all_reduce(found_inf, ReduceOp::kMax, detail::kInStep);
  if (options_.group) options_.group->all_reduce(found_inf, ReduceOp::kMax);
  state = {Stage::kUnscaled, std::move(found_inf)};
}

void GradScaler::step(Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return;
  }
  auto& state = stages_[&optimizer];
  if (state.stage == Stage::kStepped)
    throw UsageError("GradScaler: step() was called twice for the same optimizer; call update() after each step");
  if (state.stage == Stage::kReady) unscale_(optimizer);
  if (auto* skippable = dynamic_cast<SkippableStep*>(&optimizer))
    skippable->step_unless(state.found_inf);
  else if (state.found_inf.item<float>() == 0)
    optimizer.step();
  state.stage = Stage::kStepped;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  if (new_scale) {
    check_positive("the new scale", *new_scale, *new_scale > 0 && std::isfinite(*new_scale), "a positive number");
    if (scale_.defined()) scale_.fill_(*new_scale);
    next_scale_ = *new_scale;
    stages_.clear();
    return;
  }
  at::Tensor found_inf;
  for (const auto& [optimizer, state] : stages_) {
    if (!state.found_inf.defined()) continue;
    found_inf = found_inf.defined() ? at::max(found_inf, state.found_inf) : state.found_inf;
  }
  if (!found_inf.defined())
    throw UsageError(
        "GradScaler: update() was called, but no gradients were unscaled since the last update(); call "
        "step() before update()");
  if (scale_.is_cuda()) {
    at::_amp_update_scale_(scale_, growth_tracker_, found_inf, options_.growth_factor, options_.backoff_factor,
                           options_.growth_interval);
  } else if (found_inf.item<float>() != 0) {
    scale_.fill_(scale_.item<float>() * options_.backoff_factor);
    growth_tracker_.zero_();
  } else if (growth_tracker_.add_(1).item<int>() == options_.growth_interval) {
    const auto grown = static_cast<float>(scale_.item<float>() * options_.growth_factor);
    if (std::isfinite(grown)) scale_.fill_(grown);
    growth_tracker_.zero_();
  }
  stages_.clear();
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return scale_.defined() ? scale_.item<double>() : next_scale_;
}

Value GradScaler::state_dict() const {
  if (!options_.enabled) return Value::dict();
  return Value::dict(
      {{"scale", get_scale()},
       {"growth_factor", options_.growth_factor},
       {"backoff_factor", options_.backoff_factor},
       {"growth_interval", options_.growth_interval},
       {"_growth_tracker", growth_tracker_.defined() ? growth_tracker_.item<int64_t>() : next_tracker_}});
}

void GradScaler::load_state_dict(const Value& value) {
  if (!options_.enabled) return;
  if (value.size() == 0)
    throw UsageError("GradScaler: the state is empty; it was saved by a scaler that was not enabled");
  next_scale_ = value.at("scale").as_double();
  next_tracker_ = value.at("_growth_tracker").as_int();
  options_.growth_factor = value.at("growth_factor").as_double();
  options_.backoff_factor = value.at("backoff_factor").as_double();
  options_.growth_interval = value.at("growth_interval").as_int();
  if (scale_.defined()) {
    scale_.fill_(next_scale_);
    growth_tracker_.fill_(next_tracker_);
  }
}

}  // namespace lockstep
