#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>

#include <lockstep/zero_redundancy_optimizer.h>

#include "comm/shared_memory_calls.h"
#include "optim/sharded_memory.h"
#include "optim/shared_state.h"

// Overview.
//
// The ZeroRedundancyOptimizer itself ("outer") holds all parameters and their groups, but no state. At construction,
// Shard moves the parameters of each dtype into one ShardedMemory, a buffer with one share per rank. An "inner"
// optimizer of the user's type holds this rank's pieces of parameters, as views of that buffer, so its state covers
// only the share.
//
// The first step compares parameters and gradients over the ranks: check_first_step().
//
// step() copies the options of the outer groups to the inner ones, assigns each piece its range of the gradient, steps
// the inner optimizer and all-gathers the shares. consolidate() gathers all ranks' pieces of state on one rank and
// assembles them to the state of whole parameters; load() cuts this rank's pieces out of such a state. Both therefore
// work with any number of ranks.
//
// A captured step holds the Shard by shared_ptr, because it may outlive the optimizer; release() makes its replay fail.
// If a step fails between the inner step and the all-gather, ranks may hold shares of different steps; step_incomplete_
// records this, and consolidate() then refuses to save.
//
// With share_parameters all ranks have the same buffer, and there is nothing to gather: zero_redundancy_shared.cpp.
//
// With update_in_backward the Shard is the BucketUpdate of DistributedDataParallel: the updates run in backward, and
// step() only ends the step. zero_redundancy_shared.cpp has the updates of shared parameters. Otherwise, in
// zero_redundancy_buckets.cpp, prepare() moves the parameters once more, so that each bucket of gradients has a
// ShardedMemory with the same layout: a bucket is reduce-scattered, the inner optimizer steps its pieces, and they are
// all-gathered.

namespace lockstep {

/// This rank's share of the parameters and the inner optimizer. Captured steps may keep it alive after the optimizer is
/// destroyed.
class ZeroRedundancyOptimizerBase::Shard final : public BucketUpdate, public std::enable_shared_from_this<Shard> {
 public:
  using Buffer = detail::ShardedMemory::Buffer;

  Shard(torch::optim::Optimizer& outer, std::vector<std::string> names, ProcessGroup group, ShardBy by,
        const ZeroRedundancyOptions& options, const Make& make, void (*before_replay)(torch::optim::Optimizer&));

  void release() { outer_ = nullptr; }
  const ProcessGroup& group() const { return group_; }
  torch::optim::Optimizer& inner() const { return *inner_; }

  /// Takes over what was written to the parameters since the last step, also values in replaced memory. If the ranks
  /// share the parameters, throws MismatchError on all ranks unless all ranks have written the same ones; collective
  /// then. Throws UsageError if a parameter has changed its device, dtype or sizes.
  void take_writes();
  void do_as(int rank) const;
  /// Makes no step if `skip` is defined and not zero.
  void step(const at::Tensor& skip);
  void take_options() const;
  void before_replay() const {
    take_options();
    before_replay_(*inner_);
  }

  // BucketUpdate
  std::vector<Layout> prepare(const ProcessGroup& group, const Plan& plan) override;
  Started update(const Bucket& bucket) override;
  void update_and_finish(const Bucket& bucket) override;
  void abandon() override;
  bool updates_in_backward() const { return shared_updates_ || bucket_updates_; }
  /// Whether backward only averages gradients, and step() updates.
  bool holds_updates() const { return holds_updates_; }
  std::vector<at::Tensor> held_gradients() const;
  bool has_doubles() const;
  void check_can_step() const;
  void end_step_in_backward();
  bool undo_step();

  OptimizerState consolidate(int dst) const;
  void load(const OptimizerState& state);
  Value save_shard() const;
  void load_shards(size_t shards, const ReadShard& read);

 private:
  struct Memory {
    std::vector<size_t> members;  // indices into parameters_
    detail::ShardedMemory memory;
  };
  /// One parameter of the inner optimizer.
  struct Share {
    size_t memory;               // index into memories_
    detail::ShardPiece here;     // its parameter is an index into Memory::members
    detail::ShardPiece overall;  // its parameter is an index into parameters_
    size_t group;
  };

  /// What updates of shared parameters in backward need.
  struct SharedUpdates {
    std::vector<std::vector<size_t>> shares_of;         // by parameter: indices into shares_
    std::vector<at::Tensor> parameters;                 // of the inner optimizer, by share
    size_t states_of_parameter = 0;                     // tensors for which there is memory
    std::vector<detail::SharedState> states;            // by memory
    std::vector<detail::ElementUpdate::Memory> places;  // by share
    int32_t steps = 0;                                  // begun so far
    // Of the running step:
    std::string note_of_writes;  // that others have made before it; empty: none
    std::vector<Work> pending;
    std::vector<std::shared_ptr<std::vector<detail::ElementUpdate>>> started;
  };

