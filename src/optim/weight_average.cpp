#include <lockstep/weight_average.h>

#include <algorithm>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>
#include <lockstep/module_state.h>
#include "comm/torch_version.h"

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/capture.h"
#include "optim/average_state.h"
#include "optim/zero/sharded_memory.h"

// Overview.
//
// AverageState has a slot for each distinct tensor of the model: the weight and its average. An entry is a name in
// state_dict(); tied weights are two entries with one slot. Slots of one device and dtype are one Batch, so that an
// update is a few calls for lists of tensors. Tensors that are not averaged (integers, and buffers without use_buffers)
// are copied.
//
// update() mixes the weights into the averages: ema() with a constant fraction, swa() with 1 / (updates + 1), where the
// number of updates is a tensor on the device, so that a captured step can contain the update. The first update copies.
//
// apply() backs the weights up and copies the averages into them. The guard's destructor first copies the buffers,
// which an evaluation may have changed, into their averages, and then restores the weights. No memory is swapped:
// captured steps and the buckets of DistributedDataParallel need parameters that stay at their addresses.

namespace lockstep {
namespace {

constexpr std::string_view kModulePrefix = "module.";
constexpr const char* kCountKey = "n_averaged";

struct NamedState {
  std::string name;
  at::Tensor tensor;
  bool is_buffer;
};

/// Lists parameters and buffers in the order of Python's state_dict.
void list_state(const torch::nn::Module& module, const std::string& prefix, std::vector<NamedState>& list) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    list.push_back({prefix + item.key(), item.value(), false});
  for (const auto& item : module.named_buffers(/*recurse=*/false))
    list.push_back({prefix + item.key(), item.value(), true});
  for (const auto& child : module.named_children()) list_state(*child.value(), text(prefix, child.key(), "."), list);
}

std::vector<NamedState> state_of(const torch::nn::Module& module) {
  std::vector<NamedState> list;
  list_state(module, "", list);
  return list;
}

bool can_be_averaged(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

bool is_narrow_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

/// Returns copies with this dtype; without one, each copy has the dtype of its tensor.
std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors, std::optional<at::ScalarType> dtype = {}) {
  std::vector<at::Tensor> copies;
  for (const auto& tensor : tensors)
    copies.push_back(at::empty_like(tensor, tensor.options().dtype(dtype.value_or(tensor.scalar_type()))));
  detail::copy_together(copies, tensors);
  return copies;
}

/// Returns the tensors whose name has the prefix "module.", without it.
std::map<std::string, at::Tensor> without_prefix(const std::map<std::string, at::Tensor>& named) {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : named)
    if (name.starts_with(kModulePrefix)) result.emplace(name.substr(kModulePrefix.size()), tensor);
  return result;
}

}  // namespace

namespace detail {

AverageState::AverageState(torch::nn::Module& model, AveragingRule rule, const WeightAverageOptions& options)
    : model_(model), rule_(rule) {
  const c10::NoGradGuard no_grad;
  std::unordered_map<const c10::TensorImpl*, size_t> known;
  std::map<std::pair<std::string, at::ScalarType>, Batch> batches;
  for (const auto& [name, tensor, is_buffer] : state_of(model)) {
    if (tensor.layout() != c10::kStrided)
      throw UsageError(text("WeightAverage: '", name, "' has layout ", tensor.layout(), ", expected a dense tensor"));
    const auto [found, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), slots_.size());
    entries_.push_back({name, found->second, TensorKind(tensor)});
    if (!is_new) continue;
    const bool is_averaged = can_be_averaged(tensor) && (!is_buffer || options.use_buffers);
    const auto dtype = is_averaged && options.float32 && is_narrow_weight(tensor) ? at::kFloat : tensor.scalar_type();
    auto average = at::empty_like(tensor, tensor.options().dtype(dtype));
    average.copy_(tensor);
    auto& batch = is_averaged ? batches[{tensor.device().str(), tensor.scalar_type()}] : copied_;
    batch.weights.push_back(tensor);
    batch.averages.push_back(average);
    all_weights_.push_back(tensor);
    all_averages_.push_back(average);
    slots_.push_back({tensor, average, is_buffer});
  }
  if (slots_.empty()) throw UsageError("WeightAverage: the model has no parameters; register them first");
  for (auto& [kind, batch] : batches) averaged_.push_back(std::move(batch));
  count_ = at::zeros({}, at::TensorOptions(at::kLong).device(slots_.front().weight.device()));
}

