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
  /// Devices of the replicas. The module itself must be on the first device. A device may be listed several times.
  /// Default: all GPUs, or the CPU if there is none.
  std::vector<c10::Device> devices{};
  /// Device on which results are gathered. Default: the first device.
  std::optional<c10::Device> output_device{};
  /// Dimension along which tensors are split and gathered; 0 or more.
  int64_t dim = 0;
};

namespace detail {

class ModuleReplicas;

}  // namespace detail

/// The part of DataParallel that does not depend on the module's class.
class LOCKSTEP_EXPORT DataParallelBase {
 public:
  ~DataParallelBase();
  DataParallelBase(const DataParallelBase&) = delete;
  DataParallelBase& operator=(const DataParallelBase&) = delete;

  const std::vector<c10::Device>& devices() const;
  std::vector<at::Tensor> parameters() const;
  void train(bool on = true);
  void eval();

  /// Creates the replicas again. Call it after changing anything in the module other than layers, parameters, buffers
  /// and training mode, which replicas follow automatically.
  void replicate();

 protected:
  DataParallelBase(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options);

  /// Returns the number of replicas for these inputs: one for each device, or fewer if the batch is smaller. Throws
  /// UsageError if the inputs have different batch sizes.
  size_t count_parts(const std::vector<at::Tensor>& inputs) const;
  /// Returns part `index` of `parts`, on the device of that replica. A tensor without dimensions is copied to each
  /// replica.
  at::Tensor part(const at::Tensor& input, size_t index, size_t parts) const;
  /// Calls `body` for the first `parts` replicas concurrently and blocks until all calls have returned.
  void run(size_t parts, const std::function<void(size_t index, torch::nn::Module& replica)>& body);
  /// Throws UsageError unless all replicas have returned the same number of tensors.
  void check_counts(const std::vector<std::vector<at::Tensor>>& tensors) const;
  at::Tensor gather(const std::vector<at::Tensor>& parts) const;

 private:
  std::unique_ptr<detail::ModuleReplicas> replicas_;
};

/// Runs a module on several devices of this process; each device processes a part of the batch. Gradients are summed in
/// the module's own parameters, so an optimizer for `module()->parameters()` trains as on one device.
///
/// The module must be Cloneable. The constructor throws UsageError if it is not, if a tensor of the module is not on
/// the first device, or if the module has SyncBatchNorm layers. The replicas exist as long as this object. Before each
/// forward, the module's parameters and buffers are copied to them. The first replica is the module itself. Buffer
/// changes of the other replicas are lost, so running statistics come from the first part of each batch.
///
/// One process for each device, with DistributedDataParallel, is faster. Not collective. Not thread-safe. Not movable.
template <class Module>
class DataParallel : public DataParallelBase {
  static_assert(!torch::detail::is_module_holder<Module>::value,
                "Module is a module holder (TORCH_MODULE): write DataParallel parallel(net), or DataParallel<NetImpl> "
                "with the class that the holder holds.");

 public:
  explicit DataParallel(std::shared_ptr<Module> module, const DataParallelOptions& options = {})
      : DataParallelBase(module, options), module_(std::move(module)) {}
  explicit DataParallel(const torch::nn::ModuleHolder<Module>& module, const DataParallelOptions& options = {})
      : DataParallel(module.ptr(), options) {}

  /// Calls the module's forward on each part of the batch. Splits the tensors in the arguments and concatenates the
  /// tensors in the results; see TensorsIn. Results without dimensions are concatenated to a vector with one element
  /// for each part.
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

  /// Like forward(), for any function of a replica and its parts of the arguments. For example, compute the loss on
  /// each replica, so that no device has to hold all outputs:
  ///   dp.on_each([](Net& net, torch::Tensor x, torch::Tensor y) { return sum_of_losses(net(x), y); }, x, y).sum()
  template <class Function, class... Args>
  auto on_each(const Function& function, const Args&... args) {
    using Result = std::decay_t<std::invoke_result_t<const Function&, Module&, Args...>>;
    static_assert(TensorsIn<Result>::kAny, "a function that runs on replicas must return tensors, which are gathered");
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

  /// Returns the first result, with each tensor replaced by the concatenation over all results.
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
