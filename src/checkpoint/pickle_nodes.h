#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/error.h>
#include <lockstep/value.h>

#include "base/text.h"
#include "checkpoint/pickle.h"

namespace lockstep::detail {

template <class... Parts>
[[noreturn]] void refuse_pickle(const Parts&... parts) {
  throw CheckpointError(text("the pickle cannot be read: ", parts...));
}

/// A reference to a value on the machine.
using Node = uint32_t;

enum class NodeKind : uint8_t { kLeaf, kList, kTuple, kSet, kDict, kObject, kGlobal, kStorage, kTensor };

struct NodeEntry {
  NodeKind kind;
  uint32_t index;  // in the list of its kind
};

struct ObjectEntry {
  const std::string* type;
  std::vector<Node> arguments;
  std::vector<Node> entries;  // keys and values in turn
};

struct TensorEntry {
  uint32_t storage;
  at::ScalarType dtype;
  int64_t offset;
  std::vector<int64_t> sizes, strides;
};

struct StorageEntry {
  uint32_t claim;                       // index into the claims
  std::optional<at::ScalarType> dtype;  // none if the storage is untyped
  int64_t elements;
};

/// The values that a pickle has made so far, as nodes: a pickle may change a container after it was referred to.
class PickleNodes {
 public:
  explicit PickleNodes(size_t pickle_bytes) : pickle_bytes_(pickle_bytes) {
    none_ = leaf(Value());
    true_ = leaf(true);
    false_ = leaf(false);
    empty_tuple_ = sequence(NodeKind::kTuple, {});
  }

  const std::vector<StorageClaim>& claims() const { return claims_; }

 protected:
  static constexpr size_t kGrowth = 160;          // bytes of memory for each byte of the pickle
  static constexpr size_t kFreeGrowth = 1 << 20;  // bytes of memory for any pickle
  static constexpr size_t kBytesOfTensor =
      512;  // LibTorch's objects for a tensor, and its entry in a file that is written
  static constexpr size_t kBytesOfDimension = 32;

  /// Limits the memory and the work: opcodes of a few bytes can copy or visit values that earlier opcodes have made.
  void spend(size_t bytes) {
    if (bytes > budget_) refuse_growth("its values");
    budget_ -= bytes;
  }
  /// Refuses a result that contains itself, is nested too deeply, or would be far larger than the pickle. Computes its
  /// size without making it.
  void check_growth(Node result);
  [[noreturn]] void refuse_growth(const char* what) const {
    refuse_pickle(what, " would take more than ", kGrowth, " bytes for each of its ", pickle_bytes_, " bytes, and ",
                  kFreeGrowth >> 20, " MiB: it is damaged or hostile");
  }

  Node add(NodeKind kind, size_t index) {
    nodes_.push_back({kind, static_cast<uint32_t>(index)});
    return static_cast<Node>(nodes_.size() - 1);
  }
  /// The memory for a reference to a tensor, however the value is used: code that writes or prints it needs its sizes.
  static size_t bytes_of_tensor(size_t dimensions) {
    return sizeof(Value) + kBytesOfTensor + kBytesOfDimension * dimensions;
  }
  /// The memory for a copy of a value without elements.
  static size_t bytes_of(const Value& value) {
    if (value.is(Value::Kind::kTensor)) return bytes_of_tensor(static_cast<size_t>(value.tensor().dim()));
    const bool is_text = value.is(Value::Kind::kString) || value.is(Value::Kind::kBytes);
    return sizeof(Value) + (is_text ? value.as_string().size() : 0) +
           (value.is(Value::Kind::kBigInt) ? value.digits().size() : 0);
  }
  Node leaf(Value value) {
    spend(bytes_of(value));
    leaves_.push_back(std::move(value));
    return add(NodeKind::kLeaf, leaves_.size() - 1);
  }
  Node byte(uint8_t number) {
    auto& known = node_of_byte_[number];
    if (!known) known = leaf(number);
    return *known;
  }
  Node sequence(NodeKind kind, std::vector<Node> elements) {
    spend(sizeof(elements) + (elements.size() + 8) * sizeof(Node));
    sequences_.push_back(std::move(elements));
    return add(kind, sequences_.size() - 1);
  }
  /// `type` is one of the names.
  Node object(const std::string& type, std::vector<Node> arguments) {
    spend(sizeof(ObjectEntry) + (arguments.size() + 8) * sizeof(Node));
    objects_.push_back({&type, std::move(arguments), {}});
    return add(NodeKind::kObject, objects_.size() - 1);
  }
  const std::string& joined_name(std::string_view first, std::string_view second) {
    spend(sizeof(std::string) + first.size() + second.size());
    names_.emplace_back().reserve(first.size() + second.size() + 1);
    return names_.back().append(first).append(".").append(second);
  }
  Node global(std::string_view module, std::string_view name) {
    joined_name(module, name);
    return add(NodeKind::kGlobal, names_.size() - 1);
  }

