#include "parallel/bucket.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace lockstep {
namespace {

constexpr int64_t kAlignBytes = 64;  // a gradient begins on a cache line, so that vector loops need no special start

int64_t aligned(int64_t elements, int64_t element_bytes) {
  int64_t step = kAlignBytes / element_bytes;
  return (elements + step - 1) / step * step;
}

}  // namespace

Bucket::Bucket(const ProcessGroup& group, const std::vector<at::Tensor>& parameters, int64_t extra)
    : group_(group), missing_(parameters.size()) {
  c10::NoGradGuard no_grad;
  int64_t width = static_cast<int64_t>(parameters.front().element_size());
  int64_t total = extra;
  for (const auto& parameter : parameters) total += aligned(parameter.numel(), width);
  memory_ = group.allocate({total}, parameters.front().scalar_type()).zero_();  // the gaps take part in the reduction

  int64_t offset = 0;
  for (const auto& parameter : parameters) {
    auto part = memory_.narrow(0, offset, parameter.numel());
    bool dense = parameter.is_non_overlapping_and_dense();
    gradients_.push_back(
        (dense ? part.as_strided(parameter.sizes(), parameter.strides()) : part.view(parameter.sizes())).detach());
    offset += aligned(parameter.numel(), width);
  }
  extra_ = memory_.narrow(0, offset, extra);
}

void Bucket::start_average() {
  average_ = group_.all_reduce_async(memory_, ReduceOp::kAvg);
}

void Bucket::finish_average() {
  auto average = std::move(*average_);
  average_.reset();
  average.wait();
}

}  // namespace lockstep
