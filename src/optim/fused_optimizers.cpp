#include <lockstep/fused_optimizers.h>

#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>
#include "comm/torch_version.h"

#include "base/text.h"
#include "comm/capture.h"
#include "optim/cpu_update.h"
#include "optim/device_state.h"
#include "optim/gpu_lists.h"
#include "optim/layout.h"
#include "optim/master_weights.h"
#include "optim/optimizer_state.h"

namespace lockstep {
namespace {

using detail::DeviceState;
using detail::FusedLists;
using detail::FusedState;
using detail::GpuLists;
using detail::laid_out_as;
using torch::optim::Optimizer;

at::Tensor run_closure(const Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const at::AutoGradMode enabled(true);
  return closure();
}

bool is_floating(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

// Checks all parameters before the step changes any of them.
void check_supported(const Optimizer& optimizer, const char* name) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& parameters = optimizer.param_groups()[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      auto refuse = [&](auto&&... why) {
        throw UsageError(text(name, ": parameter ", i, " of group ", group, ", of sizes ", parameters[i].sizes(), ", ",
                              why..., "; LibTorch's own optimizers may support it"));
      };
      if (gradient.layout() != c10::kStrided) refuse("has a sparse gradient, expected a dense one");
      if (!is_floating(parameters[i].scalar_type()))
        refuse("has dtype ", parameters[i].scalar_type(), ", expected Float, Double, Half or BFloat16");
      if (!parameters[i].is_cpu() && !parameters[i].is_cuda())
        refuse("is on ", parameters[i].device(), ", expected a CPU or a CUDA device");
      if (!seen.insert(parameters[i].unsafeGetTensorImpl()).second)
        throw UsageError(text(name, ": parameter ", i, " of group ", group, ", of sizes ", parameters[i].sizes(),
                              ", is listed twice and would be stepped twice; ddp.parameters() lists each once"));
    }
  }
}

/// Whether LibTorch's own step must be used. Throws UsageError during capture: a graph would not repeat the work that
/// LibTorch's step does on the host.
bool is_left_to_libtorch(const Optimizer& optimizer, const FusedState& fused, const char* name) {
  if (detail::kFusesOnGpu) return false;
  bool has_gpu_parameters = false;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      has_gpu_parameters |= parameter.is_cuda();
      if (detail::is_capturing(parameter.device()))
        throw UsageError(text(name, ": with this LibTorch its step cannot be captured; use LibTorch 2.3 or later"));
    }
  if (has_gpu_parameters && fused.masters)
    throw UsageError(text(name, ": with this LibTorch, master weights are for CPUs only; use LibTorch 2.3 or later"));
  return has_gpu_parameters;
}

at::Tensor zeros_as(const at::Tensor& parameter) {
  return at::zeros_like(parameter, at::MemoryFormat::Preserve);
}

/// The tensor that the step updates: the master weight, or the parameter itself.
const at::Tensor& target_of(const FusedState& fused, const at::Tensor& parameter) {
  return fused.masters && detail::MasterWeights::is_for(parameter) ? fused.masters->of(parameter) : parameter;
}

at::Tensor in_dtype_of(const at::Tensor& target, const at::Tensor& tensor) {
  if (tensor.is_neg()) return tensor.resolve_neg().to(target.scalar_type());  // the updates read memory
  return tensor.scalar_type() == target.scalar_type() ? tensor : tensor.to(target.scalar_type());
}

/// Returns a gradient or a state in the dtype and strides of the target.
at::Tensor fitted_to(const at::Tensor& target, const at::Tensor& tensor) {
  return laid_out_as(target, in_dtype_of(target, tensor));
}

/// Returns whether the current step is being captured. Throws UsageError if it is and the optimizer's state does not
/// exist yet (`is_prepared` is false).
bool check_capture(const at::Tensor& parameter, const char* name, bool is_prepared) {
  const bool captured = detail::is_capturing(parameter.device());
  if (captured && !is_prepared)
    throw UsageError(text(name,
                          ": the first step, or the first after loading a state, cannot be captured, because it "
                          "allocates state; run one step before the capture"));
  return captured;
}

/// Whether a parameter with these options has a state after its first step.
bool needs_state(const torch::optim::OptimizerOptions& options) {
  const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options);
  return !sgd || sgd->momentum() != 0;
}

