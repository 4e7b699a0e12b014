#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <lockstep/zero_redundancy_optimizer.h>

#include "optim/zero/sharded_parameters.h"

namespace lockstep::detail {

/// A ZeroRedundancyOptimizer has all parameters and their groups, but no state: it is the "outer" optimizer. The
/// "inner" optimizer has this rank's pieces of the parameters, as views of their memory, and so the state of these
/// pieces only. A Shard connects both, and may outlive the outer optimizer: captured steps and wrappers keep it. Not
/// thread-safe.
class Shard : public std::enable_shared_from_this<Shard> {
 public:
  /// Throws the errors of the constructors of ShardedParameters and of the inner optimizer. Collective.
  Shard(torch::optim::Optimizer& outer, std::vector<std::string> names, ProcessGroup group, ShardBy by,
        ShardedParameters::Buffer buffer, InnerOptimizer inner);

  ShardedParameters& parameters() { return parameters_; }
  const ShardedParameters& parameters() const { return parameters_; }
  const ProcessGroup& group() const { return parameters_.group(); }
  int rank() const { return group().rank(); }

  /// Call it when the outer optimizer is destroyed.
  void release() { outer_ = nullptr; }
  bool is_released() const { return outer_ == nullptr; }
  torch::optim::Optimizer& outer() const { return *outer_; }
  torch::optim::Optimizer& inner() const { return *inner_; }
  /// The parameters of the inner optimizer, by piece.
  std::vector<at::Tensor> inner_parameters() const;
  /// The options of the inner optimizer for a piece.
  const torch::optim::OptimizerOptions& options_of(const ShardedParameters::Piece& piece) const;

  /// Divides the parameters again, and makes a new inner optimizer, without state. Collective.
  void divide(const std::vector<std::vector<size_t>>& lists);

  /// Copies the options of the outer optimizer to the inner optimizer. Throws UsageError after release().
  void copy_options() const;
  /// Call it before the replay of a captured step.
  void before_replay() const;
  /// Accepts the values that the program has written to the parameters since the last step, also in replaced memory. If
  /// the ranks share the parameters, it is collective, and throws MismatchError on all ranks unless all ranks have
  /// written to the same parameters. Throws UsageError if a parameter has changed its device, dtype or sizes.
  void accept_writes();
  /// The part of accept_writes() that is not collective.
  void restore_parameters() const;
  /// Marks the inner optimizer's parameters, which are views, as written if the parameters were written since the last
  /// step.
  void note_writes() const;

  /// Calls copy_options() for a step; if the step is captured, each replay does so as well.
  void prepare_step();
  /// Steps the inner optimizer, whose parameters have their gradients, removes the gradients, and all-gathers the first
  /// `memories` memories. Makes no step if `skip` is defined and not zero. Collective.
  void step(const at::Tensor& skip, size_t memories);

  /// Call it when a step begins: until it ends, ranks may have updates of different steps.
  void mark_incomplete() { is_incomplete_ = true; }
  void mark_complete() { is_incomplete_ = false; }
  bool is_incomplete() const { return is_incomplete_; }
  /// Throws UsageError if a step did not end.
  void check_complete() const;

 private:
  void make_inner();

  torch::optim::Optimizer* outer_;  // null after release()
  const InnerOptimizer make_;
  ShardedParameters parameters_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  bool is_incomplete_ = false;
};

}  // namespace lockstep::detail
