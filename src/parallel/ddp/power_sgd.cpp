#include <lockstep/comm_hook.h>

#include <map>
#include <memory>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "parallel/ddp/averaging_hook.h"

namespace lockstep {
namespace {

/// A gradient, viewed as a matrix that is approximated by p * q^T.
struct Matrix {
  at::Tensor gradient;  // n x m, a view of the bucket
  at::Tensor p;         // n x rank, a view of ps
  at::Tensor q;         // m x rank, a view of qs
};

/// State of one bucket. The factors p of all its matrices are contiguous, and so are the factors q: each needs only one
/// all-reduce.
struct Approximation {
  at::Tensor buffer;  // the bucket's buffer
  std::vector<Matrix> matrices;
  std::vector<at::Tensor> whole;  // uncompressed gradients, flat
  at::Tensor ps, qs, wholes;      // allocated by the group
  at::Tensor error;               // the approximation error of the last step
  int64_t reductions = 0;
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
    auto& state = states_[bucket.index];
    if (!state.buffer.is_same(bucket.buffer)) state = plan(bucket, group, state.reductions);
    if (state.reductions++ < options_.start_iteration)
      return [work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg)] { work.wait(); };

    if (options_.use_error_feedback) {
      if (state.error.defined()) bucket.buffer.add_(state.error);
      state.error = bucket.buffer.clone();
    }
    std::vector<Work> works;
    if (!state.whole.empty()) {
      at::cat_out(state.wholes, state.whole);
      works.push_back(group.all_reduce_async(state.wholes, ReduceOp::kAvg));
    }
    for (auto& matrix : state.matrices) {
      orthonormalize(matrix.q);
      at::Tensor p = matrix.p;
      at::mm_out(p, matrix.gradient.to(p.scalar_type()), matrix.q);
    }
    if (!state.matrices.empty()) works.push_back(group.all_reduce_async(state.ps, ReduceOp::kAvg));
    return [this, &state, group, works] {
      for (const auto& work : works) work.wait();
      finish(state, group);
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
    state.ps = group.allocate({p_elements}, dtype);
    state.qs = group.allocate({q_elements}, dtype);
    fill(state.qs, bucket.index);
    state.wholes = group.allocate({whole_elements}, bucket.buffer.scalar_type());
    int64_t p_at = 0, q_at = 0;
    for (auto& matrix : state.matrices) {
      matrix.p = state.ps.narrow(0, p_at, matrix.p.numel()).view(matrix.p.sizes());
      matrix.q = state.qs.narrow(0, q_at, matrix.q.numel()).view(matrix.q.sizes());
      p_at += matrix.p.numel();
      q_at += matrix.q.numel();
    }
    return state;
  }

  /// Returns all elements of a gradient of any layout as a flat view of the bucket.
  static at::Tensor flat(const at::Tensor& gradient) { return gradient.as_strided({gradient.numel()}, {1}); }

  /// Fills the tensor with random numbers that are equal on every rank.
  void fill(const at::Tensor& tensor, size_t bucket) const {
    auto generator = at::detail::createCPUGenerator(options_.seed + bucket);
    tensor.copy_(at::randn(tensor.sizes(), generator, tensor.scalar_type()));
  }

  void finish(Approximation& state, const ProcessGroup& group) const {
    c10::NoGradGuard no_grad;
    if (!state.matrices.empty()) {
      for (auto& matrix : state.matrices) {
        orthonormalize(matrix.p);
        at::Tensor q = matrix.q;
        at::mm_out(q, matrix.gradient.to(q.scalar_type()).t(), matrix.p);
      }
      group.all_reduce(state.qs, ReduceOp::kAvg);
      for (auto& matrix : state.matrices) matrix.gradient.copy_(at::mm(matrix.p, matrix.q.t()));
    }
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
  std::map<size_t, Approximation> states_;  // by bucket
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
