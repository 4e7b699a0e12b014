#include "parallel/ddp/packed_broadcast.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "base/align.h"
#include "comm/dense.h"
#include "comm/torch_version.h"

#include "parallel/ddp/bucket.h"

namespace lockstep {
namespace {

constexpr int64_t kMuch = 25 << 20;      // bytes
constexpr int64_t kPackAlignBytes = 64;  // sufficient for every dtype

int64_t aligned_bytes(const at::Tensor& tensor) {
  return align_up(static_cast<int64_t>(tensor.nbytes()), kPackAlignBytes);
}

void copy_in(const std::vector<at::Tensor>& inside, const std::vector<at::Tensor>& outside) {
  if (inside[0].is_cuda()) return detail::copy_together(inside, outside);
  for (size_t i = 0; i < inside.size(); ++i) write(inside[i], outside[i]);
}

/// Uses LibTorch's copies, so that autograd notices the change of each tensor.
void copy_out(const std::vector<at::Tensor>& outside, const std::vector<at::Tensor>& inside) {
  if (inside[0].is_cuda()) return detail::copy_together(outside, inside);
  for (size_t i = 0; i < inside.size(); ++i) outside[i].copy_(inside[i]);
}

/// The bytes of a contiguous tensor. A tensor with one element is contiguous with any strides, which view() of another
/// dtype would refuse.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace

void PackedBroadcast::run(int root) {
  if (tensors_.empty()) return;
  c10::NoGradGuard no_grad;
  if (!is_laid_out()) lay_out();
  if (!memory_.defined()) return group_.broadcast_coalesced(tensors_, root);
  if (group_.rank() == root) copy_in(inside_, outside_);
  group_.broadcast(memory_, root, {.site = {"forward of DistributedDataParallel, for its buffers", 0}});
  if (group_.rank() != root) copy_out(outside_, inside_);
}

bool PackedBroadcast::is_laid_out() const {
  return std::equal(
      tensors_.begin(), tensors_.end(), seen_.begin(), seen_.end(), [](const auto& now, const auto& then) {
        return now.layout() == c10::kStrided && now.scalar_type() == then.scalar_type() && same_memory(now, then);
      });
}

// Contiguous tensors are viewed as bytes: on a GPU, values of several dtypes would not be copied together.
void PackedBroadcast::lay_out() {
  seen_.clear();
  outside_.clear();
  inside_.clear();
  memory_.reset();
  for (const auto& tensor : tensors_) seen_.push_back(tensor.detach());
  int64_t bytes = 0;
  for (const auto& tensor : seen_) {
    if (tensor.layout() != c10::kStrided) return;
    bytes += aligned_bytes(tensor);
  }
  if (bytes == 0 || bytes > kMuch) return;

  memory_ = group_.allocate({bytes}, at::kByte).zero_();  // the padding is sent as well
  int64_t offset = 0;
  for (const auto& tensor : seen_) {
    if (tensor.numel() == 0) continue;
    const auto place = memory_.narrow(0, offset, static_cast<int64_t>(tensor.nbytes()));
    const bool is_dense = tensor.is_contiguous() && !detail::is_lazy(tensor);
    outside_.push_back(is_dense ? bytes_of(tensor) : tensor);
    inside_.push_back(is_dense ? place : place.view(tensor.scalar_type()).view(tensor.sizes()));
    offset += aligned_bytes(tensor);
  }
}

}  // namespace lockstep
