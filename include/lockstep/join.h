#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/error.h>
#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

struct JoinOptions {
  /// The average of gradients divides by all ranks, as if those without inputs had gradients of zero; otherwise by
  /// those that still train. Weights from set_batch_weight count in either case, and ranks without inputs have none.
  bool divide_by_initial_world_size = true;
  /// Rather than going on with fewer, every rank throws InputsExhausted when one runs out.
  bool throw_on_early_termination = false;
};

/// A rank has no inputs left, and the job is to stop then, on all ranks at the same iteration. The group still works.
class LOCKSTEP_EXPORT InputsExhausted : public Error {
 public:
  using Error::Error;
  ~InputsExhausted() override;
};

/// One iteration of the ranks in a join, as all of them know it.
struct JoinRound {
  std::vector<double> weights;   // by rank; 0 without inputs, or for an empty batch
  std::vector<bool> has_inputs;  // by rank
  bool is_weighted = false;      // some rank's weight was set by set_batch_weight
  bool is_synchronised = false;  // gradients are averaged in this iteration: it is not under no_sync
  bool is_training = false;      // the model is in training mode

  int trains() const;     // how many ranks do
  int last_rank() const;  // the highest that does; -1 for none
};

/// What the members of a join share on this rank. Not thread-safe.
class LOCKSTEP_EXPORT JoinContext {
 public:
  JoinContext(ProcessGroup group, JoinOptions options);

  /// What a rank that trains says of its iteration. A rank without inputs says nothing: no weight.
  struct Turn {
    std::optional<double> weight{};
    bool is_weighted = false;
    bool is_synchronised = false;
    bool is_training = false;
  };

  /// Begins an iteration. Collective. The first of the members calls it, once in each iteration.
  const JoinRound& next_round(const Turn& turn);

  /// The iteration that runs.
  const JoinRound& round() const { return round_; }
  const JoinOptions& options() const { return options_; }
  const ProcessGroup& group() const { return group_; }

 private:
  const ProcessGroup group_;
  const JoinOptions options_;
  JoinRound round_;
};

/// Something whose collectives in a training loop can be repeated by a rank that is through with its own inputs.
class LOCKSTEP_EXPORT Joinable {
 public:
  virtual ~Joinable();

  virtual ProcessGroup join_group() const = 0;
  /// From here on, until leave_join. The first of the members tells the context of each iteration.
  virtual void enter_join(std::shared_ptr<JoinContext> context, bool is_first) = 0;
  /// Makes the collectives of one iteration, with nothing of its own.
  virtual void shadow(const JoinRound& round) = 0;
  /// No rank has inputs any more: takes the state of rank `source`, which was among the last to train. Collective.
  virtual void take_state_from(int source) = 0;
  virtual void leave_join() noexcept = 0;

 protected:
  Joinable() = default;
  Joinable(const Joinable&) = default;
  Joinable& operator=(const Joinable&) = default;
};

/// Runs `loop`, a training loop over inputs of which ranks have different numbers. A rank that returns from it goes on
/// making the others' collectives until the last one is done; in the end all ranks have the state of one of the last to
/// train, as far as it is the members': a plain optimizer's momentum is not, so begin with a new one after a join, or
/// use one that can join. Collective.
///
/// Each iteration calls forward on the first member once; the calls of the members come in the order of the list.
/// set_batch_weight on the first member, before its forward, counts for all. Other collectives than theirs must not
/// stand in the loop. Under no_sync forward and backward both belong into its scope, and what a rank has accumulated
/// there when it runs out of inputs is lost.
LOCKSTEP_EXPORT void join(const std::vector<Joinable*>& members, const JoinOptions& options,
                          const std::function<void()>& loop);
LOCKSTEP_EXPORT void join(const std::vector<Joinable*>& members, const std::function<void()>& loop);

}  // namespace lockstep
