#include "parallel/batch_weight.h"

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

BatchWeight::BatchWeight(ProcessGroup group) : group_(std::move(group)), sum_(group_.size()) {}

void BatchWeight::choose(double samples) {
  if (!(samples > 0) || !std::isfinite(samples))
    throw UsageError(text("rank ", group_.rank(), ": the weight of a batch is ", samples,
                          "; it must be above 0: give the number of its samples"));
  samples_ = samples;
}

void BatchWeight::add_up() {
  adding_ = at::full({1}, samples_, at::TensorOptions().dtype(at::kDouble).device(group_.device()));
  work_ = group_.all_reduce_async(adding_);
}

void BatchWeight::reset() {
  samples_ = 1;
  sum_ = group_.size();
}

double BatchWeight::factor() {
  if (work_) {
    work_->wait();
    work_.reset();
    sum_ = adding_.item<double>();
  }
  return samples_ * group_.size() / sum_;
}

}  // namespace lockstep
