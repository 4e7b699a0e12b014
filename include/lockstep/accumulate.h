#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

/// The elements of a range in groups; the last group may be smaller. See in_groups().
template <class Range>
class Groups {
  using Iterator = decltype(std::begin(std::declval<Range&>()));
  using End = decltype(std::end(std::declval<Range&>()));

 public:
  using Group = std::vector<std::decay_t<decltype(*std::declval<Iterator&>())>>;

  Groups(Range range, int64_t count) : range_(std::forward<Range>(range)), count_(count) {
    if (count < 1)
      throw UsageError("in_groups: the groups have " + std::to_string(count) + " elements, expected 1 or more");
  }

  /// An input iterator: each group exists until the next one is taken.
  class iterator {
   public:
    iterator(Iterator at, End end, int64_t count) : at_(std::move(at)), end_(std::move(end)), count_(count) { take(); }
    Group& operator*() { return group_; }
    iterator& operator++() {
      take();
      return *this;
    }
    bool operator!=(std::default_sentinel_t) const { return !group_.empty(); }

   private:
    /// Does not ask the range for an element before it is needed: a loader would wait for it.
    void take() {
      group_.clear();
      while (static_cast<int64_t>(group_.size()) < count_) {
        if (std::exchange(is_behind_, true)) ++at_;
        if (!(at_ != end_)) {
          is_behind_ = false;
          return;
        }
        group_.push_back(*at_);
      }
    }
    Iterator at_;
    End end_;
    int64_t count_;
    Group group_;
    bool is_behind_ = false;  // at_ is the last element of group_
  };

  iterator begin() { return iterator(std::begin(range_), std::end(range_), count_); }
  std::default_sentinel_t end() const { return {}; }

 private:
  Range range_;
  int64_t count_;
};

/// Returns the elements of a range, for example of a data loader, in groups of `count`. The last group has the
/// remaining elements. Keeps a reference to a range that is passed as an lvalue. Throws UsageError unless `count` is 1
/// or more.
template <class Range>
Groups<Range> in_groups(Range&& range, int64_t count) {
  return Groups<Range>(std::forward<Range>(range), count);
}

namespace detail {

/// Gives every sample of an accumulation the same weight on all ranks: by weights of the gradients, or of the loss if
/// the model has SyncBatchNorm layers, which add up gradients of all ranks before they could be weighted.
class LOCKSTEP_EXPORT SampleWeight {
 public:
  /// `samples` is the number of samples of this rank. Collective.
  SampleWeight(DistributedDataParallelBase& ddp, int64_t samples);

  /// Whether each micro-batch is a collective call, also if it is empty on this rank.
  bool has_sync_batch_norm() const { return has_sync_batch_norm_; }
  /// Returns the loss to call backward on. The first call, after a forward, is collective.
  at::Tensor apply(const at::Tensor& loss);

 private:
  const ProcessGroup group_;
  const double samples_;
  const bool has_sync_batch_norm_;
  at::Tensor factor_;  // with SyncBatchNorm layers, after the first apply()
};

}  // namespace detail

/// Accumulates the gradients of several micro-batches, as one backward of all their samples would compute them:
///
///   for (auto& micro_batches : lockstep::in_groups(loader, 4)) {
///     optimizer.zero_grad();
///     lockstep::accumulate(ddp, micro_batches, [&](auto& batch) {
///       return F::cross_entropy(ddp(batch.data), batch.target);
///     });
///     optimizer.step();
///   }
///
/// `loss` returns the mean loss over the samples of a micro-batch. All backwards but the last run under no_sync().
/// Every sample has the same weight, on all ranks, though micro-batches differ in size and ranks have different numbers
/// of them: accumulate() calls ddp.set_batch_weight(), whose weight holds until the next call. `samples` returns the
/// number of samples in a batch, by default samples_in(). If the model has SyncBatchNorm layers, accumulate() scales
/// the losses instead, and all ranks must pass the same number of micro-batches, because the layers communicate.
///
/// Returns this rank's mean loss over its samples, without history; NaN on a rank without samples. Collective: each
/// rank passes at least one micro-batch, which may be empty; throws UsageError otherwise.
template <class Ddp, class Batches, class Loss, class Samples>
at::Tensor accumulate(Ddp& ddp, Batches& micro_batches, const Loss& loss, const Samples& samples) {
  using Batch = std::remove_reference_t<decltype(*std::begin(micro_batches))>;
  std::vector<Batch*> all, used;
  int64_t total = 0;
  for (auto& batch : micro_batches) {
    all.push_back(&batch);
    if (samples(batch) > 0) used.push_back(&batch);
    total += samples(batch);
  }
  if (all.empty())
    throw UsageError("accumulate: there is no micro-batch; pass at least one on every rank, which may be empty");
  detail::SampleWeight weight(ddp, total);
  if (weight.has_sync_batch_norm())
    used = all;
  else if (used.empty())
    used.push_back(all.back());

  at::Tensor mean;
  auto backward = [&](Batch& batch) {
    const double share = total > 0 ? static_cast<double>(samples(batch)) / static_cast<double>(total) : 1;
    const at::Tensor part = loss(batch) * share;
    weight.apply(part).backward();
    if (samples(batch) == 0 && total > 0) return;  // its mean loss is NaN
    mean = mean.defined() ? mean + part.detach() : part.detach();
  };
  for (size_t i = 0; i + 1 < used.size(); ++i) {
    auto guard = ddp.no_sync();
    backward(*used[i]);
  }
  backward(*used.back());
  return mean;
}

template <class Ddp, class Batches, class Loss>
at::Tensor accumulate(Ddp& ddp, Batches& micro_batches, const Loss& loss) {
  return accumulate(ddp, micro_batches, loss, []<class Batch>(const Batch& batch) {
    static_assert(
        TensorsIn<Batch>::kAny || requires { batch.data.size(0); },
        "accumulate: pass a function that returns the number of samples of a batch as the last argument");
    return samples_in(batch);
  });
}

}  // namespace lockstep