  NodeKind kind(Node node) const { return nodes_[node].kind; }
  bool is(Node node, NodeKind wanted) const { return kind(node) == wanted; }
  bool is_sequence(Node node) const {
    return is(node, NodeKind::kList) || is(node, NodeKind::kTuple) || is(node, NodeKind::kSet);
  }
  const std::vector<Node>& elements(Node node) const { return sequences_[nodes_[node].index]; }
  std::vector<Node>& elements(Node node) { return sequences_[nodes_[node].index]; }
  const Value& value(Node node) const { return leaves_[nodes_[node].index]; }
  ObjectEntry& entry(Node node) { return objects_[nodes_[node].index]; }

  const std::vector<Node>& tuple(Node node, size_t least) const {
    if (!is(node, NodeKind::kTuple) || elements(node).size() < least)
      refuse_pickle("expected a tuple of ", least, " or more values");
    return elements(node);
  }
  int64_t integer(Node node) const {
    if (!is(node, NodeKind::kLeaf) || !value(node).is(Value::Kind::kInt)) refuse_pickle("expected an integer");
    return value(node).as_int();
  }
  const std::string& string(Node node) const {
    if (!is(node, NodeKind::kLeaf) || !(value(node).is(Value::Kind::kString) || value(node).is(Value::Kind::kBytes)))
      refuse_pickle("expected a string");
    return value(node).as_string();
  }
  const std::string& name(Node node) const {
    if (!is(node, NodeKind::kGlobal)) refuse_pickle("expected the name of a class or function");
    return names_[nodes_[node].index];
  }
  std::vector<int64_t> integers(Node node) {
    const auto& list = tuple(node, 0);
    spend(list.size() * sizeof(int64_t));
    std::vector<int64_t> result;
    result.reserve(list.size());
    for (Node element : list) result.push_back(integer(element));
    return result;
  }

  const size_t pickle_bytes_;
  const size_t initial_budget_ = kFreeGrowth + kGrowth * pickle_bytes_;
  size_t budget_ = initial_budget_;  // the rest of initial_budget_
  // Deques: references to their elements stay valid, and they never hold their elements twice.
  std::deque<NodeEntry> nodes_;
  std::deque<Value> leaves_;
  std::deque<std::vector<Node>> sequences_;  // of lists, tuples, sets and dicts
  std::deque<ObjectEntry> objects_;
  std::deque<std::string> names_;
  std::deque<StorageEntry> storage_entries_;
  std::deque<TensorEntry> tensors_;
  std::vector<StorageClaim> claims_;
  std::map<std::string, uint32_t> claim_of_;  // no hash table: a file could choose keys that collide
  std::array<std::optional<Node>, 256> node_of_byte_{};
  Node none_ = 0, true_ = 0, false_ = 0, empty_tuple_ = 0;

 private:
  class ValueSizes;
};

/// Computes the results of the functions and classes that PyTorch's files name, without calling any of them.
class PickleCalls : public PickleNodes {
 protected:
  using PickleNodes::PickleNodes;

  /// The result of the function or class of this name with the arguments.
  Node call(const std::string& function, Node arguments);
  /// The storage that a persistent id refers to: ("storage", type, key, device, number of elements).
  Node storage(Node id);
  /// Applies a state, as __setstate__ would.
  Node build(Node target, Node state);
  void add_elements(Node target, const std::vector<Node>& items);
  void add_items(Node target, const std::vector<Node>& items);

 private:
  const std::vector<Node>& listed(Node node) const;
  std::string encoded(Node node) const;
  Node dict_from(const std::vector<Node>& arguments);
  Node device(const std::vector<Node>& arguments);
  Node tensor(const std::string& function, const std::vector<Node>& arguments);
  std::string numpy_code(Node dtype);
  Node numpy_scalar(Node arguments);
  Node numpy_array(Node sizes, Node type, bool is_fortran, Node content);
};

}  // namespace lockstep::detail
