#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <lockstep/process_group.h>

#include "parallel/ddp/bucket.h"
#include "parallel/ddp/reachable_parameters.h"
#include "parallel/ddp/unused_parameters.h"

namespace lockstep {

/// Which parameters took part in the forwards and backwards since the last reduction: on this rank, and after the
/// reduction on the other ranks, which report it in marks (UnusedParameterBitmap). On this rank a parameter is used (it
/// got a gradient, backwards under no_sync() included), frozen, or unused. Not thread-safe.
class ParameterUsage {
 public:
  /// `parameters` must outlive the object. With `defers_marks` the host does not wait for marks that this rank does not
  /// need: check_deferred() reads them.
  ParameterUsage(const std::vector<NamedParameter>& parameters, ProcessGroup group, bool defers_marks);

  // Forward.

  /// Call it before each forward: notes which parameters are trained.
  void begin_forward();
  /// Predicts which parameters the next backward leaves unused: see ReachableParameters.
  void end_forward(const std::vector<at::Tensor>& outputs,
                   const std::vector<const torch::autograd::Node*>& accumulators);
  void forget_forwards();

  // Backward.

  /// Whether a backward that begins now would train no parameter.
  bool are_all_frozen() const;
  /// Decides which parameters are frozen in this backward.
  void begin_backward();
  /// A gradient of the parameter was accumulated.
  void note_use(size_t parameter) {
    used_[parameter] = 1;
    frozen_[parameter] = 0;
  }
  bool is_frozen(size_t parameter) const { return frozen_[parameter] != 0; }
  /// Whether no output of forward depends on the parameter.
  bool is_unreachable(size_t parameter) const { return reachable_.excludes(parameter); }

  // The reduction.

  /// The number of marks at the end of the last bucket.
  int64_t mark_elements() const { return marks_.elements(); }
  /// Writes this rank's marks into the last bucket, before its reduction.
  void write_marks(Bucket& last, bool is_finite, bool is_static_graph);
  /// Call it before read_marks() on a rank without a backward (Reducer::shadow): no parameter is frozen there.
  void begin_shadow();
  /// Reads the marks of all ranks, after the reduction of the last bucket; or later, if `at_once` is not set and this
  /// rank does not need them now.
  void read_marks(const Bucket& last, bool at_once);

  /// According to the marks of all ranks.
  bool is_used_somewhere(size_t parameter) const { return marks_.used_somewhere(parameter); }
  bool is_not_finite_somewhere() const { return marks_.is_not_finite_somewhere(); }
  bool static_graph_differs() const { return marks_.static_graph_differs(); }

  /// Compares the prediction of end_forward() with this backward: `got_gradient`, by parameter.
  void compare_with_prediction(const std::vector<char>& got_gradient) { reachable_.compare(got_gradient); }

  /// Ends a reduction and begins the next one. Throws MismatchError if a parameter was frozen on some ranks only, and
  /// UsageError if `needs_all` is set and a parameter was unused on some rank.
  void end_reduction(bool needs_all);
  /// The same on a rank without a backward. Errors about unused parameters name the other ranks.
  void end_shadow(bool needs_all);
  /// Throws the same for reductions whose marks were deferred.
  void check_deferred(bool needs_all);
  /// Forgets a reduction whose capture in a CUDA graph failed.
  void abandon();

 private:
  bool was_frozen(size_t parameter) const;
  bool has_unused() const;
  void check_frozen_alike() const;
  std::string describe_unused(const std::vector<char>& used) const;

  const std::vector<NamedParameter>& parameters_;
  const ProcessGroup group_;
  const bool defers_marks_;
  // By parameter:
  std::vector<char> used_;
  std::vector<char> trained_in_forward_;  // was trained in at least one of the forwards
  std::vector<char> frozen_;              // takes no part in this backward
  bool in_forward_ = false;               // a forward was made
  UnusedParameterBitmap marks_;
  ReachableParameters reachable_;
};

}  // namespace lockstep
