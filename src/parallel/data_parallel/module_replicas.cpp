#include "parallel/data_parallel/module_replicas.h"

#include <mutex>
#include <typeinfo>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/cuda.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/torch_version.h"
#include "parallel/batch_norm/sync_batch_norm.h"

namespace lockstep::detail {
namespace {

/// Sums the gradients of a parameter's replicas and passes the sum to the parameter itself.
class SumReplicaGradients final : public torch::autograd::Node {
 public:
  explicit SumReplicaGradients(const at::Tensor& parameter)
      : Node(torch::autograd::edge_list{torch::autograd::impl::gradient_edge(parameter)}) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    at::Tensor sum;
    for (const auto& gradient : gradients)
      if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient;
    return {sum};
  }
};

/// Moves the gradient of one replica to the parameter's device. A separate node from SumReplicaGradients, because a
/// node runs on the device of its inputs.
class MoveGradientToOwner final : public torch::autograd::Node {
 public:
  MoveGradientToOwner(const NodePointer<SumReplicaGradients>& sum, const at::Tensor& parameter)
      : Node(torch::autograd::edge_list{{sum, sum->add_input_metadata(parameter)}}), device_(parameter.device()) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return {gradients[0].defined() ? gradients[0].to(device_) : at::Tensor()};
  }

 private:
  const c10::Device device_;
};

/// Saves the state of the default CPU generator and restores it on destruction.
class RandomNumbersKept {
 public:
  RandomNumbersKept() {
    std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~RandomNumbersKept() {
    std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  RandomNumbersKept(const RandomNumbersKept&) = delete;
  RandomNumbersKept& operator=(const RandomNumbersKept&) = delete;

 private:
  at::Generator generator_ = at::detail::getDefaultCPUGenerator();
  at::Tensor state_;
};

c10::Device with_index(c10::Device device) {
  if (device.is_cpu() || device.has_index()) return device;
  return c10::Device(device.type(), 0);
}

std::vector<c10::Device> chosen(const std::vector<c10::Device>& requested) {
  std::vector<c10::Device> result;
  const auto gpus = static_cast<int>(torch::cuda::device_count());
  for (const auto device : requested) {
    result.push_back(with_index(device));
    if (device.is_cuda() && result.back().index() >= gpus)
      throw UsageError(text("DataParallel: option devices has ", result.back(), ", but this process sees ", gpus,
                            gpus == 1 ? " GPU" : " GPUs", "; check CUDA_VISIBLE_DEVICES"));
  }
  if (!requested.empty()) return result;
  for (int gpu = 0; gpu < gpus; ++gpu) result.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  if (result.empty()) result.emplace_back(c10::kCPU);
  return result;
}

}  // namespace

ModuleReplicas::Form::Form(const at::Tensor& of)
    : tensor(of.unsafeGetTensorImpl()),
      memory(of.data_ptr()),
      dtype(of.scalar_type()),
      device(of.device()),
      trains(of.requires_grad()) {}

ModuleReplicas::ModuleReplicas(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options)
    : module_(std::move(module)),
      devices_(chosen(options.devices)),
      output_device_(with_index(options.output_device.value_or(devices_.front()))),
      dim_(options.dim),
      threads_(make_unique_owned<DeviceThreads>(devices_)) {
  if (dim_ < 0) throw UsageError(text("DataParallel: option dim is ", dim_, ", expected 0 or more"));
  replicate();
}

std::vector<ModuleReplicas::Form> ModuleReplicas::forms() const {
  std::vector<Form> result;
  for (const auto& tensor : module_->parameters()) result.emplace_back(tensor);
  for (const auto& tensor : module_->buffers()) result.emplace_back(tensor);
  return result;
}

void ModuleReplicas::refuse_synced_layers() const {
  if (const auto layer = synced_batch_norm_in(*module_))
    throw UsageError(text("DataParallel: layer '", *layer, "' is a SyncBatchNorm, which needs one rank for each ",
                          "device; use DistributedDataParallel"));
}

void ModuleReplicas::check_place() const {
  const auto check = [&](const auto& tensors) {
    for (const auto& item : tensors)
      if (item.value().device() != devices_.front())
        throw UsageError(text("DataParallel: '", item.key(), "' is on ", item.value().device(),
                              ", but the module must be on the first device, ", devices_.front(),
                              "; call model->to() first"));
  };
  check(module_->named_parameters());
  check(module_->named_buffers());
}

ModuleReplicas::Copy ModuleReplicas::make_copy(c10::Device device) const {
  const auto refuse = [](const auto&... parts) {
    throw UsageError(text("DataParallel: the module cannot be cloned: ", parts...,
                          "; derive it and its submodules from torch::nn::Cloneable<OwnClass>, and create their ",
                          "parameters, buffers and submodules in reset()"));
  };
  std::shared_ptr<torch::nn::Module> clone;
  try {
    clone = module_->clone(device);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    refuse(error.what_without_backtrace());
  }
  Copy copy;
  const auto pair = [&](const auto& originals, const auto& others, std::vector<at::Tensor>& tensors) {
    for (const auto& item : originals) {
      const auto* other = others.find(item.key());
      if (!other) refuse("'", item.key(), "' is missing in the clone");
      if (other->device() != device) refuse("'", item.key(), "' of the clone is on ", other->device());
      tensors.push_back(*other);
    }
  };
  pair(module_->named_parameters(), clone->named_parameters(), copy.parameters);
  pair(module_->named_buffers(), clone->named_buffers(), copy.buffers);
  const auto layers = clone->named_modules("module");
  for (const auto& item : module_->named_modules("module")) {
    const auto* other = layers.find(item.key());
    const auto& layer = *item.value();
    const auto* copied = other ? other->get() : nullptr;
    if (!copied || typeid(*copied) != typeid(layer))
      refuse("layer '", item.key(), "' of the clone is ", other ? "of another class" : "missing");
    copy.layers.push_back(*other);
  }
  return copy;
}

void ModuleReplicas::replicate() {
  refuse_synced_layers();
  check_place();
  c10::NoGradGuard no_grad;
  const RandomNumbersKept kept;
  std::vector<Copy> copies;
  for (size_t index = 1; index < devices_.size(); ++index) copies.push_back(make_copy(devices_[index]));
  const auto parameters = module_->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    NodePointer<SumReplicaGradients> sum;  // null if the parameter is frozen
    if (parameter.requires_grad()) sum = make_node<SumReplicaGradients>(parameter);
    for (auto& copy : copies) {
      auto& replica = copy.parameters[i];
      if (replica.device() == parameter.device()) replica.set_data(parameter.variable_data());  // the same memory
      replica.set_requires_grad(false);
      if (sum) torch::autograd::set_history(replica, make_node<MoveGradientToOwner>(sum, parameter));
    }
  }
  copies_ = std::move(copies);
  made_of_ = forms();
  made_of_layers_ = module_->modules();
}

