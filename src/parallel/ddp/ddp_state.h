#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/distributed_data_parallel.h>

#include "comm/join.h"
#include "comm/watch/activity.h"
#include "parallel/ddp/batch_weight.h"
#include "parallel/ddp/logging_data.h"
#include "parallel/ddp/packed_broadcast.h"
#include "parallel/ddp/parameter_watch.h"
#include "parallel/ddp/reducer.h"
#include "parallel/ddp/wrapped_module.h"

namespace lockstep::detail {

/// State of a DistributedDataParallel wrapper on this rank: the module, its buffers, its batch weight and its reducer.
/// Not thread-safe, except for the reducer.
class DdpState {
 public:
  DdpState(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
           const DistributedDataParallelOptions& options);

  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);

  void begin_no_sync();
  void end_no_sync(bool was_enabled);
  void set_batch_weight(double samples);
  bool has_batch_weight() const { return weight_.is_set(); }
  void broadcast_buffers(int source);
  void broadcast_parameters_and_buffers(int source);
  void check_replicas() const;

  void enter_join(std::shared_ptr<JoinContext> context, bool is_first);
  void shadow(const JoinRound& round);
  void leave_join() noexcept;

  const WrappedModule& wrapped() const { return wrapped_; }
  const ProcessGroup& group() const { return group_; }
  const DistributedDataParallelOptions& options() const { return options_; }
  const StepRecorder& recorder() const { return recorder_; }
  Reducer& reducer() const { return *reducer_; }
  const std::optional<c10::Device>& input_device() const { return input_device_; }

 private:
  void separate_batch_norm();
  void check_unchanged() const;
  void take_part_in_capture();
  void warn_of_lone_step();
  void watch_parameters_under_no_sync();
  void broadcast_buffers_if_due(int source);
  void weigh(const JoinRound& round);

  const ProcessGroup group_;
  const DistributedDataParallelOptions options_;
  const WrappedModule wrapped_;
  std::optional<c10::Device> input_device_;  // constant after construction
  PackedBroadcast buffers_;
  BatchWeight weight_;
  StepRecorder recorder_;
  const std::shared_ptr<Activity> activity_;
  std::shared_ptr<Reducer> reducer_;   // constant after construction; shared: autograd graphs may outlive this object
  int64_t buffers_broadcast_at_ = -1;  // number of reductions at the last buffer broadcast
  int64_t iterations_ = 0;
  uint64_t forward_begin_ = 0;  // autograd's sequence number of this thread at the last forward
  ParameterWatch watch_;        // for steps after a backward under no_sync() and before the next reduction
  int64_t watched_since_ = -1;  // number of reductions when a backward under no_sync() was first watched
  bool has_warned_ = false;
  std::shared_ptr<JoinContext> join_;  // null outside of a join
  bool leads_join_ = false;
};

}  // namespace lockstep::detail
