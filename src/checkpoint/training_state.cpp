#include <lockstep/training_state.h>

#include <mutex>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

at::Tensor state_of(const at::Generator& generator) {
  auto shared = generator;
  const std::lock_guard lock(shared.mutex());
  return shared.get_state();
}

void set_state(const at::Generator& generator, const Value& value) {
  auto shared = generator;
  const std::lock_guard lock(shared.mutex());
  shared.set_state(value.tensor().cpu());
}

/// Tensors of bytes, as Python's torch.get_rng_state() and torch.cuda.get_rng_state() return them.
Value random_state(c10::Device device) {
  auto state = Value::dict({{"cpu", state_of(at::detail::getDefaultCPUGenerator())}});
  if (device.is_cuda()) state.set("cuda", state_of(at::globalContext().defaultGenerator(device)));
  return state;
}

void set_random_state(const Value& state, c10::Device device) {
  set_state(at::detail::getDefaultCPUGenerator(), state.at("cpu"));
  if (const auto* cuda = state.find("cuda"); cuda && device.is_cuda())
    set_state(at::globalContext().defaultGenerator(device), *cuda);
}

}  // namespace

TrainingState& TrainingState::add(detail::StatePart part) {
  if (part.name.empty()) throw UsageError("TrainingState: a name is empty; it is the key in the checkpoint");
  for (const auto& other : parts_)
    if (other.name == part.name)
      throw UsageError(text("TrainingState: '", part.name, "' was already added; use another name"));
  parts_.push_back(std::move(part));
  return *this;
}

TrainingState& TrainingState::add(std::string name, Value constant) {
  return add(detail::StatePart{.name = std::move(name),
                               .save = [constant = std::move(constant)](const ProcessGroup&) { return constant; },
                               .load = [](const Value&, const ProcessGroup&) {},
                               .save_shard = {},
                               .load_shards = {}});
}

TrainingState& TrainingState::add_rng() {
  return add(detail::StatePart{
      .name = "rng",
      .is_per_rank = true,
      .save = [](const ProcessGroup& group) { return random_state(group.device()); },
      .load = [](const Value& value, const ProcessGroup& group) { set_random_state(value, group.device()); },
      .save_shard = {},
      .load_shards = {}});
}

}  // namespace lockstep
