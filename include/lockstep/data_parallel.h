#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

struct DataParallelOptions {
  /// Where the module and its replicas run, the module itself on the first. Any devices, also several times the same.
  /// Empty: all GPUs, or the CPU where there are none.
  std::vector<c10::Device> devices{};
  /// Where results are gathered: the first device when not given.
  std::optional<c10::Device> output_device{};
  /// The dimension that tensors are split and gathered along.
  int64_t dim = 0;
};

namespace detail {

class ModuleReplicas;

}  // namespace detail

/// What DataParallel is, whatever the module's class.
class LOCKSTEP_EXPORT DataParallelBase {
 public:
  ~DataParallelBase();
  DataParallelBase(const DataParallelBase&) = delete;
  DataParallelBase& operator=(const DataParallelBase&) = delete;

  const std::vector<c10::Device>& devices() const;
  std::vector<at::Tensor> parameters() const;
  void train(bool on = true);
  void eval();

  /// Makes the replicas anew, for what they do not follow the module in by themselves: whatever is no layer, parameter,
  /// buffer or training mode.
  void replicate();

 protected:
  DataParallelBase(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options);

  /// How many replicas inputs are for: one for each device, unless the batch is smaller. UsageError when the inputs do
  /// not agree about its size.
  size_t count_parts(const std::vector<at::Tensor>& inputs) const;
  /// Part `index` of so many, on the device that it is for. Tensors without dimensions are for all.
  at::Tensor part(const at::Tensor& input, size_t index, size_t parts) const;
  /// Calls `body` for each of the first `parts` replicas at the same time, and returns when all are done.
  void run(size_t parts, const std::function<void(size_t index, torch::nn::Module& replica)>& body);
  /// UsageError unless all replicas have returned as many tensors.
  void check_counts(const std::vector<std::vector<at::Tensor>>& tensors) const;
  at::Tensor gather(const std::vector<at::Tensor>& parts) const;

 private:
  std::unique_ptr<detail::ModuleReplicas> replicas_;
};

/// A module that runs on several devices of this process: each takes a part of the batch. Gradients come together in
/// the module's own parameters, so that an optimizer for `module()->parameters()` trains as on one device.
///
/// The module needs to be Cloneable. ModuleReplicas live as long as this; before each forward they follow the module's
/// parameters and buffers. What replicas other than the first, which is the module itself, write to their buffers is
/// lost: running statistics are those of the first part of each batch.
///
/// One process for each device, with DistributedDataParallel, is faster. Not thread-safe.
template <class Module>
class DataParallel : public DataParallelBase {
 public:
  explicit DataParallel(std::shared_ptr<Module> module, const DataParallelOptions& options = {})
      : DataParallelBase(module, options), module_(std::move(module)) {}
  explicit DataParallel(const torch::nn::ModuleHolder<Module>& module, const DataParallelOptions& options = {})
      : DataParallel(module.ptr(), options) {}

  /// The module's forward on parts of the batch: tensors in the arguments are split, those in the results put together;
  /// see TensorsIn. Results without dimensions become a vector of one for each part.
  template <class... Args>
  auto forward(const Args&... args) {
    return on_each(
        [](Module& replica, auto&&... part) -> decltype(auto) {
          return replica.forward(std::forward<decltype(part)>(part)...);
        },
        args...);
  }

  template <class... Args>
  auto operator()(const Args&... args) {
    return forward(args...);
  }

  /// The same for any function of a replica and parts of the arguments, such as one that returns the loss, so that no
  /// device needs to hold the outputs of all:
  ///   dp.on_each([](Net& net, torch::Tensor x, torch::Tensor y) { return sum_of_losses(net(x), y); }, x, y).sum()
  template <class Function, class... Args>
  auto on_each(const Function& function, const Args&... args) {
    using Result = std::decay_t<std::invoke_result_t<const Function&, Module&, Args...>>;
    static_assert(TensorsIn<Result>::kAny, "what runs on replicas must return tensors, which can be gathered");
    std::vector<at::Tensor> inputs;
    (add_tensors(inputs, args), ...);
    const size_t count = count_parts(inputs);
    std::vector<std::tuple<Args...>> parts;
    for (size_t index = 0; index < count; ++index) parts.emplace_back(part_of(args, index, count)...);
    std::vector<std::optional<Result>> results(count);
    run(count, [&](size_t index, torch::nn::Module& replica) {
      results[index].emplace(std::apply(
          [&](auto&... part) { return function(dynamic_cast<Module&>(replica), std::move(part)...); }, parts[index]));
    });
    return gathered(results);
  }

  const std::shared_ptr<Module>& module() const { return module_; }
  Module* operator->() const { return module_.get(); }

 private:
  template <class Value>
  static void add_tensors(std::vector<at::Tensor>& tensors, Value value) {
    TensorsIn<Value>::visit(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  }

  template <class Arg>
  Arg part_of(Arg arg, size_t index, size_t parts) const {
    TensorsIn<Arg>::visit(arg, [&](at::Tensor& tensor) { tensor = part(tensor, index, parts); });
    return arg;
  }

  /// Like the first result, with the tensors of all.
  template <class Result>
  Result gathered(const std::vector<std::optional<Result>>& results) const {
    std::vector<std::vector<at::Tensor>> tensors(results.size());
    for (size_t index = 0; index < results.size(); ++index) add_tensors(tensors[index], *results[index]);
    check_counts(tensors);
    Result all = *results.front();
    size_t place = 0;
    TensorsIn<Result>::visit(all, [&](at::Tensor& tensor) {
      std::vector<at::Tensor> parts;
      for (const auto& of_replica : tensors) parts.push_back(of_replica[place]);
      tensor = gather(parts);
      ++place;
    });
    return all;
  }

  std::shared_ptr<Module> module_;
};

template <class Module>
DataParallel(const torch::nn::ModuleHolder<Module>&) -> DataParallel<Module>;
template <class Module>
DataParallel(const torch::nn::ModuleHolder<Module>&, const DataParallelOptions&) -> DataParallel<Module>;

}  // namespace lockstep
