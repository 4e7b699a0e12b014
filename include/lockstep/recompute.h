#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

struct RecomputeOptions {
  /// Repeats the random numbers of forward, so that dropout drops the same elements. Costs a copy of the generators'
  /// states. Set it to false for functions without random numbers inside a captured step, which cannot repeat them.
  bool preserve_random_numbers = true;
};

namespace detail {

/// Calls the function with these tensors in place of the arguments' tensors, and returns the tensors of its result.
using Segment = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

LOCKSTEP_EXPORT std::vector<at::Tensor> run_recomputed(Segment segment, const std::vector<at::Tensor>& inputs,
                                                       const RecomputeOptions& options);

}  // namespace detail

/// Calls function(args...) without keeping the tensors that its backward needs. Backward calls the function again. This
/// trades one more forward for memory (activation checkpointing, torch.utils.checkpoint in Python):
///
///   x = lockstep::recompute([&](torch::Tensor x) { return block->forward(x); }, x);
///
/// The function gets copies of the arguments. Gradients flow to tensors in the arguments (see TensorsIn) and to
/// parameters that the function uses. Its result is a tensor, or a type that contains tensors, and nothing else of the
/// result may depend on the arguments. The function must do the same in both calls: random numbers and autocast of
/// forward are restored for the second call, other state that it changes (running statistics) is changed twice. It must
/// live as long as the graph, so capture variables by value, or by reference to objects that outlive backward.
///
/// Works with DistributedDataParallel: segments that share a parameter need the option static_graph. Works in a
/// CapturedStep without random numbers; see RecomputeOptions. Without gradients (NoGradGuard) it only calls the
/// function. autograd::grad() and create_graph through it throw UsageError: use backward(). Thread-safe if the function
/// is.
template <class Function, class... Args>
auto recompute(const RecomputeOptions& options, Function function, Args... args) {
  using Arguments = std::tuple<Args...>;
  using Result = std::decay_t<std::invoke_result_t<Function&, Args&...>>;
  static_assert(TensorsIn<Result>::kAny, "recompute: the function must return tensors");
  Arguments arguments(std::move(args)...);
  std::vector<at::Tensor> inputs;
  TensorsIn<Arguments>::visit(arguments, [&](at::Tensor& tensor) {
    inputs.push_back(tensor);
    tensor = at::empty({0});  // the graph keeps the inputs; this only marks their places
  });
  auto made = std::make_shared<std::optional<Result>>();
  auto segment = [function = std::move(function), arguments = std::move(arguments),
                  weak = std::weak_ptr(made)](const std::vector<at::Tensor>& given) mutable {
    auto now = arguments;
    size_t next = 0;
    TensorsIn<Arguments>::visit(now, [&](at::Tensor& tensor) { tensor = given[next++]; });
    Result result = std::apply(function, now);
    std::vector<at::Tensor> outputs;
    TensorsIn<Result>::visit(result, [&](at::Tensor& tensor) { outputs.push_back(tensor); });
    if (auto first = weak.lock()) *first = std::move(result);
    return outputs;
  };
  const auto outputs = detail::run_recomputed(std::move(segment), inputs, options);
  Result result = std::move(**made);
  size_t next = 0;
  TensorsIn<Result>::visit(result, [&](at::Tensor& tensor) { tensor = outputs[next++]; });
  return result;
}

template <class Function, class... Args>
requires(!std::is_same_v<std::decay_t<Function>, RecomputeOptions>) auto recompute(Function function, Args... args) {
  return recompute(RecomputeOptions(), std::move(function), std::move(args)...);
}

}  // namespace lockstep
