#include "checkpoint/stored_tensors.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include <ATen/ATen.h>

namespace lockstep::detail {
namespace {

/// The elements from a tensor's first to its last in memory.
int64_t span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return last + 1;
}

/// Creates one storage for overlapping tensors of one storage and dtype, and assigns it to them.
void store_overlapping(std::vector<StoredTensor*>& cluster, std::vector<at::Tensor>& storages) {
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  if (cluster.size() == 1) {  // nothing is shared: save no unused elements
    auto& tensor = cluster[0]->tensor;
    if (tensor.numel() < span_of(tensor)) tensor = tensor.contiguous();
  }
  for (const auto* placed : cluster) {
    begin = std::min(begin, placed->tensor.storage_offset());
    end = std::max(end, placed->tensor.storage_offset() + span_of(placed->tensor));
  }
  const auto& first = cluster[0]->tensor;
  for (auto* placed : cluster) {
    placed->storage = storages.size();
    placed->offset = placed->tensor.storage_offset() - begin;
  }
  storages.push_back(at::empty({0}, first.options()).set_(first.storage(), begin, {end - begin}, {1}));
}

/// Assigns a storage to each tensor.
std::vector<at::Tensor> make_storages(std::vector<StoredTensor>& tensors) {
  std::vector<at::Tensor> storages;
  std::map<std::pair<const c10::StorageImpl*, at::ScalarType>, std::vector<StoredTensor*>> by_storage;
  std::vector<std::vector<StoredTensor*>*> order;
  for (auto& placed : tensors) {
    auto& same_storage = by_storage[{placed.tensor.storage().unsafeGetStorageImpl(), placed.tensor.scalar_type()}];
    if (same_storage.empty()) order.push_back(&same_storage);
    same_storage.push_back(&placed);
  }
  for (auto* same_storage : order) {
    const auto begin_of = [](const StoredTensor* placed) { return placed->tensor.storage_offset(); };
    std::stable_sort(same_storage->begin(), same_storage->end(),
                     [&](const StoredTensor* a, const StoredTensor* b) { return begin_of(a) < begin_of(b); });
    std::vector<StoredTensor*> cluster;
    int64_t end = 0;
    for (auto* placed : *same_storage) {
      if (!cluster.empty() && begin_of(placed) >= end) {
        store_overlapping(cluster, storages);
        cluster.clear();
      }
      if (cluster.empty()) end = begin_of(placed);
      end = std::max(end, begin_of(placed) + span_of(placed->tensor));
      cluster.push_back(placed);
    }
    store_overlapping(cluster, storages);
  }
  return storages;
}

}  // namespace

StoredTensors store_tensors(const Value& value) {
  StoredTensors stored;
  for_each_tensor(value, [&](const Value& leaf) {
    stored.tensors.push_back({leaf.tensor().detach().resolve_conj().resolve_neg()});
  });
  stored.storages = make_storages(stored.tensors);
  return stored;
}

}  // namespace lockstep::detail