/// step_unless() of an optimizer. The first step of a parameter creates state, which a skipped step must not do. So the
/// host decides whether to skip a first step.
template <class Fused>
void step_unless_set(Fused& optimizer, FusedState& fused, const at::Tensor& skip, const char* name) {
  bool is_first = !fused.device || fused.device->is_released(), has_gradients = false, is_on_cpu = skip.is_cpu();
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      has_gradients = true;
      is_on_cpu = is_on_cpu || parameter.is_cpu();
      is_first = is_first || (needs_state(group.options()) &&
                              !detail::find_state<torch::optim::OptimizerParamState>(optimizer, parameter));
    }
  if (!has_gradients) return;
  if (is_on_cpu || is_first || !detail::kFusesOnGpu) {
    if (skip.is_cuda() && detail::is_capturing(skip.device())) check_capture(skip, name, false);
    if (skip.item<float>() == 0) optimizer.step();
    return;
  }
  fused.skip = skip.reshape({});  // as the step counts
  try {
    optimizer.step();
  } catch (...) {
    fused.skip.reset();
    throw;
  }
  fused.skip.reset();
}

void refuse_late_masters(const Optimizer& optimizer, const char* name) {
  if (!optimizer.state().empty())
    throw UsageError(text(
        name, ": keep_master_weights() was called after the first step, or after a state was loaded; call it before"));
}

DeviceState& make(std::shared_ptr<DeviceState>& device, Optimizer& optimizer) {
  if (!device || device->is_released()) device = std::make_shared<DeviceState>(optimizer);
  return *device;
}

/// Releases the state. A captured state is kept, so that before_replay() refuses to replay it.
void release(std::shared_ptr<DeviceState>& device) {
  if (!device) return;
  device->release();
  if (!device->is_captured()) device.reset();
}

void prepare_replay(const FusedState& fused) {
  if (fused.device) fused.device->refresh();
  if (fused.masters) fused.masters->update_from_parameters();
}

void announce(const FusedState& fused) {
  detail::Recording::before_replay(
      [device = fused.device, masters = fused.masters, captured = fused.device->note_capture()] {
        device->refresh(captured);
        if (masters) masters->update_from_parameters();
      });
}

/// Lets LibTorch's observers, such as its profiler, see a step as one operator. Its input is the list of parameters
/// that are changed. On a CPU a step calls no operator of LibTorch.
class StepRange {
 public:
  StepRange(const Optimizer& optimizer, const char* name) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    if (!callbacks) return;
    c10::List<at::Tensor> changed;
    for (const auto& group : optimizer.param_groups())
      for (const auto& parameter : group.params())
        if (parameter.grad().defined()) changed.push_back(parameter);
    inputs_.emplace_back(std::move(changed));
    range_.emplace(std::move(*callbacks)).before(text("lockstep::", name, "::step"), &inputs_);
  }

 private:
  std::vector<c10::IValue> inputs_{};
  std::optional<at::RecordFunction> range_{};
};

// --- Adam and AdamW: they differ only in types and in how the weight decay is applied

template <class State>
std::unique_ptr<State> first_adam_state(const at::Tensor& parameter) {
  auto state = std::make_unique<State>();
  state->exp_avg(zeros_as(parameter));
  state->exp_avg_sq(zeros_as(parameter));
  return state;
}

/// Converts the state to the target's dtype and strides, which the kernels require; a loaded state may have others.
template <class State>
void lay_out(State& state, const at::Tensor& target) {
  state.exp_avg(fitted_to(target, state.exp_avg()));
  state.exp_avg_sq(fitted_to(target, state.exp_avg_sq()));
  if (state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(fitted_to(target, state.max_exp_avg_sq()));
}

template <class State, class Options>
void step_adam(Optimizer& optimizer, FusedState& fused, const char* name, bool is_decoupled) {
  auto& device = fused.device;
  check_supported(optimizer, name);
  const StepRange range(optimizer, name);
  bool is_any_captured = false;
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    const auto& options = static_cast<const Options&>(group.options());
    const auto [beta1, beta2] = options.betas();
    GpuLists on_gpus;
    std::vector<at::Tensor> rounded;  // from their master weights, at the end
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      auto* state = detail::find_state<State>(optimizer, parameter);
      const bool is_prepared = state && device && !device->is_released() && device->counts(parameter);
      const bool captured = check_capture(parameter, name, is_prepared);
      is_any_captured |= captured;
      const auto& target = target_of(fused, parameter);
      const bool has_master = !target.is_same(parameter);
      if (!state) {
        state = detail::add_state(optimizer, parameter, first_adam_state<State>(target));
        if (device) device->forget_steps(parameter);
      }
      if (options.amsgrad() && !state->max_exp_avg_sq().defined()) state->max_exp_avg_sq(zeros_as(target));
      lay_out<State>(*state, target);
      const int64_t before = state->step();
      if (!captured) state->step(before + 1);
      if (parameter.is_cuda()) {
        if (has_master) rounded.push_back(parameter);
        auto& lists = on_gpus.of(target);
        lists.parameters.push_back(target);
        lists.gradients.push_back(fitted_to(target, gradient));
        lists.first.push_back(state->exp_avg());
        lists.second.push_back(state->exp_avg_sq());
        if (options.amsgrad()) lists.largest.push_back(state->max_exp_avg_sq());
        lists.steps.push_back(make(device, optimizer).steps(parameter, before));
      } else {
        const detail::AdamUpdate update{options.lr(),           beta1,        beta2,        options.eps(),
                                        options.weight_decay(), is_decoupled, state->step()};
        const auto largest = options.amsgrad() ? state->max_exp_avg_sq() : at::Tensor();
        if (has_master) {
          fused.masters->update(parameter, gradient, [&](int64_t begin, int64_t count, const void* slope) {
            detail::update_adam(detail::range_of(target, state->exp_avg(), state->exp_avg_sq(), largest, begin, count),
                                slope, update);
          });
        } else {
          detail::update_adam(target, in_dtype_of(target, gradient), state->exp_avg(), state->exp_avg_sq(), largest,
                              update);
          parameter.unsafeGetTensorImpl()->bump_version();
        }
      }
    }
    on_gpus.for_each([&, beta1 = beta1, beta2 = beta2](c10::Device gpu, bool, const FusedLists& lists) {
      at::_foreach_add_(lists.steps, 1);
      detail::fused_adam(detail::in_pieces_if_captured(lists, gpu), device->rate(g, gpu), beta1, beta2,
                         options.weight_decay(), options.eps(), is_decoupled,
                         fused.skip.defined() ? fused.skip.to(gpu) : at::Tensor());
      if (fused.skip.defined()) at::_foreach_sub_(lists.steps, std::vector(lists.steps.size(), fused.skip.to(gpu)));
    });
    if (fused.masters) fused.masters->round(rounded);
  }
  if (is_any_captured) announce(fused);
}

