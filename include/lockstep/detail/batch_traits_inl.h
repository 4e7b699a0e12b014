#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

#include <lockstep/batch_traits.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

namespace detail {

template <class T>
concept SentAsNumber = std::is_arithmetic_v<T> || std::is_enum_v<T>;

template <class Members>
inline constexpr size_t kBytesOfMembers = 0;
template <class... Items>
inline constexpr size_t kBytesOfMembers<std::tuple<Items&...>> = (sizeof(Items) + ... + 0);
template <class Members>
inline constexpr bool kAreSendable = false;
template <class... Items>
inline constexpr bool kAreSendable<std::tuple<Items&...>> = (Sendable<Items> && ...);

/// A struct whose function tensors() lists all its members: the sizes of the listed tensors add up to the struct's
/// size.
template <class T>
concept ListsAllMembers = ListsTensors<T> && std::default_initializable<T> && std::copy_constructible<T> &&
    kAreSendable<decltype(std::declval<T&>().tensors())> && kBytesOfMembers<decltype(std::declval<T&>().tensors())>
== sizeof(T);

template <Sendable Batch>
std::string pack_batch(const Batch& batch) {
  BatchWriter to;
  to.write(batch);
  return to.take();
}

template <Sendable Batch>
Batch unpack_batch(std::string_view bytes) {
  BatchReader from(bytes);
  auto batch = from.read<Batch>();
  from.finish();
  return batch;
}

}  // namespace detail

template <>
struct BatchTraits<at::Tensor> {
  static void write(BatchWriter& to, const at::Tensor& tensor) { to.write_tensor(tensor); }
  static at::Tensor read(BatchReader& from) { return from.read_tensor(); }
};

template <>
struct BatchTraits<std::string> {
  static void write(BatchWriter& to, const std::string& string) { to.write_string(string); }
  static std::string read(BatchReader& from) { return from.read_string(); }
};

template <detail::SentAsNumber T>
struct BatchTraits<T> {
  static void write(BatchWriter& to, const T& number) { to.write_number(&number, sizeof number); }
  static T read(BatchReader& from) {
    T number;
    from.read_number(&number, sizeof number);
    return number;
  }
};

template <detail::ListsAllMembers T>
struct BatchTraits<T> {
  static void write(BatchWriter& to, const T& batch) {
    T copy = batch;  // tensors() is not const
    std::apply([&](const auto&... member) { (to.write(member), ...); }, copy.tensors());
  }
  static T read(BatchReader& from) {
    T batch;
    std::apply([&]<class... Items>(Items&... member) { ((member = from.read<Items>()), ...); }, batch.tensors());
    return batch;
  }
};

template <Sendable... Items>
struct BatchTraits<std::tuple<Items...>> {
  static void write(BatchWriter& to, const std::tuple<Items...>& items) {
    std::apply([&](const Items&... item) { (to.write(item), ...); }, items);
  }
  static std::tuple<Items...> read(BatchReader& from) {
    return std::tuple<Items...>{from.read<Items>()...};  // braces: from left to right
  }
};

template <Sendable First, Sendable Second>
struct BatchTraits<std::pair<First, Second>> {
  static void write(BatchWriter& to, const std::pair<First, Second>& pair) {
    to.write(pair.first);
    to.write(pair.second);
  }
  static std::pair<First, Second> read(BatchReader& from) {
    return std::pair<First, Second>{from.read<First>(), from.read<Second>()};
  }
};

template <Sendable Item>
struct BatchTraits<std::vector<Item>> {
  static void write(BatchWriter& to, const std::vector<Item>& items) {
    to.write_count(items.size());
    for (const Item& item : items) to.write(item);
  }
  static std::vector<Item> read(BatchReader& from) {
    std::vector<Item> items;
    for (size_t left = from.read_count(); left > 0; --left) items.push_back(from.read<Item>());
    return items;
  }
};

template <Sendable Item, size_t size>
struct BatchTraits<std::array<Item, size>> {
  static void write(BatchWriter& to, const std::array<Item, size>& items) {
    for (const Item& item : items) to.write(item);
  }
  static std::array<Item, size> read(BatchReader& from) {
    return [&]<size_t... place>(std::index_sequence<place...>) {
      return std::array<Item, size>{(static_cast<void>(place), from.read<Item>())...};
    }
    (std::make_index_sequence<size>());
  }
};

template <Sendable Item>
struct BatchTraits<std::optional<Item>> {
  static void write(BatchWriter& to, const std::optional<Item>& item) {
    to.write_count(item ? 1 : 0);
    if (item) to.write(*item);
  }
  static std::optional<Item> read(BatchReader& from) {
    if (from.read_count() == 0) return std::nullopt;
    return from.read<Item>();
  }
};

template <Sendable Key, Sendable Item>
struct BatchTraits<std::map<Key, Item>> {
  static void write(BatchWriter& to, const std::map<Key, Item>& items) {
    to.write_count(items.size());
    for (const auto& [key, item] : items) {
      to.write(key);
      to.write(item);
    }
  }
  static std::map<Key, Item> read(BatchReader& from) {
    std::map<Key, Item> items;
    for (size_t left = from.read_count(); left > 0; --left) {
      auto key = from.read<Key>();
      items.emplace(std::move(key), from.read<Item>());
    }
    return items;
  }
};

template <Sendable Data, Sendable Target>
struct BatchTraits<torch::data::Example<Data, Target>> {
  static void write(BatchWriter& to, const torch::data::Example<Data, Target>& example) {
    to.write(example.data);
    to.write(example.target);
  }
  static torch::data::Example<Data, Target> read(BatchReader& from) {
    return torch::data::Example<Data, Target>{from.read<Data>(), from.read<Target>()};
  }
};

template <Sendable Data>
struct BatchTraits<torch::data::Example<Data, torch::data::example::NoTarget>> {
  using Example = torch::data::Example<Data, torch::data::example::NoTarget>;
  static void write(BatchWriter& to, const Example& example) { to.write(example.data); }
  static Example read(BatchReader& from) { return Example{from.read<Data>()}; }
};

}  // namespace lockstep
