#include "parallel/replicas.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/torch.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "parallel/sync_batch_norm.h"

namespace lockstep::detail {
namespace {

/// Where the gradients of a parameter's replicas come together: in the gradient of the parameter itself.
class SumOfReplicas final : public torch::autograd::Node {
 public:
  explicit SumOfReplicas(const at::Tensor& parameter)
      : Node(torch::autograd::edge_list{torch::autograd::impl::gradient_edge(parameter)}),
        device_(parameter.device()) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    at::Tensor sum;
    for (const auto& gradient : gradients) {
      if (!gradient.defined()) continue;
      const auto here = gradient.to(device_);
      sum = sum.defined() ? sum + here : here;
    }
    return {sum};
  }

 private:
  const c10::Device device_;
};

c10::Device with_index(c10::Device device) {
  if (device.is_cpu() || device.has_index()) return device;
  return c10::Device(device.type(), 0);
}

std::vector<c10::Device> chosen(const std::vector<c10::Device>& asked) {
  std::vector<c10::Device> result;
  const auto gpus = static_cast<int>(torch::cuda::device_count());
  for (const auto device : asked) {
    result.push_back(with_index(device));
    if (device.is_cuda() && result.back().index() >= gpus)
      throw UsageError(text("DataParallel: device ", result.back(), " is asked for, and this process sees ", gpus,
                            gpus == 1 ? " GPU" : " GPUs", "; CUDA_VISIBLE_DEVICES says which"));
  }
  if (!asked.empty()) return result;
  for (int gpu = 0; gpu < gpus; ++gpu) result.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  if (result.empty()) result.emplace_back(c10::kCPU);
  return result;
}

}  // namespace

Replicas::Form::Form(const at::Tensor& of)
    : tensor(of.unsafeGetTensorImpl()),
      memory(of.data_ptr()),
      dtype(of.scalar_type()),
      device(of.device()),
      trains(of.requires_grad()) {}

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options)
    : module_(std::move(module)),
      devices_(chosen(options.devices)),
      output_device_(with_index(options.output_device.value_or(devices_.front()))),
      dim_(options.dim),
      threads_(devices_) {
  if (dim_ < 0) throw UsageError(text("DataParallel: dim is ", dim_, "; it must be 0 or above"));
  if (const auto layer = synced_batch_norm_in(*module_))
    throw UsageError(text("DataParallel: layer '", *layer, "' is a SyncBatchNorm, which is for ranks, one for each ",
                          "device; use DistributedDataParallel"));
  replicate();
}

std::vector<Replicas::Form> Replicas::forms() const {
  std::vector<Form> result;
  for (const auto& tensor : module_->parameters()) result.emplace_back(tensor);
  for (const auto& tensor : module_->buffers()) result.emplace_back(tensor);
  return result;
}

void Replicas::check_place() const {
  const auto check = [&](const auto& tensors) {
    for (const auto& item : tensors)
      if (item.value().device() != devices_.front())
        throw UsageError(text("DataParallel: '", item.key(), "' is on ", item.value().device(),
                              ", and the module must be on the first device, ", devices_.front(),
                              "; call model->to() before"));
  };
  check(module_->named_parameters());
  check(module_->named_buffers());
}

std::shared_ptr<torch::nn::Module> Replicas::clone(c10::Device device) const {
  try {
    return module_->clone(device);
  } catch (const c10::Error& error) {
    throw UsageError(
        text("DataParallel: the module cannot be cloned: derive it from torch::nn::Cloneable, and make its ",
             "parameters and submodules in reset(): ", error.what_without_backtrace()));
  }
}

void Replicas::replicate() {
  check_place();
  torch::NoGradGuard no_grad;
  std::vector<Copy> copies;
  for (size_t index = 1; index < devices_.size(); ++index) {
    auto copy = clone(devices_[index]);
    copies.push_back({copy, copy->parameters(), copy->buffers(), copy->modules()});
  }
  const auto parameters = module_->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    const auto sum = parameter.requires_grad() ? std::make_shared<SumOfReplicas>(parameter) : nullptr;
    for (auto& copy : copies) {
      auto& replica = copy.parameters[i];
      if (replica.device() == parameter.device()) replica.set_data(parameter.variable_data());  // the same memory
      replica.set_requires_grad(false);
      if (sum) torch::autograd::set_history(replica, sum);
    }
  }
  copies_ = std::move(copies);
  made_of_ = forms();
}

/// What the module's tensors and layers are now, the first replicas are, too.
void Replicas::follow(size_t count) {
  if (count < 2) return;
  if (forms() != made_of_) replicate();
  torch::NoGradGuard no_grad;
  const auto parameters = module_->parameters(), buffers = module_->buffers();
  const auto layers = module_->modules();
  for (size_t index = 0; index + 1 < count; ++index) {
    auto& copy = copies_[index];
    const auto take = [](const at::Tensor& replica, const at::Tensor& original) {  // a graph that has it keeps working
      replica.variable_data().copy_(original, /*non_blocking=*/!replica.is_cpu());
    };
    for (size_t i = 0; i < parameters.size(); ++i)
      if (copy.parameters[i].device() != parameters[i].device()) take(copy.parameters[i], parameters[i]);
    for (size_t i = 0; i < buffers.size(); ++i) take(copy.buffers[i], buffers[i]);
    for (size_t i = 0; i < layers.size(); ++i)
      if (copy.layers[i]->is_training() != layers[i]->is_training()) copy.layers[i]->train(layers[i]->is_training());
  }
}

void Replicas::run(size_t count, const std::function<void(size_t, torch::nn::Module&)>& body) {
  follow(count);
  threads_.run(count, [&](size_t index) { body(index, index == 0 ? *module_ : *copies_[index - 1].module); });
}

}  // namespace lockstep::detail