/// Copies the step counts from the GPU to the parameters' states.
template <class State>
void read_steps(const Optimizer& optimizer, const std::shared_ptr<DeviceState>& device) {
  if (!device || device->is_released()) return;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params())
      if (auto* state = detail::find_state<State>(optimizer, parameter); state && device->counts(parameter))
        state->step(device->read_step_count(parameter));
}

}  // namespace

FusedAdamW::~FusedAdamW() {
  release(fused_.device);
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  if (is_left_to_libtorch(*this, fused_, "FusedAdamW")) return AdamW::step(std::move(closure));
  auto loss = run_closure(closure);
  const c10::NoGradGuard no_grad;
  step_adam<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(*this, fused_, "FusedAdamW",
                                                                       /*is_decoupled=*/true);
  return loss;
}

void FusedAdamW::save(torch::serialize::OutputArchive& archive) const {
  read_steps<torch::optim::AdamWParamState>(*this, fused_.device);
  AdamW::save(archive);
  if (fused_.masters) fused_.masters->save(*this, archive);
}

void FusedAdamW::load(torch::serialize::InputArchive& archive) {
  AdamW::load(archive);
  if (fused_.masters) fused_.masters->load(*this, archive);
  release(fused_.device);
}

void FusedAdamW::before_replay() {
  prepare_replay(fused_);
}

void FusedAdamW::step_unless(const at::Tensor& skip) {
  step_unless_set(*this, fused_, skip, "FusedAdamW");
}

void FusedAdamW::keep_master_weights() {
  refuse_late_masters(*this, "FusedAdamW");
  fused_.masters = std::make_shared<detail::MasterWeights>();
}

FusedAdam::~FusedAdam() {
  release(fused_.device);
}

at::Tensor FusedAdam::step(LossClosure closure) {
  if (is_left_to_libtorch(*this, fused_, "FusedAdam")) return Adam::step(std::move(closure));
  auto loss = run_closure(closure);
  const c10::NoGradGuard no_grad;
  step_adam<torch::optim::AdamParamState, torch::optim::AdamOptions>(*this, fused_, "FusedAdam",
                                                                     /*is_decoupled=*/false);
  return loss;
}

void FusedAdam::save(torch::serialize::OutputArchive& archive) const {
  read_steps<torch::optim::AdamParamState>(*this, fused_.device);
  Adam::save(archive);
  if (fused_.masters) fused_.masters->save(*this, archive);
}

void FusedAdam::load(torch::serialize::InputArchive& archive) {
  Adam::load(archive);
  if (fused_.masters) fused_.masters->load(*this, archive);
  release(fused_.device);
}

void FusedAdam::before_replay() {
  prepare_replay(fused_);
}

void FusedAdam::step_unless(const at::Tensor& skip) {
  step_unless_set(*this, fused_, skip, "FusedAdam");
}

void FusedAdam::keep_master_weights() {
  refuse_late_masters(*this, "FusedAdam");
  fused_.masters = std::make_shared<detail::MasterWeights>();
}

