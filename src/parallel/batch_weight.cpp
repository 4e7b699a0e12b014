#include "parallel/batch_weight.h"

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

BatchWeight::BatchWeight(ProcessGroup group) : group_(std::move(group)), sum_(group_.size()) {}

void BatchWeight::check(double samples) const {
  if (!(samples > 0) || !std::isfinite(samples))
    throw UsageError(text("rank ", group_.rank(), ": the weight of a batch is ", samples,
                          "; it must be above 0: give the number of its samples"));
}

void BatchWeight::set(double samples) {
  check(samples);
  is_set_ = true;
  samples_ = samples;
  adding_ = at::full({1}, samples_, at::TensorOptions().dtype(at::kDouble).device(group_.device()));
  work_ = group_.all_reduce_async(adding_);
}

void BatchWeight::set_in_join(double samples) {
  check(samples);
  in_join_ = samples;
}

void BatchWeight::leave_join() {
  in_join_.reset();
  round_.reset();
}

double BatchWeight::factor() {
  if (round_) return round_->samples * group_.size() / round_->sum;
  if (work_) {
    work_->wait();
    work_.reset();
    sum_ = adding_.item<double>();
  }
  return samples_ * group_.size() / sum_;
}

}  // namespace lockstep
