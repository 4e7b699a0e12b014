#include "parallel/ddp/power_sgd.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/mix_bits.h"
#include "base/text.h"
#include "parallel/ddp/averaging_hook.h"

// Overview of one reduction. A bucket has two rounds:
//
// 1. p = gradient * q for each matrix; all p are averaged, together with the uncompressed gradients.
// 2. p is made orthonormal; q = gradient^T * p; all q are averaged. The result is p * q^T.
//
// The second round of a bucket depends on the result of the first. It starts when the next bucket is full, or at the
// end of backward, so both rounds of all buckets but the last overlap with backward. A callback at the end of the first
// round (Work::on_done) would start it earlier, but on another thread: the ranks would then make the calls of two
// buckets in different orders. The first round is normally done by then, because a whole bucket of gradients was
// computed in the meantime; if it is not, backward blocks until it is.
//
// An overflow must not reach the state, which would keep it forever. An infinite or NaN gradient of one rank makes the
// averaged p infinite or NaN, and averages are equal on all ranks. So all ranks see every overflow without a further
// call: decide() checks the averages of all buckets before the first bucket changes its state. A norm that float32
// cannot hold counts as an overflow, because the next product might exceed float32.

namespace lockstep::detail {
namespace {

/// Factors are computed in float32 or wider: LibTorch multiplies half-precision matrices on few processors only.
at::ScalarType factor_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor as_real(const at::Tensor& gradient) {
  return gradient.is_complex() ? at::view_as_real(gradient) : gradient;
}

/// Returns all elements of a gradient of any layout as a flat view of the bucket.
at::Tensor flat(const at::Tensor& gradient) {
  return gradient.as_strided({gradient.numel()}, {1});
}

/// Makes the columns orthonormal, zero columns included. Otherwise a gradient that is zero once would stay zero in all
/// later steps.
void orthonormalize(const at::Tensor& matrix) {
  matrix.copy_(std::get<0>(at::linalg_qr(matrix)));
}

/// Whether the sum of the squares is finite: a bool without dimensions, on the tensor's device.
at::Tensor has_finite_norm(const at::Tensor& contiguous) {
  const auto elements = contiguous.view({-1}).to(factor_dtype(contiguous.scalar_type()));
  return at::isfinite(at::dot(elements, elements));
}

// The next two functions change a tensor if the condition holds. On a GPU the host does not wait for the condition.

void fill_if(const at::Tensor& condition, const at::Tensor& tensor, double value) {
  if (!condition.is_cpu())
    tensor.masked_fill_(condition, value);
  else if (condition.item<bool>())
    tensor.fill_(value);
}

/// Sets `to`, which may be undefined, to a copy of `from`.
void copy_if(const at::Tensor& condition, at::Tensor& to, const at::Tensor& from) {
  if (condition.is_cpu() && !condition.item<bool>()) return;
  if (!to.defined()) to = at::zeros_like(from);
  to.copy_(condition.is_cpu() ? from : at::where(condition, from, to));
}

}  // namespace

FinishReduction PowerSgd::start(const GradientBucket& bucket, const ProcessGroup& group) {
  c10::NoGradGuard no_grad;
  if (bucket.index == 0) {  // entries that are left are from a backward that failed
    in_first_round_ = nullptr;
    undecided_.clear();
  }
  start_second_round(group);
  auto& state = state_of(bucket);
  if (state.reductions++ < options_.start_iteration)
    return [work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg)] { work.wait(); };

  if (!state.is_planned) plan(state, bucket, group);
  enter(state, bucket);
  for (const auto& matrix : state.matrices) {
    at::Tensor p = matrix.p;
    at::mm_out(p, matrix.gradient.to(p.scalar_type()), matrix.q);
  }
  state.works.clear();
  for (const auto& sent : state.first_round) state.works.push_back(group.all_reduce_async(sent, ReduceOp::kAvg));
  in_first_round_ = &state;
  undecided_.push_back(&state);
  return [this, &state, group] {
    c10::NoGradGuard guard;
    start_second_round(group);  // of the last bucket, before this thread blocks
    decide();
    finish(state);
  };
}