struct detail::FusedAccess {
  /// Null for optimizers that are not fused.
  static FusedState* of(Optimizer& optimizer) {
    if (auto* adamw = dynamic_cast<FusedAdamW*>(&optimizer)) return &adamw->fused_;
    if (auto* adam = dynamic_cast<FusedAdam*>(&optimizer)) return &adam->fused_;
    if (auto* sgd = dynamic_cast<FusedSGD*>(&optimizer)) return &sgd->fused_;
    return nullptr;
  }
};

void detail::read_step_counts(const Optimizer& optimizer) {
  const auto* fused = FusedAccess::of(const_cast<Optimizer&>(optimizer));
  if (!fused) return;
  if (dynamic_cast<const FusedAdamW*>(&optimizer)) read_steps<torch::optim::AdamWParamState>(optimizer, fused->device);
  if (dynamic_cast<const FusedAdam*>(&optimizer)) read_steps<torch::optim::AdamParamState>(optimizer, fused->device);
}

detail::MasterWeights* detail::masters_of(const Optimizer& optimizer) {
  const auto* fused = FusedAccess::of(const_cast<Optimizer&>(optimizer));
  return fused ? fused->masters.get() : nullptr;
}

// --- SGD

FusedSGD::~FusedSGD() {
  release(fused_.device);
}

at::Tensor FusedSGD::step(LossClosure closure) {
  if (is_left_to_libtorch(*this, fused_, "FusedSGD")) return SGD::step(std::move(closure));
  auto loss = run_closure(closure);
  const c10::NoGradGuard no_grad;
  check_supported(*this, "FusedSGD");
  const StepRange range(*this, "FusedSGD");
  bool is_any_captured = false;
  for (size_t g = 0; g < param_groups().size(); ++g) {
    const auto& group = param_groups()[g];
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    const bool has_momentum = options.momentum() != 0;
    GpuLists on_gpus;
    std::vector<at::Tensor> rounded;  // from their master weights, at the end
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      auto* state = has_momentum ? detail::find_state<torch::optim::SGDParamState>(*this, parameter) : nullptr;
      const bool is_first = has_momentum && !(state && state->momentum_buffer().defined());
      is_any_captured |=
          check_capture(parameter, "FusedSGD", !is_first && fused_.device && !fused_.device->is_released());
      const auto& target = target_of(fused_, parameter);
      const bool has_master = !target.is_same(parameter);
      if (is_first) {
        state = detail::add_state(*this, parameter, std::make_unique<torch::optim::SGDParamState>());
        state->momentum_buffer(zeros_as(target));
      }
      if (has_momentum) state->momentum_buffer(fitted_to(target, state->momentum_buffer()));
      if (parameter.is_cuda()) {
        if (has_master) rounded.push_back(parameter);
        make(fused_.device, *this);
        auto& lists = on_gpus.of(target, is_first);
        lists.parameters.push_back(target);
        lists.gradients.push_back(fitted_to(target, gradient));
        if (has_momentum) lists.first.push_back(state->momentum_buffer());
      } else {
        const detail::SgdUpdate update{options.lr(),           options.momentum(), options.dampening(),
                                       options.weight_decay(), options.nesterov(), is_first};
        const auto momentum = has_momentum ? state->momentum_buffer() : at::Tensor();
        if (has_master) {
          fused_.masters->update(parameter, gradient, [&](int64_t begin, int64_t count, const void* slope) {
            detail::update_sgd(detail::range_of(target, momentum, {}, {}, begin, count), slope, update);
          });
        } else {
          detail::update_sgd(target, in_dtype_of(target, gradient), momentum, update);
          parameter.unsafeGetTensorImpl()->bump_version();
        }
      }
    }
    on_gpus.for_each([&](c10::Device gpu, bool is_first, const FusedLists& lists) {
      detail::fused_sgd(detail::in_pieces_if_captured(lists, gpu), fused_.device->rate(g, gpu), options.momentum(),
                        options.dampening(), options.weight_decay(), options.nesterov(), is_first,
                        fused_.skip.defined() ? fused_.skip.to(gpu) : at::Tensor());
    });
    if (fused_.masters) fused_.masters->round(rounded);
  }
  if (is_any_captured) announce(fused_);
  return loss;
}

void FusedSGD::save(torch::serialize::OutputArchive& archive) const {
  SGD::save(archive);
  if (fused_.masters) fused_.masters->save(*this, archive);
}

void FusedSGD::load(torch::serialize::InputArchive& archive) {
  SGD::load(archive);
  if (fused_.masters) fused_.masters->load(*this, archive);
  release(fused_.device);
}

void FusedSGD::step_unless(const at::Tensor& skip) {
  step_unless_set(*this, fused_, skip, "FusedSGD");
}

void FusedSGD::keep_master_weights() {
  refuse_late_masters(*this, "FusedSGD");
  fused_.masters = std::make_shared<detail::MasterWeights>();
}

void FusedSGD::before_replay() {
  prepare_replay(fused_);
}

}  // namespace lockstep
