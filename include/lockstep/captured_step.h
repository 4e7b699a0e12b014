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
  /// Calls that run as they are before one is captured, which is the next whose inputs have the sizes of the one
  /// before: 1 at least. The first steps make what later ones go on from.
  int warm_up = 3;
  /// Where the step stands; filled in by itself.
  CallSite site = CallSite::here();
};

namespace detail {

/// What CapturedStep is, whatever the step.
class LOCKSTEP_EXPORT StepCapture {
 public:
  StepCapture(ProcessGroup group, const CapturedStepOptions& options);
  ~StepCapture();
  StepCapture(const StepCapture&) = delete;
  StepCapture& operator=(const StepCapture&) = delete;

  using Run = std::function<void(const std::vector<at::Tensor>& inputs)>;

  /// Returns whether it was replayed: then `run`, if it was called at all, was captured.
  bool call(const std::vector<at::Tensor>& inputs, const Run& run);
  bool is_captured() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

/// A training step that a GPU repeats by itself: after a few calls the step, with forward, backward, the exchange of
/// gradients and the optimizer, is captured in a CUDA graph, and from then on a call only starts that, which takes the
/// host microseconds. On a CPU a call is just the step.
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
/// The step takes tensors, which are moved to the group's device, and returns tensors (or what holds some, see
/// TensorsIn), of which the caller gets copies without a graph of autograd. What it does must be the same in each call:
/// the host's part of it does not run again. So it must not wait for the GPU (item(), cpu(), printing), and numbers
/// that change belong into tensors. Optimizers of LibTorch count their steps on the host: use ours, whose learning
/// rates may change. Inputs of other sizes than those it was captured with, as an epoch's last batch, are stepped
/// uncaptured.
///
/// Collective: every rank calls it equally often, with inputs of the same sizes in the same calls. UsageError when the
/// step cannot be captured, saying what is in the way. A lost rank or one that is late is a PeerError or a TimeoutError
/// of the next call, or of group.synchronize().
///
/// Not thread-safe. Not movable. Must go before the group, the model and the optimizer do.
template <class Body>
class CapturedStep {
 public:
  CapturedStep(ProcessGroup group, Body body, const CapturedStepOptions& options = {})
      : body_(std::move(body)), capture_(std::move(group), options) {}

  template <class... Inputs>
  requires(std::is_same_v<Inputs, at::Tensor>&&...) auto operator()(const Inputs&... inputs) {
    return call(std::index_sequence_for<Inputs...>(), {inputs...});
  }

  /// Whether calls are replayed by now.
  bool is_captured() const { return capture_.is_captured(); }

 private:
  template <size_t... i>
  auto call(std::index_sequence<i...>, const std::vector<at::Tensor>& given) {
    using Result = std::decay_t<decltype(body_(given[i]...))>;
    if constexpr (std::is_void_v<Result>) {
      capture_.call(given, [&](const std::vector<at::Tensor>& inputs) { body_(inputs[i]...); });
    } else {
      static_assert(TensorsIn<Result>::kAny, "a captured step returns tensors, or nothing");
      std::optional<Result> made;
      const bool is_replayed = capture_.call(given, [&](const std::vector<at::Tensor>& inputs) {
        made = body_(inputs[i]...);
        TensorsIn<Result>::visit(*made, [](at::Tensor& tensor) { tensor = tensor.detach(); });
      });
      if (!is_replayed) return *std::move(made);
      if (made) captured_ = *std::move(made);
      auto result = std::any_cast<Result>(captured_);
      TensorsIn<Result>::visit(result, [](at::Tensor& tensor) { tensor = tensor.clone(); });
      return result;
    }
  }

  Body body_;
  std::any captured_;            // where the graph leaves its results
  detail::StepCapture capture_;  // last: the graph goes first
};

}  // namespace lockstep
