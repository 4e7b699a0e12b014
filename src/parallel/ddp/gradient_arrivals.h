#pragma once

#include <cstddef>
#include <vector>

#include "parallel/ddp/bucket.h"

namespace lockstep {

/// Counts the gradients of each parameter in one backward to determine when a gradient is complete: when it has arrived
/// once. With a static graph it may arrive several times, if checkpointed segments share the parameter: as often as in
/// the first backward, which is recorded. Not thread-safe.
class GradientArrivals {
 public:
  /// `parameters` must outlive the object. `rank` is for errors.
  GradientArrivals(const std::vector<NamedParameter>& parameters, int rank, bool static_graph)
      : parameters_(parameters), rank_(rank), is_static_graph_(static_graph), counts_(parameters.size()) {}

  void set_static_graph() { is_static_graph_ = true; }
  bool is_static_graph() const { return is_static_graph_; }

  /// Call it when backward begins.
  void begin();
  /// Counts a gradient. Returns whether the parameter's gradient is complete; false in the backward that is recorded.
  /// Throws UsageError if more gradients arrive than a reduction can wait for.
  bool add(size_t parameter);
  /// Call it when backward has ended and its gradients are reduced.
  void end();

  /// Whether a gradient has arrived in this backward.
  bool has(size_t parameter) const { return counts_[parameter].arrived > 0; }
  /// Whether the parameter gets no gradient in any backward, according to the recorded backward.
  bool excludes(size_t parameter) const { return is_recorded() && counts_[parameter].expected == 0; }
  /// The parameters in the order in which their gradients have arrived in this backward.
  const std::vector<size_t>& order() const { return order_; }

 private:
  struct Count {
    int arrived = 0;   // in this backward
    int expected = 0;  // in every backward, if one is recorded
  };

  bool is_recorded() const { return is_static_graph_ && has_ended_; }

  const std::vector<NamedParameter>& parameters_;
  const int rank_;
  bool is_static_graph_;
  // May differ between ranks: a rank that has no input in the first iteration of a join has its first backward later.
  bool has_ended_ = false;  // a backward has ended
  std::vector<Count> counts_;
  std::vector<size_t> order_;
};

}  // namespace lockstep