bool AverageState::knows(const std::string& name) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.name == name; });
}

void AverageState::check_model() const {
  const auto refuse = [](const std::string& name, auto&&... what) {
    throw UsageError(text("WeightAverage: '", name, "' ", what...,
                          "; construct the WeightAverage when the model is final and on its device"));
  };
  const auto now = state_of(model_);
  for (size_t i = 0; i < std::max(now.size(), entries_.size()); ++i) {
    if (i < now.size() && !knows_at(i, now[i].name) && !knows(now[i].name))
      refuse(now[i].name, "was added to the model after construction");
    if (i >= now.size() || !knows_at(i, now[i].name))
      refuse(entries_[std::min(i, entries_.size() - 1)].name,
             "was removed from the model, or registered in another order, after construction");
    const auto& [name, slot, kind] = entries_[i];
    if (!kind.describes(now[i].tensor))
      refuse(name, "is ", TensorKind(now[i].tensor), ", but was ", kind, " at construction");
    if (now[i].tensor.unsafeGetTensorImpl() != slots_[slot].weight.unsafeGetTensorImpl())
      refuse(name, "was replaced by another tensor after construction");
  }
}

void AverageState::refuse_capture(const char* call) const {
  for (const auto& slot : slots_)
    if (is_capturing(slot.weight.device()))
      throw UsageError(
          text("WeightAverage::", call, " cannot be captured in a CUDA graph; call it outside of the step"));
}

/// All ranks have one copy of such a parameter. Each rank would write to it, and apply() would save and restore weights
/// that other ranks have partly overwritten.
void AverageState::refuse_shared(const char* call) const {
  for (const auto& [name, slot, kind] : entries_)
    if (is_shared_between_ranks(slots_[slot].weight))
      throw UsageError(text("WeightAverage::", call, ": parameter '", name,
                            "' is memory that all ranks share (share_parameters of ZeroRedundancyOptimizer), so ranks "
                            "would overwrite each other's weights; copy the averages into a second model instead, with "
                            "load_state_dict() and copy_to_model() of a WeightAverage of that model"));
}

void AverageState::check_has_average(const char* call) const {
  if (!has_average_)
    throw UsageError(text("WeightAverage::", call, ": there is no average yet; call update() after a step first"));
  if (is_applied_)
    throw UsageError(
        text("WeightAverage::", call, ": the averages are applied already; destroy the guard of apply() first"));
}

void AverageState::mix(const Batch& batch) const {
  const auto dtype = batch.averages.front().scalar_type();
  const auto weights = batch.weights.front().scalar_type() == dtype ? batch.weights : copies_of(batch.weights, dtype);
  if (rule_.decay) {
    lerp_together(batch.averages, weights, 1 - *rule_.decay);
    return;
  }
  // The fraction depends on the count, which is on the device, so it must be a tensor.
  const auto fraction = (count_ + 1).to(at::kDouble).reciprocal().to(batch.averages.front().device(), dtype);
  const auto steps = at::_foreach_sub(weights, batch.averages);
  multiply_together(steps, fraction);
  at::_foreach_add_(batch.averages, steps);
}

void AverageState::update() {
  if (is_applied_)
    throw UsageError(
        "WeightAverage::update: the averages are applied, so the model has no weights of its own; destroy the guard of "
        "apply() first");
  check_model();
  const c10::NoGradGuard no_grad;
  if (has_average_) {
    for (const auto& batch : averaged_) mix(batch);
    if (!copied_.weights.empty()) copy_together(copied_.averages, copied_.weights);
  } else {
    refuse_capture("update: the first update");
    copy_together(all_averages_, all_weights_);
    has_average_ = true;
  }
  count_.add_(1);
}

void AverageState::apply() {
  refuse_shared("apply");
  check_has_average("apply");
  refuse_capture("apply");
  check_model();
  const c10::NoGradGuard no_grad;
  backup_ = copies_of(all_weights_);
  copy_together(all_weights_, all_averages_);
  is_applied_ = true;
}

void AverageState::restore() {
  const c10::NoGradGuard no_grad;
  is_applied_ = false;
  for (const auto& slot : slots_) {
    if (!slot.is_buffer) continue;
    // Where a narrow buffer did not change, its average keeps the digits that the buffer does not have.
    const auto rounded = slot.average.to(slot.weight.scalar_type());
    slot.average.copy_(rounded.is_same(slot.average) ? slot.weight
                                                     : at::where(slot.weight.eq(rounded), slot.average,
                                                                 slot.weight.to(slot.average.scalar_type())));
  }
  copy_together(all_weights_, backup_);
  backup_.clear();
}