PowerSgd::Approximation& PowerSgd::state_of(const GradientBucket& bucket) {
  if (bucket.plan != plan_) {
    reductions_ = reductions();
    buckets_.clear();
    plan_ = bucket.plan;
  }
  auto& state = buckets_[bucket.index];
  state.reductions = std::max(state.reductions, reductions_);
  return state;
}

int64_t PowerSgd::reductions() const {
  int64_t most = reductions_;
  for (const auto& [index, state] : buckets_) most = std::max(most, state.reductions);
  return most;
}

void PowerSgd::plan(Approximation& state, const GradientBucket& bucket, const ProcessGroup& group) {
  state.parameters = bucket.parameters.size();
  if (bucket.names.size() != state.parameters)
    throw UsageError(group.rank(), text("power_sgd: the bucket has ", bucket.names.size(), " names of ",
                                        state.parameters, " parameters; pass the bucket that the hook got"));
  int64_t p_elements = 0, q_elements = 0, uncompressed_elements = 0;
  for (size_t slot = 0; slot < bucket.gradients.size(); ++slot) {
    const auto gradient = as_real(bucket.gradients[slot]);
    const bool is_matrix = slot < state.parameters && gradient.dim() > 1 && gradient.is_contiguous();
    const int64_t n = is_matrix ? gradient.size(0) : 1, m = is_matrix ? gradient.numel() / std::max<int64_t>(n, 1) : 1;
    const auto rank = std::min({options_.rank, n, m});
    if (!is_matrix ||
        static_cast<double>(rank * (n + m)) * options_.min_compression_rate > static_cast<double>(gradient.numel())) {
      state.uncompressed_slots.push_back(slot);
      uncompressed_elements += gradient.numel();
      continue;
    }
    state.matrices.push_back({slot, bucket.names[slot], n, m, rank, nullptr, {}, {}, {}});
    p_elements += n * rank;
    q_elements += m * rank;
  }
  state.qs = group.allocate({q_elements}, factor_dtype(bucket.buffer.scalar_type()));
  allocate_first_round(state, bucket.buffer.scalar_type(), p_elements, uncompressed_elements, group);
  int64_t p_at = 0, q_at = 0;
  for (auto& matrix : state.matrices) {
    matrix.p = state.ps.narrow(0, p_at, matrix.n * matrix.rank).view({matrix.n, matrix.rank});
    matrix.q = state.qs.narrow(0, q_at, matrix.m * matrix.rank).view({matrix.m, matrix.rank});
    p_at += matrix.p.numel();
    q_at += matrix.q.numel();
    matrix.memory = &find_memory(matrix, bucket.buffer, group);
  }
  if (bucket.is_last) check_all_loaded_used(group);
  state.is_planned = true;
}

void PowerSgd::allocate_first_round(Approximation& state, at::ScalarType dtype, int64_t p_elements,
                                    int64_t uncompressed_elements, const ProcessGroup& group) {
  if (factor_dtype(dtype) == dtype) {
    state.first_round = {group.allocate({p_elements + uncompressed_elements}, dtype)};
    state.ps = state.first_round[0].narrow(0, 0, p_elements);
    state.uncompressed = state.first_round[0].narrow(0, p_elements, uncompressed_elements);
    return;
  }
  state.ps = group.allocate({p_elements}, factor_dtype(dtype));
  state.uncompressed = group.allocate({uncompressed_elements}, dtype);
  if (p_elements > 0) state.first_round.push_back(state.ps);
  if (uncompressed_elements > 0) state.first_round.push_back(state.uncompressed);
}

