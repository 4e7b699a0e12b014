#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <lockstep/error.h>
#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

struct JoinOptions {
  /// If true, the average of gradients divides by all ranks, as if ranks without inputs had zero gradients. If false,
  /// it divides by the ranks that still train. If weights are set by set_batch_weight, the option has no effect: the
  /// average is over the samples of the ranks that still train. A rank without inputs has weight 0, as a rank with an
  /// empty batch has outside of a join.
  bool divide_by_initial_world_size = true;
  /// Throws InputsExhausted on every rank when one rank runs out of inputs, instead of continuing with fewer ranks.
  bool throw_on_early_termination = false;
};

/// A rank has no inputs left and JoinOptions::throw_on_early_termination is set. Thrown on all ranks in the same
/// iteration. The group still works.
class LOCKSTEP_EXPORT InputsExhausted : public Error {
 public:
  using Error::Error;
  ~InputsExhausted() override;
};

namespace detail {
struct JoinRound;
class JoinContext;
class JoinMembers;
}  // namespace detail

/// An object that calls collectives in the training loop. join() makes the same calls on ranks without inputs:
/// DistributedDataParallel and ZeroRedundancyOptimizer. Not for implementation by users.
class LOCKSTEP_EXPORT Joinable {
 public:
  virtual ~Joinable();

 protected:
  Joinable() = default;
  Joinable(const Joinable&) = default;
  Joinable& operator=(const Joinable&) = default;

 private:
  friend class detail::JoinMembers;

  virtual ProcessGroup join_group() const = 0;
  /// Called when the join begins. If `is_first`, this member calls context->next_round() in each iteration.
  virtual void enter_join(std::shared_ptr<detail::JoinContext> context, bool is_first) = 0;
  /// Calls the collectives of one iteration on a rank without inputs.
  virtual void shadow(const detail::JoinRound& round) = 0;
  /// Copies the state of rank `source`, which was among the last to train. Called when no rank has inputs. Collective.
  virtual void copy_state_from(int source) = 0;
  virtual void leave_join() noexcept = 0;
};

/// Runs `loop`, a training loop whose number of iterations may differ between ranks. Collective. When `loop` returns on
/// a rank, that rank takes part in the other ranks' collectives until all ranks are done. In the end, all ranks have
/// the members' state of one rank that trained to the end. The state of other objects is not copied, for example the
/// momentum of a plain optimizer: create a new optimizer after a join, or use an optimizer that is a member.
///
/// Rules for the loop:
///   - Each iteration calls forward on the first member once.
///   - The members call their collectives in the order of `members`.
///   - set_batch_weight on the first member, before its forward, applies to all members.
///   - The loop has no other collectives.
///   - Under no_sync, forward and backward are both inside its scope. Gradients that a rank has accumulated when it
///     runs out of inputs are lost.
///
/// Throws UsageError if `members` is empty or the members' groups have different ranks, and for a model with
/// SyncBatchNorm layers unless throw_on_early_termination is set. Throws MismatchError if ranks disagree about no_sync
/// or training mode.
LOCKSTEP_EXPORT void join(const std::vector<Joinable*>& members, const JoinOptions& options,
                          const std::function<void()>& loop);
LOCKSTEP_EXPORT void join(const std::vector<Joinable*>& members, const std::function<void()>& loop);

}  // namespace lockstep
