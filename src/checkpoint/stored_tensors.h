#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/value.h>

// How the tensors of a value are divided into storages, as a checkpoint file or a snapshot has them.

namespace lockstep::detail {

struct StoredTensor {
  at::Tensor tensor;
  size_t storage = 0;
  int64_t offset = 0;  // in elements of the storage
};

/// Each storage is a one-dimensional contiguous tensor on any device. Tensors that overlap in memory share a storage;
/// every other tensor has its own storage without unused elements.
struct StoredTensors {
  std::vector<StoredTensor> tensors;  // in the order of for_each_tensor()
  std::vector<at::Tensor> storages;
};

StoredTensors store_tensors(const Value& value);

/// Calls visit(value) for each tensor in a value, which may be const.
template <class AnyValue, class Visit>
void for_each_tensor(AnyValue& value, const Visit& visit) {
  switch (value.kind()) {
    case Value::Kind::kTensor:
      visit(value);
      break;
    case Value::Kind::kList:
    case Value::Kind::kTuple:
    case Value::Kind::kSet:
      for (auto& element : value.elements()) for_each_tensor(element, visit);
      break;
    case Value::Kind::kDict:
      for (auto& [key, item] : value.items()) {
        for_each_tensor(key, visit);
        for_each_tensor(item, visit);
      }
      break;
    default:
      break;
  }
}

}  // namespace lockstep::detail
