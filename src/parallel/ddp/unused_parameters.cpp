#include "parallel/ddp/unused_parameters.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/capture.h"

namespace lockstep {
namespace {

constexpr size_t kMostPatterns = 8;
constexpr int64_t kLookEvery = 8;  // reading the marks costs a copy and an event, which matters in short steps

/// Whether the tensor's elements can be read and written through a float pointer.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat;
}

}  // namespace

UnusedParameterBitmap::UnusedParameterBitmap(size_t parameters)
    : used_somewhere_(parameters, 1), unused_somewhere_(parameters, 0), frozen_differs_(parameters, 0) {}

void UnusedParameterBitmap::write(Bucket& bucket, const std::vector<char>& used, const std::vector<char>& frozen,
                                  bool is_finite, bool is_static_graph) {
  const auto& place = bucket.extra();
  Pattern pattern;
  if (!is_plain(place)) {
    pattern = {used, frozen, is_finite, is_static_graph};
    if (const auto known = written_.find(pattern); known != written_.end()) return bucket.put_extra(known->second);
  }
  const auto marks = is_plain(place) ? place : at::empty(place.sizes(), at::kFloat);
  float* mark = marks.data_ptr<float>();
  const size_t count = used.size();
  for (size_t i = 0; i < count; ++i) {
    mark[i] = used[i] ? 1 : 0;
    mark[count + i] = used[i] || frozen[i] ? 0 : 1;
    mark[2 * count + i] = frozen[i] ? 1 : 0;
  }
  mark[3 * count] = is_finite ? 0 : 1;
  mark[3 * count + 1] = is_static_graph ? 1 : 0;
  mark[3 * count + 2] = is_static_graph ? 0 : 1;
  if (is_plain(place)) return;
  const auto there = marks.to(place.options());
  bucket.put_extra(there);
  if (written_.size() < kMostPatterns) written_.emplace(pattern, there);  // kept: a captured step may read it
}

void UnusedParameterBitmap::learn(const Bucket& bucket, bool now) {
  const auto& marks = bucket.extra();
  if (marks.is_cuda() && !now) return learn_later(marks);
  arrival_.reset();
  take(is_plain(marks) ? marks : marks.to(at::kCPU, at::kFloat));
}

void UnusedParameterBitmap::take(const at::Tensor& marks) {
  const float* mark = marks.data_ptr<float>();
  const size_t count = used_somewhere_.size();
  for (size_t i = 0; i < count; ++i) {
    used_somewhere_[i] = mark[i] > 0;
    unused_somewhere_[i] = mark[count + i] > 0;
    frozen_differs_[i] = mark[2 * count + i] > 0 && (used_somewhere_[i] || unused_somewhere_[i]);
  }
  is_not_finite_somewhere_ = mark[3 * count] > 0;
  static_graph_differs_ = mark[3 * count + 1] > 0 && mark[3 * count + 2] > 0;
}

// At most one copy of marks is pending at a time. No copy is made during capture, because replays do not run this code.
void UnusedParameterBitmap::learn_later(const at::Tensor& marks) {
  std::fill(used_somewhere_.begin(), used_somewhere_.end(), 1);  // this rank used all that it had not frozen
  std::fill(unused_somewhere_.begin(), unused_somewhere_.end(), 0);
  std::fill(frozen_differs_.begin(), frozen_differs_.end(), 0);
  if (reductions_++ % kLookEvery != 0 || detail::is_capturing(marks.device())) return;
  if (arrival_) {
    if (!arrival_->query()) return;
    take(arriving_.to(at::kFloat));
    std::fill(used_somewhere_.begin(), used_somewhere_.end(), 1);  // those marks are of an earlier reduction
  }
  if (!arriving_.defined()) arriving_ = at::empty(marks.sizes(), marks.options().device(at::kCPU).pinned_memory(true));
  arriving_.copy_(marks, /*non_blocking=*/true);
  arrival_.emplace(marks.device().type());
  arrival_->record(c10::impl::VirtualGuardImpl(marks.device().type()).getStream(marks.device()));
}

}  // namespace lockstep
