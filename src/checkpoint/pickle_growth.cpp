// The size of a pickle's result. Opcodes of two bytes can refer to what the pickle has made before, so a small pickle
// may stand for a value of any size, or for one that contains itself. The size of each node is the sum of those of its
// elements, so it is computed once for each node.

#include <algorithm>

#include "checkpoint/pickle_nodes.h"

namespace lockstep::detail {
namespace {

constexpr uint64_t kBytesOfIndex = 8, kBytesOfOtherKey = 80;  // in a path

uint64_t sum(uint64_t a, uint64_t b) {
  return std::min(a + b, PickleExtent::kEndless);
}

uint64_t product(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? PickleExtent::kEndless : std::min(result, PickleExtent::kEndless);
}

[[noreturn]] void refuse_nesting() {
  refuse_pickle("its values are nested more than ", kDeepestNesting, " deep, or a value contains itself");
}

}  // namespace

void PickleNodes::check_growth(Node result) {
  sequence_extents_.resize(sequences_.size());
  object_extents_.resize(objects_.size());
  const auto extent = extent_of(result, 0);
  sequence_extents_ = object_extents_ = {};
  if (extent.path_bytes > whole_budget_)
    refuse_pickle("the paths of its tensors would be far larger than the pickle: it is damaged or hostile");
  spend(extent.bytes);
}

uint64_t PickleNodes::key_bytes(Node key) const {
  const bool is_string = is(key, NodeKind::kLeaf) && value(key).is(Value::Kind::kString);
  return is_string ? value(key).as_string().size() : kBytesOfOtherKey;
}

/// Adds an element whose key or index has `key_bytes` bytes.
void PickleNodes::add_to(PickleExtent& whole, Node node, uint64_t key_bytes, size_t depth) {
  const auto part = extent_of(node, depth + 1);
  whole.bytes = sum(whole.bytes, part.bytes);
  whole.tensors = sum(whole.tensors, part.tensors);
  whole.path_bytes = sum(whole.path_bytes, sum(part.path_bytes, product(part.tensors, key_bytes + 1)));
  whole.height = std::max(whole.height, part.height + 1);
}

PickleExtent PickleNodes::extent_of(Node node, size_t depth) {
  const auto index = nodes_[node].index;
  if (depth > kDeepestNesting) refuse_nesting();
  switch (kind(node)) {
    case NodeKind::kLeaf: {
      const bool is_tensor = leaves_[index].is(Value::Kind::kTensor);
      return {.bytes = bytes_of(leaves_[index]), .tensors = is_tensor};
    }
    case NodeKind::kTensor:
      return {.bytes = sizeof(Value), .tensors = 1};
    case NodeKind::kGlobal:
      return {.bytes = sizeof(Value) + names_[index].size()};
    case NodeKind::kStorage:
      return {};
    default:
      break;
  }
  auto& known = is(node, NodeKind::kObject) ? object_extents_[index] : sequence_extents_[index];
  if (known.state == PickleExtent::kInProgress || depth + known.height > kDeepestNesting) refuse_nesting();
  if (known.state == PickleExtent::kKnown) return known;
  known.state = PickleExtent::kInProgress;
  PickleExtent whole{.bytes = sizeof(Value)};
  const auto add_elements = [&](const std::vector<Node>& list) {
    for (Node element : list) add_to(whole, element, kBytesOfIndex, depth);
  };
  const auto add_items = [&](const std::vector<Node>& list) {
    for (size_t i = 0; i + 1 < list.size(); i += 2) {
      add_to(whole, list[i], 0, depth);
      add_to(whole, list[i + 1], key_bytes(list[i]), depth);
    }
  };
  if (is(node, NodeKind::kObject)) {
    whole.bytes += objects_[index].type->size();
    add_elements(objects_[index].arguments);
    add_items(objects_[index].entries);
  } else if (is(node, NodeKind::kDict)) {
    add_items(sequences_[index]);
  } else {
    add_elements(sequences_[index]);
  }
  whole.state = PickleExtent::kKnown;
  return known = whole;
}

}  // namespace lockstep::detail
