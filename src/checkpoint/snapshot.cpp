#include "checkpoint/snapshot.h"

#include <algorithm>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "checkpoint/pickle.h"

namespace lockstep::detail {
namespace {

at::Tensor typed(const at::Tensor& bytes, const at::Tensor& like) {
  return at::empty({0}, bytes.options().dtype(like.scalar_type())).set_(bytes.storage(), 0, {like.numel()}, {1});
}

}  // namespace

Value Snapshot::take(const Value& value) {
  const auto pickled = write_pickle(value);
  buffers_.resize(pickled.storages.size());
  std::vector<c10::Device> gpus;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const auto& from = pickled.storages[i];
    auto& to = buffers_[i];
    const auto size = static_cast<int64_t>(from.nbytes());
    const bool is_on_gpu = from.is_cuda();
    if (!to.defined() || to.numel() != size || to.is_pinned() != (is_on_gpu && size > 0))
      to = at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(is_on_gpu));
    typed(to, from).copy_(from, /*non_blocking=*/is_on_gpu);
    if (is_on_gpu && std::find(gpus.begin(), gpus.end(), from.device()) == gpus.end()) gpus.push_back(from.device());
  }
  for (const auto& gpu : gpus) {
    const c10::impl::VirtualGuardImpl guard(gpu.type());
    guard.getStream(gpu).synchronize();
  }
  return PickleReader(pickled.bytes).value([&](const StorageClaim& claim) { return buffers_[std::stoul(claim.key)]; });
}

}  // namespace lockstep::detail
