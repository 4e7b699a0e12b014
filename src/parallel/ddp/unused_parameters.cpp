#include "parallel/ddp/unused_parameters.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/torch_version.h"

namespace lockstep {
namespace {

constexpr size_t kMaxPatterns = 8;

/// Whether the tensor's elements can be read and written through a float pointer.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat;
}

}  // namespace

void DeferredMarks::add(const at::Tensor& marks) {
  Copy copy;
  if (free_.empty()) {
    copy.memory = at::empty(marks.sizes(), marks.options().device(at::kCPU).pinned_memory(marks.is_cuda()));
    if (marks.is_cuda()) copy.arrival.emplace(marks.device().type());
  } else {
    copy = std::move(free_.back());
    free_.pop_back();
  }
  copy.memory.copy_(marks, /*non_blocking=*/true);
  if (copy.arrival) copy.arrival->record(c10::impl::VirtualGuardImpl(marks.device().type()).getStream(marks.device()));
  under_way_.push_back(std::move(copy));
}

at::Tensor DeferredMarks::take() {
  if (under_way_.empty()) return {};
  auto& arrival = under_way_.front().arrival;
  if (arrival && !arrival->query()) {
    if constexpr (detail::kMeasuresEvents)
      detail::synchronize(*arrival);
    else
      while (!arrival->query()) std::this_thread::yield();
  }
  free_.push_back(std::move(under_way_.front()));
  under_way_.pop_front();
  return free_.back().memory.to(at::kFloat);
}

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
  const auto converted = marks.to(place.options());
  bucket.put_extra(converted);
  if (written_.size() < kMaxPatterns) written_.emplace(pattern, converted);  // kept: a captured step may read it
}

void UnusedParameterBitmap::read_marks(const Bucket& bucket) {
  const auto& marks = bucket.extra();
  take(is_plain(marks) ? marks : marks.to(at::kCPU, at::kFloat));
}

void UnusedParameterBitmap::defer(const Bucket& bucket) {
  deferred_.add(bucket.extra());
  assume_equal_marks();
}

void UnusedParameterBitmap::assume_equal_marks() {
  std::fill(used_somewhere_.begin(), used_somewhere_.end(), 1);
  std::fill(unused_somewhere_.begin(), unused_somewhere_.end(), 0);
  std::fill(frozen_differs_.begin(), frozen_differs_.end(), 0);
}

bool UnusedParameterBitmap::read_deferred_marks() {
  const auto marks = deferred_.take();
  if (marks.defined()) take(marks);
  return marks.defined();
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

}  // namespace lockstep
