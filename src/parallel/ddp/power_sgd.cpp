#include <lockstep/comm_hook.h>

#include <map>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

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

namespace lockstep {
namespace {

/// A gradient, viewed as a matrix that is approximated by p * q^T.
struct Matrix {
  at::Tensor gradient;  // n x m, a view of the bucket
  at::Tensor p;         // n x rank, a view of ps
  at::Tensor q;         // m x rank, a view of qs
};

/// State of one bucket. The factors p of all its matrices are contiguous, and so are the factors q. The uncompressed
/// gradients follow the factors p if they have the same dtype, so each round needs only one all-reduce.
struct Approximation {
  at::Tensor buffer;  // the bucket's buffer
  std::vector<Matrix> matrices;
  std::vector<at::Tensor> whole;          // uncompressed gradients, flat
  at::Tensor ps, qs, wholes;              // allocated by the group
  std::vector<at::Tensor> first_round{};  // ps and wholes, in one tensor or in two
  at::Tensor error;                       // the approximation error of the last step
  int64_t reductions = 0;
  std::vector<Work> works{};  // of the round that has started last
};

/// Factors are computed in float32 or wider: LibTorch multiplies half-precision matrices on few processors only.
at::ScalarType factor_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// Makes the columns orthonormal, zero columns included. Otherwise a gradient that is zero once would stay zero in all
/// later steps.
void orthonormalize(const at::Tensor& matrix) {
  matrix.copy_(std::get<0>(at::linalg_qr(matrix)));
}

class PowerSgd {
 public:
  explicit PowerSgd(const PowerSgdOptions& options) : options_(options) {}

  FinishReduction start(const GradientBucket& bucket, const ProcessGroup& group) {
    c10::NoGradGuard no_grad;
    if (bucket.index == 0) in_first_round_ = nullptr;  // left from a backward that failed
    start_second_round(group);
    auto& state = states_[bucket.index];
    if (!state.buffer.is_same(bucket.buffer)) state = plan(bucket, group, state.reductions);
    if (state.reductions++ < options_.start_iteration)
      return [work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg)] { work.wait(); };

    if (options_.use_error_feedback) {
      if (state.error.defined()) bucket.buffer.add_(state.error);
      state.error = bucket.buffer.clone();
    }
    if (!state.whole.empty()) at::cat_out(state.wholes, state.whole);
    for (auto& matrix : state.matrices) {
      orthonormalize(matrix.q);
      at::Tensor p = matrix.p;
      at::mm_out(p, matrix.gradient.to(p.scalar_type()), matrix.q);
    }
    state.works.clear();
    for (const auto& sent : state.first_round) state.works.push_back(group.all_reduce_async(sent, ReduceOp::kAvg));
    in_first_round_ = &state;
    return [this, &state, group] {
      c10::NoGradGuard guard;
      start_second_round(group);  // of the last bucket, before this thread blocks
      finish(state);
    };
  }

 private:
  Approximation plan(const GradientBucket& bucket, const ProcessGroup& group, int64_t reductions) const {
    Approximation state;
    state.buffer = bucket.buffer;
    state.reductions = reductions;
    int64_t p_elements = 0, q_elements = 0, whole_elements = 0;
    for (const auto& each : bucket.gradients) {
      const auto gradient = each.is_complex() ? at::view_as_real(each) : each;
      const bool is_matrix = gradient.dim() > 1 && gradient.is_contiguous();
      const int64_t n = is_matrix ? gradient.size(0) : 1,
                    m = is_matrix ? gradient.numel() / std::max<int64_t>(n, 1) : 1;
      const auto rank = std::min({options_.rank, n, m});
      if (!is_matrix ||
          static_cast<double>(rank * (n + m)) * options_.min_compression_rate > static_cast<double>(gradient.numel())) {
        state.whole.push_back(flat(gradient));
        whole_elements += gradient.numel();
        continue;
      }
      state.matrices.push_back({gradient.view({n, m}), at::empty({n, rank}), at::empty({m, rank})});
      p_elements += n * rank;
      q_elements += m * rank;
    }
    const auto dtype = factor_dtype(bucket.buffer.scalar_type());
    state.qs = group.allocate({q_elements}, dtype);
    fill(state.qs, bucket.index);
    allocate_first_round(state, p_elements, whole_elements, group);
    int64_t p_at = 0, q_at = 0;
    for (auto& matrix : state.matrices) {
      matrix.p = state.ps.narrow(0, p_at, matrix.p.numel()).view(matrix.p.sizes());
      matrix.q = state.qs.narrow(0, q_at, matrix.q.numel()).view(matrix.q.sizes());
      p_at += matrix.p.numel();
      q_at += matrix.q.numel();
    }
    return state;
  }

