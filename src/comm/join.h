#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <lockstep/join.h>

namespace lockstep::detail {

/// One iteration of a join. Equal on all ranks.
struct JoinRound {
  std::vector<double> weights;   // by rank; 0 for a rank without inputs or with an empty batch
  std::vector<bool> has_inputs;  // by rank
  bool is_weighted = false;      // some rank has called set_batch_weight
  bool is_synchronized = false;  // this iteration averages gradients: it is not under no_sync
  bool is_training = false;      // the model is in training mode

  int trains() const;     // number of ranks with inputs
  int last_rank() const;  // highest rank with inputs; -1 if none
};

/// The state that the members of a join share on this rank. Not thread-safe.
class JoinContext {
 public:
  JoinContext(ProcessGroup group, JoinOptions options);

  /// What a rank contributes to an iteration. A rank without inputs leaves `weight` empty.
  struct Turn {
    std::optional<double> weight{};
    bool is_weighted = false;
    bool is_synchronized = false;
    bool is_training = false;
  };

  /// Begins an iteration. Collective. On a rank with inputs the first member calls it, once in each iteration; on the
  /// other ranks join() does. Throws InputsExhausted (see JoinOptions), and MismatchError if ranks disagree about
  /// no_sync or training mode.
  const JoinRound& next_round(const Turn& turn);

  /// Returns the current iteration.
  const JoinRound& round() const { return round_; }
  const JoinOptions& options() const { return options_; }
  const ProcessGroup& group() const { return group_; }

 private:
  const ProcessGroup group_;
  const JoinOptions options_;
  JoinRound round_;
};

/// The members of one join on this rank. They, and the thread, are in the join as long as this object exists. Destroy
/// it on the thread that created it.
class JoinMembers {
 public:
  /// UsageError when there is no member, or when the members are not on the same ranks.
  JoinMembers(const std::vector<Joinable*>& members, const JoinOptions& options);
  ~JoinMembers();
  JoinMembers(const JoinMembers&) = delete;
  JoinMembers& operator=(const JoinMembers&) = delete;

  /// Makes the collectives of the ranks that still train until no rank trains, then copies the state of one of the last
  /// ranks that trained. Collective.
  void follow_others();

 private:
  void leave() noexcept;

  const std::vector<Joinable*> members_;
  std::shared_ptr<JoinContext> context_;
  size_t entered_ = 0;
};

/// Whether this thread is inside of a join.
bool is_in_join();

/// Throws UsageError, with `remedy`, if this thread is inside of a join, where ranks may make different numbers of
/// calls. For calls that the ranks of `group` must make equally often. `call` is the name of the call: "MetricLog:
/// flush()". A join of all these ranks with throw_on_early_termination is allowed: it ends on all of them in the same
/// iteration.
void refuse_in_join(const ProcessGroup& group, const char* call, const char* remedy);

}  // namespace lockstep::detail
