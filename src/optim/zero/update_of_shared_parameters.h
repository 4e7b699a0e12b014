#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/shared_memory_calls.h"
#include "optim/zero/element_update.h"
#include "optim/zero/overlapped_update.h"
#include "optim/zero/shared_state.h"

// Overview.
//
// Overlap::kUpdate for parameters that all ranks of a host share. The all-reduce of a bucket becomes one call of
// Backend::reduce_ranges: each rank sums its range of the gradients block by block, and updates the parameters and its
// state with each block while it is in the cache. All ranks see the updated parameters, so nothing is gathered.
//
// The state of the optimizer is in shared memory, too (SharedState), so that it outlives a rank. With undo, a block of
// the parameters and the state is copied before it changes: after the end of a rank in backward, the other ranks can
// restore the elements that the step has changed, also in the shares of ranks that have ended.

namespace lockstep::detail {

class UpdateOfSharedParameters final : public OverlappedUpdate {
 public:
  explicit UpdateOfSharedParameters(std::shared_ptr<Shard> shard) : OverlappedUpdate(std::move(shard)) {}

  Started update(const Bucket& bucket) override;
  void update_and_finish(const Bucket& bucket) override;
  void step(const at::Tensor& skip) override;

  /// Keeps the copies that undo_step() needs, from the next step on. Call it before the first step. Collective.
  void keep_undo();
  /// Restores the parameters and the state to their values before a step that an error has interrupted. Returns whether
  /// there was such a step. Throws UsageError without keep_undo(). Not collective: the parameters are complete once
  /// every rank that still runs has called it.
  bool undo_step();

 private:
  std::vector<Layout> prepare_buckets(const Plan& plan) override;
  bool waits_for_step() const override { return false; }
  void forget_step() override;

  void note_places();
  void begin_shared_step();
  RangeReduction begin_update(const Bucket& bucket);

  std::vector<std::vector<size_t>> pieces_of_;  // by parameter: indices of pieces
  std::vector<at::Tensor> inner_;               // parameters of the inner optimizer, by piece
  size_t states_of_parameter_ = 0;              // tensors for which there is memory
  std::vector<SharedState> states_;             // by memory
  std::vector<ElementUpdate::Memory> places_;   // by piece
  int32_t steps_ = 0;                           // begun so far
  bool keeps_undo_ = false;
  // Of the running step:
  std::string note_of_writes_;  // describes the program's writes before the step; empty: none
  std::vector<Work> pending_;
  std::vector<std::shared_ptr<std::vector<ElementUpdate>>> started_;
};

}  // namespace lockstep::detail
