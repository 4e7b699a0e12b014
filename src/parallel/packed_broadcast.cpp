#include "parallel/packed_broadcast.h"

#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/torch_version.h>

#include "comm/coalesced.h"
#include "parallel/gradient_memory.h"

namespace lockstep {
namespace {

constexpr int64_t kMuch = 25 << 20;
constexpr int64_t kAlignBytes = 64;  // of every dtype

int64_t aligned(size_t bytes) {
  return (static_cast<int64_t>(bytes) + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
}

void copy(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  if (to[0].is_cuda()) return detail::copy_together(to, from);
  for (size_t i = 0; i < to.size(); ++i) write(to[i], from[i]);
}

}  // namespace

PackedBroadcast::PackedBroadcast(ProcessGroup group, std::vector<at::Tensor> tensors) : group_(std::move(group)) {
  for (auto& tensor : tensors)
    if (tensor.numel() > 0) tensors_.push_back(std::move(tensor));
  for (const auto& tensor : tensors_) bytes_ += aligned(tensor.nbytes());
}

void PackedBroadcast::run(int root) {
  if (tensors_.size() <= 1 || bytes_ > kMuch) return broadcast_coalesced(group_, tensors_, root);
  c10::NoGradGuard no_grad;
  if (!is_laid_out()) lay_out();
  if (group_.rank() == root) copy(inside_, outside_);
  group_.broadcast(memory_, root);
  if (group_.rank() != root) copy(outside_, inside_);
}

// Bytes are copied together where values of several dtypes would not be.
void PackedBroadcast::lay_out() {
  memory_ = group_.allocate({bytes_}, at::kByte).zero_();  // the gaps travel, too
  outside_.clear();
  inside_.clear();
  int64_t offset = 0;
  for (const auto& tensor : tensors_) {
    const auto place = memory_.narrow(0, offset, static_cast<int64_t>(tensor.nbytes()));
    const bool is_dense = tensor.is_contiguous();
    outside_.push_back(is_dense ? tensor.detach().view({-1}).view(at::kByte) : tensor.detach());
    inside_.push_back(is_dense ? place : place.view(tensor.scalar_type()).view(tensor.sizes()));
    offset += aligned(tensor.nbytes());
  }
}

/// A tensor may have been given other memory.
bool PackedBroadcast::is_laid_out() const {
  if (!memory_.defined()) return false;
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (tensors_[i].data_ptr() != outside_[i].data_ptr()) return false;
  return true;
}

}  // namespace lockstep
