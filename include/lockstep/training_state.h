#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/pimpl.h>

#include <lockstep/export.h>
#include <lockstep/module_state.h>
#include <lockstep/process_group.h>
#include <lockstep/state_traits.h>
#include <lockstep/value.h>

namespace lockstep {

namespace detail {

/// One entry of a TrainingState.
struct StatePart {
  std::string name;
  bool is_per_rank = false;
  std::function<Value(const ProcessGroup& group)> save;
  std::function<void(const Value& value, const ProcessGroup& group)> load;
  // Only of objects that are divided between the ranks.
  std::function<Value()> save_shard;
  std::function<void(size_t shards, const ReadShard& read)> load_shards;
  // Only of objects that differ between ranks and that any number of ranks can load.
  std::function<void(const std::vector<Value>& states, const ProcessGroup& group)> load_rank_states{};
};

template <class T>
concept HasState = requires(const T& saved, T& loaded, const Value& value) {
  { StateTraits<T>::save(saved) } -> std::convertible_to<Value>;
  StateTraits<T>::load(loaded, value);
};

template <class T>
concept HasShards = requires(const T& saved, T& loaded, const ReadShard& read) {
  { saved.shard_state_dict() } -> std::convertible_to<Value>;
  loaded.load_shards(size_t{}, read);
};

template <class T>
concept HasRankStates = requires(T& loaded, const std::vector<Value>& states, const ProcessGroup& group) {
  loaded.load_rank_states(states, group);
};

}  // namespace detail

/// The list of objects that make up the state of a training run, which CheckpointDirectory saves and loads:
///
///     auto state = lockstep::TrainingState{}.add("model", ddp.module()).add("optimizer", optimizer)
///                      .add("sampler", sampler).add_rng();
///
/// Names are keys of the checkpoint, as Python sees it. Objects are referred to, not copied: they must outlive the
/// TrainingState, except those in a std::shared_ptr or a module holder. StateTraits says which types can be added. Add
/// the same objects in the same order on every rank. Copyable. Not thread-safe.
///
/// add() throws UsageError for a name that is empty or already taken.
class LOCKSTEP_EXPORT TrainingState {
 public:
  /// Adds an object that is equal on all ranks. A ZeroRedundancyOptimizer, which is not, is written as one state that
  /// any number of ranks can load, and a PowerSgdState as a list of the states of all ranks, likewise.
  template <detail::HasState T>
  TrainingState& add(std::string name, T& object) {
    detail::StatePart part{
        .name = std::move(name),
        .save = [&object](const ProcessGroup&) { return StateTraits<T>::save(object); },
        .load = [&object](const Value& value, const ProcessGroup&) { StateTraits<T>::load(object, value); },
        .save_shard = {},
        .load_shards = {}};
    if constexpr (detail::HasShards<T>) {
      part.save_shard = [&object] { return object.shard_state_dict(); };
      part.load_shards = [&object](size_t shards, const ReadShard& read) { object.load_shards(shards, read); };
    }
    if constexpr (detail::HasRankStates<T>) {
      part.is_per_rank = true;
      part.load_rank_states = [&object](const std::vector<Value>& states, const ProcessGroup& group) {
        object.load_rank_states(states, group);
      };
    }
    return add(std::move(part));
  }
  template <class T>
  TrainingState& add(std::string name, const std::shared_ptr<T>& object) {
    add(std::move(name), *object);
    owned_.push_back(object);
    return *this;
  }
  template <class T>
  TrainingState& add(std::string name, const torch::nn::ModuleHolder<T>& module) {
    return add(std::move(name), module.ptr());
  }

  /// Adds a constant, for readers of the file: `.add("arch", "resnet18")`. Not changed by loading.
  TrainingState& add(std::string name, Value constant);

  /// Adds an object that differs between ranks. Each rank loads what it has saved. With another number of ranks, ranks
  /// for which nothing was saved keep their objects.
  template <detail::HasState T>
  TrainingState& add_per_rank(std::string name, T& object) {
    if constexpr (detail::HasRankStates<T>) return add(std::move(name), object);
    return add(detail::StatePart{
        .name = std::move(name),
        .is_per_rank = true,
        .save = [&object](const ProcessGroup&) { return StateTraits<T>::save(object); },
        .load = [&object](const Value& value, const ProcessGroup&) { StateTraits<T>::load(object, value); },
        .save_shard = {},
        .load_shards = {}});
  }

  /// Adds LibTorch's random number generators of every rank: of the CPU and of the group's device. They are saved under
  /// the name "rng".
  TrainingState& add_rng();

  const std::vector<detail::StatePart>& parts() const { return parts_; }

 private:
  TrainingState& add(detail::StatePart part);

  std::vector<detail::StatePart> parts_{};
  std::vector<std::shared_ptr<void>> owned_{};
};

}  // namespace lockstep
