// The size of a pickle's result. Opcodes of two bytes can refer to values that the pickle has made before, so a small
// pickle may stand for a value of any size, or for a value that contains itself. The size of each node is the sum of
// the sizes of its elements, so it is computed once for each node.

#include <algorithm>

#include "checkpoint/pickle_nodes.h"

namespace lockstep::detail {
namespace {

constexpr uint64_t kBytesOfIndex = 8, kBytesOfOtherKey = 80;  // in a path
constexpr uint64_t kTooLarge = uint64_t{1} << 62;             // and above

uint64_t sum(uint64_t a, uint64_t b) {
  return std::min(a + b, kTooLarge);
}

uint64_t product(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? kTooLarge : std::min(result, kTooLarge);
}

}  // namespace

/// Computes the size of each node once, however many values refer to it.
class PickleNodes::ValueSizes {
 public:
  /// The memory that the values of a node would take.
  struct ValueSize {
    uint64_t bytes = 0;
    uint64_t tensors = 0;
    uint64_t path_bytes = 0;  // of the paths of the tensors: keys and indices with dots between them
    uint32_t height = 0;      // the number of containers inside each other
  };

  explicit ValueSizes(const PickleNodes& nodes)
      : nodes_(nodes), of_sequences_(nodes.sequences_.size()), of_objects_(nodes.objects_.size()) {}

  ValueSize of(Node node) { return of(node, 0); }

 private:
  ValueSize of(Node node, size_t depth) {
    const auto index = nodes_.nodes_[node].index;
    check_nesting(depth);  // also ends the descent into a value that contains itself
    switch (nodes_.kind(node)) {
      case NodeKind::kLeaf: {
        const auto& leaf = nodes_.leaves_[index];
        return {.bytes = bytes_of(leaf), .tensors = leaf.is(Value::Kind::kTensor)};
      }
      case NodeKind::kTensor:
        return {.bytes = bytes_of_tensor(nodes_.tensors_[index].sizes.size()), .tensors = 1};
      case NodeKind::kGlobal:
        return {.bytes = sizeof(Value) + nodes_.names_[index].size()};
      case NodeKind::kStorage:
        return {};
      default:
        break;
    }
    auto& known = nodes_.is(node, NodeKind::kObject) ? of_objects_[index] : of_sequences_[index];
    if (known.bytes == 0) known = of_container(node, depth);
    check_nesting(depth + known.height);
    return known;
  }

  ValueSize of_container(Node node, size_t depth) {
    ValueSize total{.bytes = sizeof(Value)};
    if (nodes_.is(node, NodeKind::kObject)) {
      const auto& object = nodes_.objects_[nodes_.nodes_[node].index];
      total.bytes += object.type->size();
      add_elements(total, object.arguments, depth);
      add_items(total, object.entries, depth);
    } else if (nodes_.is(node, NodeKind::kDict)) {
      add_items(total, nodes_.elements(node), depth);
    } else {
      add_elements(total, nodes_.elements(node), depth);
    }
    return total;
  }

  void add_elements(ValueSize& total, const std::vector<Node>& list, size_t depth) {
    for (Node element : list) add(total, element, kBytesOfIndex, depth);
  }

  void add_items(ValueSize& total, const std::vector<Node>& list, size_t depth) {
    for (size_t i = 0; i + 1 < list.size(); i += 2) {
      add(total, list[i], 0, depth);
      add(total, list[i + 1], key_bytes(list[i]), depth);
    }
  }

  /// Adds an element whose key or index has `key_bytes` bytes.
  void add(ValueSize& total, Node node, uint64_t key_bytes, size_t depth) {
    const auto part = of(node, depth + 1);
    total.bytes = sum(total.bytes, part.bytes);
    total.tensors = sum(total.tensors, part.tensors);
    total.path_bytes = sum(total.path_bytes, sum(part.path_bytes, product(part.tensors, key_bytes + 1)));
    total.height = std::max(total.height, part.height + 1);
  }

  uint64_t key_bytes(Node key) const {
    const bool is_string = nodes_.is(key, NodeKind::kLeaf) && nodes_.value(key).is(Value::Kind::kString);
    return is_string ? nodes_.value(key).as_string().size() : kBytesOfOtherKey;
  }

  static void check_nesting(size_t depth) {
    if (depth > kMaxNesting)
      refuse_pickle("its values are nested more than ", kMaxNesting, " deep, or a value contains itself");
  }

  const PickleNodes& nodes_;
  std::vector<ValueSize> of_sequences_, of_objects_;  // of 0 bytes: not computed yet
};

void PickleNodes::check_growth(Node result) {
  const auto size = ValueSizes(*this).of(result);
  if (size.path_bytes > initial_budget_) refuse_growth("the paths of its tensors");
  spend(size.bytes);
}

}  // namespace lockstep::detail
