#include <lockstep/recompute.h>

#include <algorithm>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/autocast.h>
#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "parallel/ddp/accumulator_hooks.h"

namespace lockstep::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr c10::DeviceType kAutocastDevices[] = {c10::kCPU, c10::kCUDA};

/// The states of the default generators of the CPU and of some GPUs.
class RandomState {
 public:
  static RandomState of(std::vector<c10::Device> devices) {
    RandomState state;
    devices.emplace_back(c10::kCPU);
    for (const auto device : devices) {
      auto generator = at::globalContext().defaultGenerator(device);
      std::lock_guard lock(generator.mutex());
      state.states_.emplace_back(device, generator.get_state());
    }
    return state;
  }

  std::vector<c10::Device> gpus() const {
    std::vector<c10::Device> result;
    for (const auto& [device, state] : states_)
      if (!device.is_cpu()) result.push_back(device);
    return result;
  }

  void restore() const {
    for (const auto& [device, state] : states_) {
      auto generator = at::globalContext().defaultGenerator(device);
      std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  std::vector<std::pair<c10::Device, at::Tensor>> states_;
};

/// Restores forward's random state; the destructor restores the previous random state.
class RepeatRandomNumbers {
 public:
  explicit RepeatRandomNumbers(const std::optional<RandomState>& forward) {
    if (!forward) return;
    before_ = RandomState::of(forward->gpus());
    forward->restore();
  }
  ~RepeatRandomNumbers() {
    if (before_) before_->restore();
  }
  RepeatRandomNumbers(const RepeatRandomNumbers&) = delete;
  RepeatRandomNumbers& operator=(const RepeatRandomNumbers&) = delete;

 private:
  std::optional<RandomState> before_;
};

std::vector<c10::Device> gpus_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> result;
  for (const auto& tensor : tensors)
    if (tensor.is_cuda() && std::find(result.begin(), result.end(), tensor.device()) == result.end())
      result.push_back(tensor.device());
  return result;
}

/// The data that backward needs to repeat forward.
struct Recomputation : torch::CustomClassHolder {
  Segment segment;
  std::optional<RandomState> random;
  AutocastState autocast[std::size(kAutocastDevices)];
};

std::vector<at::Tensor> run_again(const Recomputation& forward, const std::vector<at::Tensor>& inputs) {
  const RepeatRandomNumbers random(forward.random);
  const Autocast cpu(kAutocastDevices[0], forward.autocast[0]);
  const Autocast cuda(kAutocastDevices[1], forward.autocast[1]);
  const at::AutoGradMode enabled(true);
  return forward.segment(inputs);
}

/// Casts of weights that are made without gradients must not be used where gradients are needed.
class WithoutAutocastCache {
 public:
  WithoutAutocastCache() : was_enabled_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~WithoutAutocastCache() { at::autocast::set_autocast_cache_enabled(was_enabled_); }
  WithoutAutocastCache(const WithoutAutocastCache&) = delete;
  WithoutAutocastCache& operator=(const WithoutAutocastCache&) = delete;

 private:
  const bool was_enabled_;
};

/// The first input of apply() requires a gradient, so that the node is in the graph even if only parameters of the
/// segment do.
struct RecomputeFunction : torch::autograd::Function<RecomputeFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor&,
                               const c10::intrusive_ptr<Recomputation>& recomputation, at::TensorList inputs) {
    context->saved_data["recomputation"] = c10::IValue::make_capsule(recomputation);
    context->save_for_backward(inputs.vec());
    const WithoutAutocastCache no_cache;
    return recomputation->segment(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (current_backward_task().is_partial)
      throw UsageError(
          "recompute: autograd::grad(), or backward() for selected inputs, cannot pass through a recomputed segment; "
          "use backward() without inputs");
    if (at::GradMode::is_enabled())
      throw UsageError(
          "recompute: backward with create_graph cannot pass through a recomputed segment, which has no "
          "second derivatives; call the function itself");
    const auto recomputation =
        c10::static_intrusive_pointer_cast<Recomputation>(context->saved_data["recomputation"].toCapsule());
    std::vector<at::Tensor> inputs;
    for (const auto& saved : context->get_saved_variables())
      inputs.push_back(saved.detach().requires_grad_(saved.requires_grad()));
    const auto outputs = run_again(*recomputation, inputs);
    if (outputs.size() != gradients.size())
      throw UsageError(text("recompute: the function returned ", gradients.size(), " tensors in forward and ",
                            outputs.size(), " in backward; it must do the same in both calls"));
    variable_list roots, root_gradients;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    variable_list result(2);  // for the first two arguments of forward
    for (const auto& input : inputs) result.push_back(input.grad());
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> run_recomputed(Segment segment, const std::vector<at::Tensor>& inputs,
                                       const RecomputeOptions& options) {
  if (!at::GradMode::is_enabled()) return segment(inputs);
  const auto gpus = gpus_of(inputs);
  auto recomputation = c10::make_intrusive<Recomputation>();
  if (options.preserve_random_numbers) {
    for (const auto gpu : gpus)
      if (is_capturing(gpu))
        throw UsageError(
            "recompute: random numbers cannot be repeated in a captured step; if the function uses none (no dropout), "
            "pass {.preserve_random_numbers = false}");
    recomputation->random = RandomState::of(gpus);
  }
  for (size_t i = 0; i < std::size(kAutocastDevices); ++i)
    recomputation->autocast[i] = AutocastState::current(kAutocastDevices[i]);
  recomputation->segment = std::move(segment);
  const auto root = at::empty({0}).requires_grad_();
  return RecomputeFunction::apply(root, recomputation, at::TensorList(inputs));
}

}  // namespace lockstep::detail
