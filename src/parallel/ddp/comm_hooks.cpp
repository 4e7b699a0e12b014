#include <lockstep/comm_hook.h>

#include <map>
#include <memory>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "parallel/ddp/averaging_hook.h"

namespace lockstep {
namespace {

/// Averages the bucket in `dtype`. The converted buffer of each bucket is kept and reused.
CommHook compress(at::ScalarType dtype) {
  auto narrow = std::make_shared<std::map<size_t, at::Tensor>>();  // by bucket
  return AveragingHook{[=](const GradientBucket& bucket, const ProcessGroup& group) -> FinishReduction {
    c10::NoGradGuard no_grad;
    auto& sent = (*narrow)[bucket.index];
    if (!sent.defined() || sent.sizes() != bucket.buffer.sizes()) sent = group.allocate(bucket.buffer.sizes(), dtype);
    sent.copy_(bucket.buffer);
    return [buffer = bucket.buffer, sent, work = group.all_reduce_async(sent, ReduceOp::kAvg)] {
      work.wait();
      c10::NoGradGuard no_grad;
      buffer.copy_(sent);
    };
  }};
}

}  // namespace

CommHook all_reduce_hook() {
  return AveragingHook{[](const GradientBucket& bucket, const ProcessGroup& group) -> FinishReduction {
    return [work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg)] { work.wait(); };
  }};
}

CommHook fp16_compress() {
  return compress(at::kHalf);
}

CommHook bf16_compress() {
  return compress(at::kBFloat16);
}

CommHook no_op_hook() {
  return [](const GradientBucket&, const ProcessGroup&) -> FinishReduction { return [] {}; };
}

}  // namespace lockstep