/// Sets the views of the bucket's gradients, adds the errors, and prepares the first product. The bucket may have moved
/// since the last reduction.
void PowerSgd::enter(Approximation& state, const GradientBucket& bucket) {
  state.uncompressed_in_bucket.clear();
  for (size_t slot : state.uncompressed_slots)
    state.uncompressed_in_bucket.push_back(flat(as_real(bucket.gradients[slot])));
  if (!state.uncompressed_in_bucket.empty()) at::cat_out(state.uncompressed, state.uncompressed_in_bucket);
  for (auto& matrix : state.matrices) {
    matrix.gradient = as_real(bucket.gradients[matrix.slot]).view({matrix.n, matrix.m});
    if (matrix.memory->error.defined()) matrix.gradient.add_(matrix.memory->error);
    if (options_.warm_start && !matrix.memory->factor.defined())
      matrix.memory->factor = random_factor(matrix, 0).to(matrix.q.device());
    matrix.q.copy_(options_.warm_start ? matrix.memory->factor : random_factor(matrix, state.reductions));
    orthonormalize(matrix.q);
  }
}

/// Returns random numbers that are equal on every rank. They depend on the parameter, not on its bucket: the buckets of
/// a resumed run are those of its own first backward.
at::Tensor PowerSgd::random_factor(const Matrix& matrix, int64_t reduction) const {
  uint64_t seed = mix_bits(options_.seed + static_cast<uint64_t>(reduction));
  for (const char letter : matrix.name) seed = mix_bits(seed ^ static_cast<uint8_t>(letter));
  return at::randn(matrix.q.sizes(), at::detail::createCPUGenerator(seed), matrix.q.scalar_type());
}

/// Starts the second round of the bucket whose first round has started last, if it has not started yet.
void PowerSgd::start_second_round(const ProcessGroup& group) {
  auto* state = std::exchange(in_first_round_, nullptr);
  if (!state) return;
  for (const auto& work : std::exchange(state->works, {})) work.wait();
  state->is_finite = has_finite_norm(state->ps).logical_and_(at::isfinite(state->uncompressed).all());
  if (state->matrices.empty()) return;
  for (const auto& matrix : state->matrices) {
    orthonormalize(matrix.p);
    at::Tensor q = matrix.q;
    at::mm_out(q, matrix.gradient.to(q.scalar_type()).t(), matrix.p);
  }
  state->works.push_back(group.all_reduce_async(state->qs, ReduceOp::kAvg));
}

/// Waits for the second rounds of all buckets, and finds out whether one of them has an overflow.
void PowerSgd::decide() {
  if (undecided_.empty()) return;
  std::vector<at::Tensor> finite;
  for (auto* state : undecided_) {
    for (const auto& work : std::exchange(state->works, {})) work.wait();
    finite.push_back(state->is_finite.logical_and_(has_finite_norm(state->qs)));
  }
  is_finite_ = at::stack(finite).all();
  undecided_.clear();
}

void PowerSgd::finish(Approximation& state) const {
  const auto has_overflow = is_finite_.logical_not();
  for (auto& matrix : state.matrices) {
    const auto gradient = std::exchange(matrix.gradient, at::Tensor());
    const auto approximation = at::mm(matrix.p, matrix.q.t()).to(gradient.scalar_type());
    if (options_.use_error_feedback) {
      gradient.sub_(approximation);
      fill_if(has_finite_norm(gradient).logical_not_(), gradient, 0);
      copy_if(is_finite_, matrix.memory->error, gradient);
    }
    if (options_.warm_start) copy_if(is_finite_, matrix.memory->factor, matrix.q);
    gradient.copy_(approximation);
    fill_if(has_overflow, gradient, std::numeric_limits<double>::quiet_NaN());
  }
  int64_t at = 0;
  const auto views = std::exchange(state.uncompressed_in_bucket, {});
  for (size_t i = 0; i < views.size(); ++i) {
    views[i].copy_(state.uncompressed.narrow(0, at, views[i].numel()));
    if (state.uncompressed_slots[i] < state.parameters)
      fill_if(has_overflow, views[i], std::numeric_limits<double>::quiet_NaN());
    at += views[i].numel();
  }
}

}  // namespace lockstep::detail
