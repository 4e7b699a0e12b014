#pragma once

#include <any>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/call_options.h>
#include <lockstep/export.h>
#include <lockstep/process_group.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

struct CapturedStepOptions {
  /// Number of calls, at least 1, that run before the first capture: the first steps create state that the captured
  /// step uses. Afterwards, the second call with inputs of the same sizes is captured.
  int warm_up = 3;
  /// How many graphs are kept, at least 1, one for each set of input sizes. A further one replaces the graph that was
  /// not replayed for the longest time. Of the sizes that have no graph, only as many are remembered: older ones count
  /// as new.
  int max_graphs = 8;
  /// Source location of the step, for error messages. Filled in automatically.
  CallSite site = CallSite::here();
};

namespace detail {

/// The part of CapturedStep that does not depend on the step's type.
class LOCKSTEP_EXPORT StepCapture {
 public:
  StepCapture(ProcessGroup group, const CapturedStepOptions& options);
  ~StepCapture();
  StepCapture(const StepCapture&) = delete;
  StepCapture& operator=(const StepCapture&) = delete;

  using Run = std::function<void(const std::vector<at::Tensor>& inputs)>;

  /// Returns null if `run` ran normally. Otherwise a graph was replayed, and `run` was either captured in this call or
  /// not called; returns where the caller keeps the result of the captured `run`.
  std::any* call(const std::vector<at::Tensor>& inputs, const Run& run);
  size_t graphs() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

/// A training step that runs as a CUDA graph. The first calls run the step normally. Then one call captures the whole
/// step (forward, backward, gradient reduction and optimizer) in a CUDA graph. Each later call only launches the graph,
/// which takes microseconds on the host. Inputs of other sizes get a separate graph when these sizes occur again, up to
/// `max_graphs` graphs. On a CPU every call simply runs the step.
///
///   lockstep::FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(1e-3));
///   lockstep::CapturedStep step(world, [&](torch::Tensor images, torch::Tensor labels) {
///     optimizer.zero_grad();
///     auto loss = torch::nn::functional::cross_entropy(ddp(images), labels);
///     loss.backward();
///     optimizer.step();
///     return loss;
///   });
///   for (auto& batch : loader) total += step(batch.data, batch.target);
///
/// The step takes tensors, which are moved to the group's device. It returns nothing, tensors, or a type that contains
/// tensors (see TensorsIn). The caller gets results without autograd history.
///
/// The step must do the same work in each call, because its host code does not run in a replay. It must not wait for
/// the GPU (item(), cpu(), printing); keep numbers that change in tensors. LibTorch's optimizers count steps on the
/// host and are refused: use lockstep's fused optimizers, whose learning rates may change between calls. The graphs
/// share temporary memory: return gradients from the step, instead of reading grad() after it.
///
/// Collective: every rank calls it equally often, with inputs of the same sizes in the same calls. Throws UsageError,
/// which names the reason, if the step cannot be captured; later calls then throw UsageError too. If a rank fails or is
/// late, the next call or group.synchronize() throws PeerError or TimeoutError.
///
/// Not thread-safe. Not movable. Destroy it before the group, the model and the optimizer.
template <class Body>
class CapturedStep {
 public:
  CapturedStep(ProcessGroup group, Body body, const CapturedStepOptions& options = {})
      : body_(std::move(body)), capture_(std::move(group), options) {}

  template <class... Inputs>
  requires(std::is_same_v<Inputs, at::Tensor>&&...) auto operator()(const Inputs&... inputs) {
    return call(std::index_sequence_for<Inputs...>(), {inputs...});
  }

  /// Returns whether calls with inputs of captured sizes are replayed.
  bool is_captured() const { return graphs() > 0; }
  /// Returns the number of graphs, which is the number of sets of input sizes that are replayed.
  size_t graphs() const { return capture_.graphs(); }

 private:
  template <size_t... i>
  auto call(std::index_sequence<i...>, const std::vector<at::Tensor>& given) {
    using Result = std::decay_t<decltype(body_(given[i]...))>;
    if constexpr (std::is_void_v<Result>) {
      capture_.call(given, [&](const std::vector<at::Tensor>& inputs) { body_(inputs[i]...); });
    } else {
      static_assert(TensorsIn<Result>::kAny, "a captured step must return tensors or nothing");
      std::optional<Result> made;
      std::any* const captured = capture_.call(given, [&](const std::vector<at::Tensor>& inputs) {
        made = body_(inputs[i]...);
        TensorsIn<Result>::visit(*made, [](at::Tensor& tensor) { tensor = tensor.detach(); });
      });
      if (!captured) return *std::move(made);
      if (made) *captured = *std::move(made);
      auto result = std::any_cast<Result>(*captured);
      TensorsIn<Result>::visit(result, [](at::Tensor& tensor) { tensor = tensor.clone(); });
      return result;
    }
  }

  Body body_;
  detail::StepCapture capture_;
};

}  // namespace lockstep
