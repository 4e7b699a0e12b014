#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/export.h>
#include <lockstep/value.h>

namespace lockstep {

/// How objects of type T are saved in checkpoints. Defined for
///   - classes with `Value state_dict() const` and `load_state_dict(const Value&)`,
///   - classes with LibTorch's `save(OutputArchive&) const` and `load(InputArchive&)`, such as samplers,
///   - LibTorch's LRScheduler, modules (module_state.h) and optimizers (optimizer_state.h),
///   - numbers, booleans, strings, tensors and Value itself.
/// Specialize it for other types:
///
///     template <>
///     struct lockstep::StateTraits<Replay> {
///       static lockstep::Value save(const Replay& buffer);
///       static void load(Replay& buffer, const lockstep::Value& value);
///     };
///
/// save() is called on every rank, in the same order, so it may be collective; the value of rank 0 is written.
/// load() is called on every rank with that value.
template <class T>
struct StateTraits;

/// A file of a sharded checkpoint, on which load_shards() of StateTraits is called.
using ReadShard = std::function<Value(size_t shard, const LoadOptions& options)>;

namespace detail {

/// An archive of LibTorch as nested dicts, and back.
LOCKSTEP_EXPORT Value value_of_archive(const std::function<void(torch::serialize::OutputArchive&)>& save);
LOCKSTEP_EXPORT void load_as_archive(const Value& value,
                                     const std::function<void(torch::serialize::InputArchive&)>& load);

/// Converts between LibTorch's values and ours. Throw UsageError for kinds that the other does not have.
LOCKSTEP_EXPORT Value value_of(const c10::IValue& value);
LOCKSTEP_EXPORT c10::IValue ivalue_of(const Value& value);

template <class T>
concept HasStateDict = requires(const T& saved, T& loaded, const Value& value) {
  { saved.state_dict() } -> std::convertible_to<Value>;
  loaded.load_state_dict(value);
};

template <class T>
concept HasArchive = requires(const T& saved, T& loaded, torch::serialize::OutputArchive& out,
                              torch::serialize::InputArchive& in) {
  saved.save(out);
  loaded.load(in);
};

/// LibTorch's schedulers have no other access to their state.
struct SchedulerState : torch::optim::LRScheduler {
  static unsigned& steps(torch::optim::LRScheduler& scheduler) { return scheduler.*(&SchedulerState::step_count_); }
};

}  // namespace detail

template <detail::HasStateDict T>
struct StateTraits<T> {
  static Value save(const T& object) { return object.state_dict(); }
  static void load(T& object, const Value& value) { object.load_state_dict(value); }
};

// Modules and optimizers have archives, too, but separate specializations.
template <class T>
requires(detail::HasArchive<T> && !detail::HasStateDict<T> && !std::derived_from<T, torch::nn::Module> &&
         !std::derived_from<T, torch::optim::Optimizer>) struct StateTraits<T> {
  static Value save(const T& object) {
    return detail::value_of_archive([&](torch::serialize::OutputArchive& archive) { object.save(archive); });
  }
  static void load(T& object, const Value& value) {
    detail::load_as_archive(value, [&](torch::serialize::InputArchive& archive) { object.load(archive); });
  }
};

template <std::derived_from<torch::optim::LRScheduler> T>
requires(!detail::HasStateDict<T> && !detail::HasArchive<T>) struct StateTraits<T> {
  static Value save(const T& scheduler) {
    return Value::dict({{"_step_count", detail::SchedulerState::steps(const_cast<T&>(scheduler))}});
  }
  static void load(T& scheduler, const Value& value) {
    detail::SchedulerState::steps(scheduler) = static_cast<unsigned>(value.at("_step_count").as_int());
  }
};

template <class T>
requires std::is_arithmetic_v<T>
struct StateTraits<T> {
  static Value save(T number) { return number; }
  static void load(T& number, const Value& value) {
    if constexpr (std::is_same_v<T, bool>)
      number = value.as_bool();
    else if constexpr (std::is_integral_v<T>)
      number = static_cast<T>(value.as_int());
    else
      number = static_cast<T>(value.as_double());
  }
};

template <>
struct StateTraits<std::string> {
  static Value save(const std::string& content) { return content; }
  static void load(std::string& content, const Value& value) { content = value.as_string(); }
};

template <>
struct LOCKSTEP_EXPORT StateTraits<at::Tensor> {
  static Value save(const at::Tensor& tensor) { return tensor; }
  /// Copies into the tensor, which must have the same sizes.
  static void load(at::Tensor& tensor, const Value& value);
};

template <>
struct StateTraits<Value> {
  static Value save(const Value& object) { return object; }
  static void load(Value& object, const Value& value) { object = value; }
};

}  // namespace lockstep
