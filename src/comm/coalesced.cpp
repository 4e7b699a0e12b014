#include "comm/coalesced.h"

#include <map>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace lockstep {
namespace {

constexpr int64_t kCoalesceBytes = 25 << 20;

void broadcast_chunk(const ProcessGroup& group, const std::vector<at::Tensor>& tensors, int root) {
  if (tensors.size() == 1) return group.broadcast(tensors[0], root);
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.detach().reshape({-1}));
  auto chunk = at::cat(flat);
  group.broadcast(chunk, root);
  if (group.rank() == root) return;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    tensor.detach().copy_(chunk.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

}  // namespace

void broadcast_coalesced(const ProcessGroup& group, const std::vector<at::Tensor>& tensors, int root) {
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const auto& tensor : tensors)
    if (tensor.numel() > 0) by_dtype[tensor.scalar_type()].push_back(tensor);
  for (const auto& [dtype, alike] : by_dtype) {
    std::vector<at::Tensor> chunk;
    int64_t bytes = 0;
    for (const auto& tensor : alike) {
      int64_t more = static_cast<int64_t>(tensor.nbytes());
      if (!chunk.empty() && bytes + more > kCoalesceBytes) {
        broadcast_chunk(group, chunk, root);
        chunk.clear();
        bytes = 0;
      }
      chunk.push_back(tensor);
      bytes += more;
    }
    broadcast_chunk(group, chunk, root);
  }
}

}  // namespace lockstep
