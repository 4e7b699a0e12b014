#include "parallel/ddp/accumulator_hooks.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep {

// Autograd exposes the address of the task's member nodes_in_graph_, but not of the task. The task's address follows
// from the member's offset; the depth and exec_info_ are public members.
BackwardTask current_backward_task() {
  using torch::autograd::GraphTask;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!nodes) return {};
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  const auto* task =
      reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(nodes) - offsetof(GraphTask, nodes_in_graph_));
#pragma GCC diagnostic pop
  return {task, task->reentrant_depth_, !task->exec_info_.empty()};
}

namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

class AccumulatorHooks::GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(const AccumulatorHooks& hooks, size_t parameter) : hooks_(hooks), parameter_(parameter) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& gradients) override {
    hooks_.on_gradient_(parameter_, gradients[0]);
    return outputs;
  }

 private:
  const AccumulatorHooks& hooks_;
  const size_t parameter_;
};

class AccumulatorHooks::ReplaceHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit ReplaceHook(const AccumulatorHooks& hooks) : hooks_(hooks) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    return {hooks_.replace_(gradients[0])};
  }

 private:
  const AccumulatorHooks& hooks_;
};

AccumulatorHooks::AccumulatorHooks(std::vector<at::Tensor> parameters, c10::Device device, OnGradient on_gradient)
    : parameters_(std::move(parameters)),
      device_(device),
      on_gradient_(std::move(on_gradient)),
      stream_(current_stream(device)) {
  listen_to_all();
}

AccumulatorHooks::~AccumulatorHooks() {
  std::for_each(listeners_.begin(), listeners_.end(), stop_listening);
  std::for_each(replaced_.begin(), replaced_.end(), stop_listening);
}

AccumulatorHooks::Listener AccumulatorHooks::listen(size_t parameter) {
  auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[parameter]);
  if (!accumulator) return {};  // the parameter is frozen
  const auto key = accumulator->add_post_hook(std::make_unique<GradientHook>(*this, parameter));
  Listener listener{std::move(accumulator), key};
  if (replace_) add_replace_hook(listener);
  return listener;
}

void AccumulatorHooks::stop_listening(const Listener& listener) {
  if (!listener.accumulator) return;
  listener.accumulator->del_post_hook(listener.key);
  std::erase_if(listener.accumulator->pre_hooks(),
                [&](const auto& hook) { return hook.get() == listener.replace_hook; });
}

// Releases the old accumulators first: autograd creates a new one, on the current stream, only after the old one is
// destroyed.
void AccumulatorHooks::listen_to_all() {
  std::for_each(listeners_.begin(), listeners_.end(), stop_listening);
  listeners_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) listeners_.push_back(listen(i));
}

bool AccumulatorHooks::is_connected(size_t parameter) const {
  if (!parameters_[parameter].requires_grad()) return true;  // no graph will have it
  return listeners_[parameter].accumulator &&
         torch::autograd::impl::try_get_grad_accumulator(parameters_[parameter]) == listeners_[parameter].accumulator;
}

void AccumulatorHooks::connect() {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (!is_connected(i)) {
      auto before = std::exchange(listeners_[i], listen(i));
      if (before.accumulator) replaced_.push_back(std::move(before));
    }
  std::erase_if(replaced_, [&](const Listener& listener) {
    if (listener.is_in_graph()) return false;
    stop_listening(listener);
    return true;
  });
  const auto now = current_stream(device_);
  if (now == stream_ || std::any_of(listeners_.begin(), listeners_.end(), std::mem_fn(&Listener::is_in_graph))) return;
  listen_to_all();
  stream_ = now;
}

std::vector<const torch::autograd::Node*> AccumulatorHooks::accumulators() const {
  std::vector<const torch::autograd::Node*> result;
  for (const auto& listener : listeners_) result.push_back(listener.accumulator.get());
  return result;
}

void AccumulatorHooks::add_replace_hook(Listener& listener) {
  if (!listener.accumulator) return;
  auto hook = std::make_unique<ReplaceHook>(*this);
  listener.replace_hook = hook.get();
  listener.accumulator->add_pre_hook(std::move(hook));
}

void AccumulatorHooks::replace_gradients(Replace replace) {
  replace_ = std::move(replace);
  for (auto& listener : listeners_) add_replace_hook(listener);
  for (auto& listener : replaced_) add_replace_hook(listener);
}

}  // namespace lockstep
