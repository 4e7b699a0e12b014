#pragma once

#include <lockstep/zero_redundancy_optimizer.h>

namespace lockstep::detail {

class UpdateOfSharedParameters;

/// Undoes the last step of an optimizer with share_parameters and Overlap::kUpdate, after a rank was lost in
/// backward. Both functions throw UsageError for other optimizers.
struct ZeroUndo {
  /// Keeps a copy of what a step changes, from the next step on. Takes as much memory again as parameters and state,
  /// and time to write it. Call it before the first step. Collective.
  static void keep_copies(ZeroRedundancyOptimizerBase& optimizer);
  /// Restores the parameters and the state to those before a step that an error has interrupted, such as the end of
  /// another rank during backward. Returns whether there was a step to undo. Not collective: the parameters are
  /// complete once every rank that still runs has called it; shards of ranks that have ended are restored by the
  /// others. Throws UsageError without keep_copies().
  static bool undo_step(ZeroRedundancyOptimizerBase& optimizer);

 private:
  static UpdateOfSharedParameters& strategy_of(ZeroRedundancyOptimizerBase& optimizer);
};

}  // namespace lockstep::detail
