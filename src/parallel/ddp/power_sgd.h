#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/process_group.h>
#include <lockstep/value.h>
#include <lockstep/work.h>

namespace lockstep::detail {

/// The hook behind power_sgd() and PowerSgdState. Not thread-safe.
class PowerSgd {
 public:
  /// Throws UsageError if an option is invalid.
  explicit PowerSgd(const PowerSgdOptions& options);

  /// Reduces a bucket, as a CommHook does.
  FinishReduction start(const GradientBucket& bucket, const ProcessGroup& group);

  // As in PowerSgdState.
  Value save() const;
  void load(const Value& value);
  void load(const std::vector<Value>& states, const ProcessGroup& group);

 private:
  /// The state of a compressed gradient between two steps.
  struct Memory {
    at::Tensor error{};   // n x m: the gradient of the last step minus its approximation; undefined before it
    at::Tensor factor{};  // m x rank: q of the last step; undefined before it, and without warm start
  };

  /// A gradient, viewed as a matrix that is approximated by p * q^T.
  struct Matrix {
    size_t slot;  // in the bucket
    std::string name;
    int64_t n, m, rank;
    Memory* memory;
    at::Tensor gradient;  // n x m, a view of the bucket; only during a reduction, so that the bucket is not kept
    at::Tensor p;         // n x rank, a view of ps
    at::Tensor q;         // m x rank, a view of qs
  };

  /// A bucket. The factors p of all its matrices are contiguous, and so are the factors q. The uncompressed gradients
  /// follow the factors p if they have the same dtype, so each round needs only one all-reduce.
  struct Approximation {
    int64_t reductions = 0;
    bool is_planned = false;  // false before compression begins
    size_t parameters = 0;    // number of slots of parameters; further slots are marks
    std::vector<Matrix> matrices{};
    std::vector<size_t> uncompressed_slots{};  // uncompressed gradients; the marks of an AveragingHook are the last
    std::vector<at::Tensor> uncompressed_in_bucket{};  // the same, flat; only during a reduction
    at::Tensor ps{}, qs{}, uncompressed{};             // allocated by the group
    std::vector<at::Tensor> first_round{};             // ps and uncompressed, in one tensor or in two
    at::Tensor is_finite{};                            // whether the averages are finite
    std::vector<Work> works{};                         // of the round that has started last
  };

  Approximation& state_of(const GradientBucket& bucket);
  int64_t reductions() const;
  void plan(Approximation& state, const GradientBucket& bucket, const ProcessGroup& group);
  static void allocate_first_round(Approximation& state, at::ScalarType dtype, int64_t p_elements,
                                   int64_t uncompressed_elements, const ProcessGroup& group);
  Memory& find_memory(const Matrix& matrix, const at::Tensor& buffer, const ProcessGroup& group);
  void check_all_loaded_used(const ProcessGroup& group);
  void enter(Approximation& state, const GradientBucket& bucket);
  at::Tensor random_factor(const Matrix& matrix, int64_t reduction) const;
  void start_second_round(const ProcessGroup& group);
  void decide();
  void finish(Approximation& state) const;

  const PowerSgdOptions options_;
  std::map<std::string, Memory> memories_{};   // by the name of the parameter: buckets change, names do not
  std::map<size_t, Approximation> buckets_{};  // by index; of the current plan
  int64_t plan_ = 0;                           // GradientBucket::plan
  int64_t reductions_ = 0;                     // before the current plan, or before the state was loaded
  Approximation* in_first_round_ = nullptr;    // an element of buckets_ whose second round has not started
  std::vector<Approximation*> undecided_{};    // elements of buckets_ that have started since decide()
  at::Tensor is_finite_{};                     // whether the last reduction had no overflow: a bool, see decide()
  std::set<std::string> loaded_{};             // names in the loaded state that no bucket has had yet
  bool checks_names_ = false;                  // from load() until all buckets have been compared with the state
};

}  // namespace lockstep::detail
