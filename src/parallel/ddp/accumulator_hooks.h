#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

namespace lockstep {

/// A run of autograd's engine: one call of backward(). Recomputed segments call backward() inside of another.
struct BackwardTask {
  const void* id = nullptr;  // no other task that runs has it; null outside of backward
  int depth = 0;             // 0 for the outermost
  bool is_partial = false;   // towards some tensors only: autograd::grad, or backward with inputs
};

/// The task that the calling thread works for.
BackwardTask current_backward_task();

/// Hooks on the gradient accumulators of parameters: the nodes at which autograd adds a gradient to .grad().
///
/// LibTorch replaces a parameter's accumulator when the parameter's storage is replaced (torch::load, to()). On a GPU,
/// autograd accumulates on the stream on which the accumulator was made. connect() moves the hooks in both cases.
/// Not thread-safe; the callbacks run on autograd's threads.
class AccumulatorHooks {
 public:
  /// Called after a gradient of parameter number `parameter` was accumulated. Autograd also calls it for an undefined
  /// gradient, which a function returns for an input that its result does not depend on.
  using OnGradient = std::function<void(size_t parameter, bool is_defined)>;
  /// Returns what to accumulate in place of a gradient.
  using Replace = std::function<at::Tensor(const at::Tensor& gradient)>;

  AccumulatorHooks(std::vector<at::Tensor> parameters, c10::Device device, OnGradient on_gradient);
  ~AccumulatorHooks();
  AccumulatorHooks(const AccumulatorHooks&) = delete;
  AccumulatorHooks& operator=(const AccumulatorHooks&) = delete;

  /// Before a forward, and not during backward: hooks the accumulators that the forward's graph will use. Hooks on
  /// replaced accumulators stay for as long as an earlier graph uses them.
  void connect();

  /// Calls `replace` for every gradient before it is accumulated, from now on. Once.
  void replace_gradients(Replace replace);
  bool replaces_gradients() const { return replace_ != nullptr; }

 private:
  class GradientHook;
  class ReplaceHook;
  /// The hooks on one accumulator.
  struct Listener {
    std::shared_ptr<torch::autograd::Node> accumulator;  // kept alive: autograd holds it weakly
    uintptr_t key;
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
  std::vector<Listener> replaced_;   // on accumulators that were replaced and that an earlier graph still uses
  c10::Stream stream_;               // on which the accumulators were made
};

}  // namespace lockstep
