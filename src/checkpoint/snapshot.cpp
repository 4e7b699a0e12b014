#include "checkpoint/snapshot.h"

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "checkpoint/pickle.h"
#include "checkpoint/stored_tensors.h"

namespace lockstep::detail {
namespace {

/// All bytes of a buffer as elements of a dtype.
at::Tensor typed(const at::Tensor& bytes, at::ScalarType dtype) {
  const auto elements = bytes.numel() / static_cast<int64_t>(c10::elementSize(dtype));
  return at::empty({0}, bytes.options().dtype(dtype)).set_(bytes.storage(), 0, {elements}, {1});
}

}  // namespace

Value Snapshot::take(const Value& value) {
  check_can_be_saved(value);
  const auto stored = store_tensors(value);
  buffers_.resize(stored.storages.size());
  std::vector<c10::Device> gpus;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const auto& from = stored.storages[i];
    auto& to = buffers_[i];
    const auto size = static_cast<int64_t>(from.nbytes());
    const bool is_on_gpu = from.is_cuda();
    if (!to.defined() || to.numel() != size || to.is_pinned() != (is_on_gpu && size > 0))
      to = at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(is_on_gpu));
    typed(to, from.scalar_type()).copy_(from, /*non_blocking=*/is_on_gpu);
    if (is_on_gpu && std::find(gpus.begin(), gpus.end(), from.device()) == gpus.end()) gpus.push_back(from.device());
  }
  for (const auto& gpu : gpus) {
    const c10::impl::VirtualGuardImpl guard(gpu.type());
    guard.getStream(gpu).synchronize();
  }
  auto copy = value;
  size_t next = 0;
  for_each_tensor(copy, [&](Value& leaf) {
    const auto& [tensor, storage, offset] = stored.tensors[next++];
    leaf = typed(buffers_[storage], tensor.scalar_type()).as_strided(tensor.sizes(), tensor.strides(), offset);
  });
  return copy;
}

}  // namespace lockstep::detail