/// Updates the first `count` - 1 copies to the current values and training mode of the module. Replicates again if
/// tensors or layers of the module were replaced.
void ModuleReplicas::follow(size_t count) {
  if (count < 2) return;
  const auto layers = module_->modules();
  if (forms() != made_of_ || layers != made_of_layers_) replicate();
  refuse_synced_layers();  // the program may have converted layers since the last call
  c10::NoGradGuard no_grad;
  const auto copy_value = [](const at::Tensor& replica,
                             const at::Tensor& original) {  // variable_data(): graphs stay valid
    replica.variable_data().copy_(original, /*non_blocking=*/!replica.is_cpu() && !original.is_cpu());
  };
  const auto parameters = module_->parameters(), buffers = module_->buffers();
  for (size_t index = 0; index + 1 < count; ++index) {
    auto& copy = copies_[index];
    for (size_t i = 0; i < parameters.size(); ++i)
      if (copy.parameters[i].device() != parameters[i].device()) copy_value(copy.parameters[i], parameters[i]);
    for (size_t i = 0; i < buffers.size(); ++i) copy_value(copy.buffers[i], buffers[i]);
    for (size_t i = 0; i < layers.size(); ++i)
      if (copy.layers[i]->is_training() != layers[i]->is_training()) copy.layers[i]->train(layers[i]->is_training());
  }
}

void ModuleReplicas::run(size_t count, const std::function<void(size_t, torch::nn::Module&)>& body) {
  follow(count);
  threads_->run(count, [&](size_t index) { body(index, index == 0 ? *module_ : *copies_[index - 1].layers.front()); });
}

}  // namespace lockstep::detail