  static void allocate_first_round(Approximation& state, int64_t p_elements, int64_t whole_elements,
                                   const ProcessGroup& group) {
    const auto dtype = state.buffer.scalar_type();
    if (factor_dtype(dtype) == dtype) {
      state.first_round = {group.allocate({p_elements + whole_elements}, dtype)};
      state.ps = state.first_round[0].narrow(0, 0, p_elements);
      state.wholes = state.first_round[0].narrow(0, p_elements, whole_elements);
      return;
    }
    state.ps = group.allocate({p_elements}, factor_dtype(dtype));
    state.wholes = group.allocate({whole_elements}, dtype);
    if (p_elements > 0) state.first_round.push_back(state.ps);
    if (whole_elements > 0) state.first_round.push_back(state.wholes);
  }

  /// Returns all elements of a gradient of any layout as a flat view of the bucket.
  static at::Tensor flat(const at::Tensor& gradient) { return gradient.as_strided({gradient.numel()}, {1}); }

  /// Fills the tensor with random numbers that are equal on every rank.
  void fill(const at::Tensor& tensor, size_t bucket) const {
    auto generator = at::detail::createCPUGenerator(options_.seed + bucket);
    tensor.copy_(at::randn(tensor.sizes(), generator, tensor.scalar_type()));
  }

  /// Starts the second round of the bucket whose first round has started last, if it has not started yet.
  void start_second_round(const ProcessGroup& group) {
    auto* state = std::exchange(in_first_round_, nullptr);
    if (!state) return;
    for (const auto& work : std::exchange(state->works, {})) work.wait();
    if (state->matrices.empty()) return;
    for (auto& matrix : state->matrices) {
      orthonormalize(matrix.p);
      at::Tensor q = matrix.q;
      at::mm_out(q, matrix.gradient.to(q.scalar_type()).t(), matrix.p);
    }
    state->works.push_back(group.all_reduce_async(state->qs, ReduceOp::kAvg));
  }

  void finish(Approximation& state) const {
    for (const auto& work : std::exchange(state.works, {})) work.wait();
    for (auto& matrix : state.matrices) matrix.gradient.copy_(at::mm(matrix.p, matrix.q.t()));
    if (options_.use_error_feedback) update_error_feedback(state);
    int64_t at = 0;
    for (const auto& part : state.whole) {
      part.copy_(state.wholes.narrow(0, at, part.numel()));
      at += part.numel();
    }
    if (!options_.warm_start) fill(state.qs, static_cast<size_t>(state.reductions) << 20);
  }

  /// Sets `error` to the difference between this rank's gradient and the approximation; uncompressed gradients have no
  /// error.
  static void update_error_feedback(const Approximation& state) {
    state.error.sub_(state.buffer);
    for (const auto& part : state.whole) {
      const auto offset = part.storage_offset() - state.buffer.storage_offset();
      state.error.narrow(0, offset, part.numel()).zero_();
    }
  }

  const PowerSgdOptions options_;
  std::map<size_t, Approximation> states_;   // by bucket
  Approximation* in_first_round_ = nullptr;  // an element of states_ whose second round has not started
};

}  // namespace

CommHook power_sgd(const PowerSgdOptions& options) {
  if (options.rank < 1) throw UsageError(text("power_sgd: option rank is ", options.rank, ", expected 1 or more"));
  if (options.start_iteration < 0)
    throw UsageError(text("power_sgd: option start_iteration is ", options.start_iteration, ", expected 0 or more"));
  auto state = std::make_shared<PowerSgd>(options);
  return AveragingHook{
      [state](const GradientBucket& bucket, const ProcessGroup& group) { return state->start(bucket, group); }};
}

}  // namespace lockstep
