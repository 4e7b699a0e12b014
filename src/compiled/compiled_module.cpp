#include <lockstep/compiled_module.h>

#include <utility>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "base/text.h"
#include "compiled/compatibility.h"
#include "compiled/compiled_model.h"

namespace lockstep {
namespace {

using detail::CompiledDescription;
using detail::CompiledModel;

/// Returns the GPU that the model is loaded on; none if it was compiled for CPUs.
std::optional<c10::Device> choose_gpu(const CompiledDescription& model, std::optional<c10::Device> wanted,
                                      const std::string& path) {
  if (wanted && wanted->type() != model.device)
    throw UsageError(text(path, " was compiled for ", c10::DeviceTypeName(model.device, true), ", but device is ",
                          *wanted, "; compile it for this device as well"));
  if (model.device == c10::kCPU) return std::nullopt;
  if (wanted && wanted->has_index()) return wanted;
  if (!c10::impl::hasDeviceGuardImpl(model.device)) return c10::Device(model.device, 0);
  return c10::impl::getDeviceGuardImpl(model.device)->getDevice();
}

std::unique_ptr<CompiledModel> load_model(const std::string& path, std::optional<c10::Device> wanted) {
  auto description = detail::read_description(path, load_checkpoint(path));
  const auto gpu = choose_gpu(description, wanted, path);
  const auto why = detail::find_incompatibility(description, detail::this_machine(gpu));
  if (!why.empty()) throw UsageError(text(path, " cannot be used: ", why));
  if (gpu) {
    for (auto* tensors : {&description.parameters, &description.buffers})
      for (auto& described : *tensors) described.tensor.set_data(described.tensor.to(*gpu));
  }
  return std::make_unique<CompiledModel>(path, std::move(description));
}

}  // namespace

CompiledModuleImpl::CompiledModuleImpl(const std::string& path, std::optional<c10::Device> device)
    : CompiledModuleImpl(load_model(path, device)) {}

CompiledModuleImpl::CompiledModuleImpl(std::unique_ptr<detail::CompiledModel> model)
    : AdoptedTensors(model->description().model, model->description().named_parameters,
                     model->description().named_buffers),
      model_(std::move(model)) {}

CompiledModuleImpl::~CompiledModuleImpl() = default;

const std::vector<std::vector<CompiledInput>>& CompiledModuleImpl::inputs() const {
  return model_->description().inputs;
}

bool CompiledModuleImpl::has_loss() const {
  return model_->description().has_loss;
}

c10::IValue CompiledModuleImpl::run(std::vector<at::Tensor> inputs) {
  return model_->run(std::move(inputs), is_training());
}

bool CompiledModuleImpl::normalizes_batches() const {
  return model_->description().normalizes_batches;
}

}  // namespace lockstep
