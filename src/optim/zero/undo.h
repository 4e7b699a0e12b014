#pragma once

#include <lockstep/zero_redundancy_optimizer.h>

namespace lockstep::detail {

class UpdateOfSharedParameters;

/// Undoes the last step of an optimizer with share_parameters and Overlap::kUpdate, after a rank was lost in
/// backward. Both functions throw UsageError for other optimizers.
struct ZeroUndo {
  /// Keeps a copy of the parameters and the state before each step, from the next step on. The copy takes as much
  /// memory as parameters and state, and time to write it. Call it before the first step. Collective.
  static void keep_copies(ZeroRedundancyOptimizerBase& optimizer);
  /// Restores the parameters and the state to their values before a step that an error has interrupted, such as the end
  /// of another rank during backward. Returns whether there was a step to undo. Not collective: the parameters are
  /// complete once every rank that still runs has called it; the remaining ranks restore the shards of ranks that have
  /// ended. Throws UsageError without keep_copies().
  static bool undo_step(ZeroRedundancyOptimizerBase& optimizer);

 private:
  static UpdateOfSharedParameters& strategy_of(ZeroRedundancyOptimizerBase& optimizer);
};

}  // namespace lockstep::detail