  /// What updates of parameters that are not shared need in backward.
  struct BucketUpdates {
    struct Piece {
      at::Tensor parameter;  // of the inner optimizer
      at::Tensor gradient;   // a view of Reduced::gradient
      size_t index;          // into parameters_
    };
    /// A bucket. Its memory has the same index.
    struct Reduced {
      at::Tensor gradient;  // this rank's share of the average
      std::vector<Piece> pieces;
      // Of the running step:
      std::optional<Work> reduced, averaged_extra, gathered;
    };
    std::vector<Reduced> buckets;
    std::vector<at::Tensor> alone;      // with one rank: parameters of the inner optimizer
    std::optional<c10::Stream> stream;  // on a GPU: for updates
    std::optional<size_t> waiting;      // bucket that is being reduced and is not updated yet
    size_t unfinished = 0;              // buckets that were started in this backward
  };

  std::string name_of(size_t parameter) const;
  std::string what_is_wrong() const;
  void check_parameters() const;
  void move_parameters();
  void add_memory(const std::vector<size_t>& members);
  void use_memories();
  void make_inner();
  void note_writes();
  void check_unchanged() const;
  void check_first_step();
  void set_gradients() const;
  void gather() const;
  void check_can_share() const;
  void check_equal_values() const;
  std::vector<std::vector<size_t>> segments(const std::vector<size_t>& members) const;
  using Version = std::pair<uint64_t, const void*>;  // autograd's version, and the address
  using Versions = std::vector<Version>;             // by parameter
  Version version_of(size_t parameter) const;
  Versions versions() const;
  std::vector<size_t> written_parameters() const;

  // Updates in backward
  void check_plan(const ProcessGroup& group, const Plan& plan);
  void check_not_reduced() const;
  void begin_step_in_backward();
  void note_update(const at::Tensor& parameter);
  // of shared parameters
  void prepare_shared();
  void begin_shared_step();
  detail::RangeReduction begin_shared_update(const Bucket& bucket);
  Started start_shared_update(const Bucket& bucket);
  void finish_shared_update(const Bucket& bucket);
  // of others
  std::vector<Layout> prepare_buckets(const Plan& plan);
  void begin_bucket(const Bucket& bucket);
  void update_alone(const Bucket& bucket);
  void set_gradients(const std::vector<BucketUpdates::Piece>& pieces) const;
  void note_gradient(const at::Tensor& parameter);
  Started start_bucket(const Bucket& bucket);
  void update_waiting_bucket();
  void step_pieces(const std::vector<BucketUpdates::Piece>& pieces);
  void finish_bucket(size_t index);
  void finish_last_bucket(const Bucket& bucket);

  void agree_on_writes(const std::vector<size_t>& written) const;
  void check_complete() const;
  void load_inner(const OptimizerState& mine);
  std::vector<OptimizerState::Group> complete_groups(std::vector<OptimizerState::Group> groups) const;
  void check_names(const std::vector<std::string>& names) const;
  void check_same_parameters(const Value& shard) const;
  bool has_same_layout(const Value& shard) const;
  using Filled = std::map<std::pair<size_t, std::string>, int64_t>;  // elements of a share's tensor, by its name
  void take_overlap(const Value& shard, OptimizerState& mine, Filled& filled) const;
  bool has_overlap(const Value& shard) const;
  bool is_whole(const detail::ShardPiece& piece) const { return piece.size == parameters_[piece.parameter].numel(); }

  torch::optim::Optimizer* outer_;  // null after release()
  const std::vector<std::string> names_;
  const ProcessGroup group_;
  const Buffer buffer_;
  const bool keeps_undo_, holds_updates_;
  const Make make_;
  const ShardBy by_;
  void (*const before_replay_)(torch::optim::Optimizer&);
  std::vector<at::Tensor> parameters_;  // of all groups, concatenated
  std::vector<size_t> group_of_;        // by parameter
  std::vector<Memory> memories_;        // one for each dtype, shared segment, or bucket of BucketUpdates
  std::vector<Share> shares_;           // in the order of the inner optimizer's parameters
  std::unique_ptr<torch::optim::Optimizer> inner_;
  Versions written_;              // of parameters_ after the last step
  bool step_incomplete_ = false;  // a step has started but did not finish
  bool is_checked_ = false;       // check_first_step() has compared all parameters and gradients
  // Only with update_in_backward:
  std::unordered_map<const c10::TensorImpl*, size_t> index_of_;  // of parameters_
  std::vector<size_t> not_reduced_;                              // parameters_ that the wrapper does not reduce
  std::vector<char> updated_;                                    // by parameter: in the running step
  std::unique_ptr<SharedUpdates> shared_updates_;
  std::unique_ptr<BucketUpdates> bucket_updates_;
};

}  // namespace lockstep