void AverageState::copy_to_model() {
  refuse_shared("copy_to_model");
  check_has_average("copy_to_model");
  refuse_capture("copy_to_model");
  check_model();
  const c10::NoGradGuard no_grad;
  copy_together(all_weights_, all_averages_);
}

Value AverageState::state_dict() const {
  auto dict = Value::dict();
  dict.items().emplace_back(kCountKey, count_);
  for (const auto& entry : entries_) {
    const auto& slot = slots_[entry.slot];
    const bool is_in_model = is_applied_ && slot.is_buffer;
    dict.items().emplace_back(text(kModulePrefix, entry.name), (is_in_model ? slot.weight : slot.average).detach());
  }
  return dict;
}

void AverageState::load(const Value& dict) {
  if (is_applied_)
    throw UsageError("WeightAverage::load_state_dict: the averages are applied; destroy the guard of apply() first");
  check_model();
  const auto all = named_tensors(dict);
  const auto count = all.find(kCountKey);
  auto saved = without_prefix(all);
  if (count == all.end() || count->second.numel() != 1)
    throw UsageError(text("WeightAverage::load_state_dict: expected the state of an averaged model, with '", kCountKey,
                          "' and names that begin with '", kModulePrefix, "', got ", dict.to_string(120)));

  const auto has_prefix = [](const auto& item) { return item.first.starts_with(kModulePrefix); };
  const auto own_has_prefix = [](const Entry& entry) { return entry.name.starts_with(kModulePrefix); };
  if (std::all_of(saved.begin(), saved.end(), has_prefix) &&
      std::none_of(entries_.begin(), entries_.end(), own_has_prefix))
    saved = without_prefix(saved);  // of DistributedDataParallel

  std::vector<std::string> differences;
  for (const auto& entry : entries_) {
    const auto found = saved.find(entry.name);
    const auto& average = slots_[entry.slot].average;
    if (found == saved.end())
      differences.push_back(text("'", entry.name, "' is missing"));
    else if (found->second.sizes() != average.sizes())
      differences.push_back(text("'", entry.name, "' is ", found->second.sizes(), ", expected ", average.sizes()));
  }
  for (const auto& [name, tensor] : saved)
    if (!knows(name)) differences.push_back(text("'", name, "' is unexpected"));
  if (!differences.empty())
    throw UsageError(text("WeightAverage::load_state_dict: the state does not fit the model: ", enumerate(differences),
                          "; build the model that was saved"));

  const c10::NoGradGuard no_grad;
  for (const auto& entry : entries_) slots_[entry.slot].average.copy_(saved.at(entry.name));
  count_.copy_(count->second.reshape({}));
  has_average_ = count->second.item<int64_t>() > 0;
}

AppliedAverage::AppliedAverage(std::shared_ptr<AverageState> state) : state_(std::move(state)) {
  state_->apply();
}

AppliedAverage::~AppliedAverage() {
  try {
    state_->restore();
  } catch (...) {
    log_error(text("the model keeps the averages that WeightAverage::apply has copied, because restoring failed: ",
                   message_of(std::current_exception())));
  }
}

}  // namespace detail

AveragingRule ema(double decay) {
  if (!(decay >= 0 && decay <= 1)) throw UsageError(text("ema: decay is ", decay, ", expected a number from 0 to 1"));
  return {decay};
}

AveragingRule swa() {
  return {};
}

WeightAverage::WeightAverage(torch::nn::Module& model, AveragingRule rule, const WeightAverageOptions& options)
    : state_(std::make_shared<detail::AverageState>(model, rule, options)) {}

WeightAverage::~WeightAverage() = default;

void WeightAverage::update() {
  state_->update();
}

detail::AppliedAverage WeightAverage::apply() {
  return detail::AppliedAverage(state_);
}

void WeightAverage::copy_to_model() {
  state_->copy_to_model();
}

int64_t WeightAverage::updates() const {
  return state_->updates();
}

Value WeightAverage::state_dict() const {
  return state_->state_dict();
}

void WeightAverage::load_state_dict(const Value& dict) {
  state_->load(dict);
}

}  // namespace lockstep
