#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include "comm/torch_version.h"

namespace lockstep {

/// One run of the autograd engine, that is one call of backward(). Activation checkpointing nests backward() calls.
struct BackwardTask {
  const void* id = nullptr;  // unique among running tasks; null outside of backward
  int depth = 0;             // 0 for the outermost task
  bool is_partial = false;   // computes gradients of selected tensors only: autograd::grad, or backward with inputs
};

/// Returns the task that the calling thread executes.
BackwardTask current_backward_task();

/// Hooks on the gradient accumulators of parameters. A gradient accumulator is the autograd node that adds a gradient
/// to .grad().
///
/// LibTorch replaces a parameter's accumulator when the parameter's storage is replaced (torch::load, to()). On a GPU,
/// autograd accumulates on the stream on which the accumulator was created. connect() moves the hooks in both cases.
/// Not thread-safe; the callbacks run on autograd's threads.
class AccumulatorHooks {
 public:
  /// Called after the gradient `arrived` of parameter number `parameter` was accumulated. Also called for an undefined
  /// gradient: a function returns one for an input that does not affect its result.
  using OnGradient = std::function<void(size_t parameter, const at::Tensor& arrived)>;
  /// Returns the tensor to accumulate in place of `gradient`.
  using Replace = std::function<at::Tensor(const at::Tensor& gradient)>;

  AccumulatorHooks(std::vector<at::Tensor> parameters, c10::Device device, OnGradient on_gradient);
  ~AccumulatorHooks();
  AccumulatorHooks(const AccumulatorHooks&) = delete;
  AccumulatorHooks& operator=(const AccumulatorHooks&) = delete;

  /// Hooks the accumulators that the next forward's graph will use. Call it before a forward, never during backward.
  /// Hooks on replaced accumulators stay as long as an earlier graph uses them.
  void connect();

  /// Returns the accumulators that the last connect() hooked, by parameter; null for a frozen one.
  std::vector<const torch::autograd::Node*> accumulators() const;

  /// From now on, calls `replace` for every gradient before the gradient is accumulated. May be called only once.
  void replace_gradients(Replace replace);
  bool replaces_gradients() const { return replace_ != nullptr; }

 private:
  class GradientHook;
  class ReplaceHook;
  /// The hooks on one accumulator.
  struct Listener {
    /// Keeps the accumulator alive: autograd holds a weak pointer. Null if the parameter is frozen.
    detail::NodePointer<torch::autograd::Node> accumulator;
    uintptr_t key = 0;
    torch::autograd::FunctionPreHook* replace_hook = nullptr;

    bool is_in_graph() const { return accumulator.use_count() > 1; }
  };

  Listener listen(size_t parameter);
  void listen_to_all();
  void add_replace_hook(Listener& listener);
  static void stop_listening(const Listener& listener);
  bool is_connected(size_t parameter) const;

  const std::vector<at::Tensor> parameters_;
  const c10::Device device_;
  const OnGradient on_gradient_;
  Replace replace_;
  std::vector<Listener> listeners_;  // by parameter
  std::vector<Listener> replaced_;   // on replaced accumulators that an earlier graph still uses
  c10::Stream stream_;               // on which the accumulators were created
};

}  // namespace lockstep
