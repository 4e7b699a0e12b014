#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/bucket_plan.h>
#include <lockstep/comm_hook.h>
#include <lockstep/ddp_logging_data.h>
#include <lockstep/export.h>
#include <lockstep/join.h>
#include <lockstep/process_group.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

/// Those that decide what is sent must be equal on all ranks, or wrapping throws MismatchError.
struct DistributedDataParallelOptions {
  /// Before the first forward of each step, in training, every rank takes rank 0's buffers (running statistics and the
  /// like).
  bool broadcast_buffers = true;
  /// Parameters that get no gradient on a rank count as zero there, and one that gets none anywhere keeps its old
  /// gradient. Otherwise a parameter without a gradient is an error on every rank.
  bool find_unused_parameters = false;
  /// Every backward uses the same parameters in the same way as the first, which is recorded. Parameters may then be
  /// unused, and may get several gradients in one backward, as those of recomputed segments that share them do.
  bool static_graph = false;
  /// `.grad()` is memory of the wrapper. Otherwise it is memory of its own, which costs a copy each step.
  bool gradient_as_bucket_view = true;
  /// Wrapping compares the models of all ranks and takes rank 0's parameters and buffers. Without it neither is done:
  /// the ranks must then hold the same already.
  bool init_sync = true;
  BucketLimits buckets{};
  /// Names of parameters and buffers that the wrapper leaves alone: each rank has its own.
  std::vector<std::string> ignore{};
  /// The one device of the model, or none: arguments of forward that hold tensors are then copied, with the tensors on
  /// it.
  std::vector<c10::Device> device_ids{};
  /// Where tensors that forward returns by value are moved to; where they are when not given.
  std::optional<c10::Device> output_device{};
  /// Each backward looks for gradients that are NaN or infinite, and throws Error on every rank when there are, naming
  /// rank and parameter. Costs a pass over the gradients.
  bool check_finite = false;
  /// Every so many forwards in training, the ranks compare their parameters bit by bit: see check_replicas(). 0: never.
  int64_t check_replicas_every = 0;
};

namespace detail {

class DdpState;

/// While it lives, backward leaves gradients on this rank.
class LOCKSTEP_EXPORT NoSync {
 public:
  explicit NoSync(std::shared_ptr<DdpState> replica);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<DdpState> replica_;
  bool was_enabled_;
};

}  // namespace detail

/// What DistributedDataParallel is, whatever the module's class.
class LOCKSTEP_EXPORT DistributedDataParallelBase : public Joinable {
 public:
  /// Each tensor once, also where modules share it. Give these to the optimizer.
  std::vector<at::Tensor> parameters() const;
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;
  void train(bool on = true);
  void eval();

  /// { auto guard = ddp.no_sync(); loss.backward(); }: gradients accumulate on this rank; the first backward after the
  /// guard is gone averages what has come together.
  [[nodiscard]] detail::NoSync no_sync() const;

  /// Ranks count in the average by the samples of their batches, so that the result is the mean over all samples, as of
  /// one process on the concatenated batch. The weight holds for each backward, under no_sync too, until the next call.
  /// 0 is for an empty batch: the rank's gradients count as zeros. Collective: every rank calls it, equally often. It
  /// returns at once. UsageError for a negative weight; in backward, on a CPU, when the weights of all ranks are 0.
  void set_batch_weight(double samples);

  /// Lets `loop` be of different length on each rank: see lockstep::join.
  void join(const std::function<void()>& loop, const JoinOptions& options = {});

  /// Reduces buckets by `hook` from now on. One for each wrapper, and the same on all ranks.
  void register_comm_hook(CommHook hook);
  /// As the option, before the first backward.
  void set_static_graph();

  /// Every rank takes rank 0's buffers, or its parameters, too. Collective.
  void sync_buffers();
  void sync_parameters_and_buffers();
  /// MismatchError on every rank, naming the first tensor, unless the parameters are equal bit by bit. Collective.
  void check_replicas() const;

  /// After the first backward buckets follow the order in which rank 0's gradients came.
  BucketPlan bucket_plan() const;
  DdpLoggingData logging_data() const;
  /// Writes the last steps of all ranks (64 at most) to a file of rank 0 that Perfetto opens: what was computed, when
  /// buckets were reduced, who waited. Collective. SystemError when it cannot be written, on rank 0.
  void write_trace(const std::string& path) const;
  /// One line for logs.
  std::string to_string() const;

  // Joinable
  ProcessGroup join_group() const override;
  void enter_join(std::shared_ptr<JoinContext> context, bool is_first) override;
  void shadow(const JoinRound& round) override;
  void take_state_from(int source) override;
  void leave_join() noexcept override;

 protected:
  DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                              const DistributedDataParallelOptions& options);

  void before_forward() const;
  void after_forward(const std::vector<at::Tensor>& outputs) const;
  const std::optional<c10::Device>& input_device() const;
  const std::optional<c10::Device>& output_device() const;

 private:
  std::shared_ptr<detail::DdpState> replica_;
};

LOCKSTEP_EXPORT std::ostream& operator<<(std::ostream& out, const DistributedDataParallelBase& ddp);

/// A model that trains on all ranks of a group as one process would on the concatenated batch.
///
/// Wrapping is collective: it checks that every rank has the same model (MismatchError naming the first difference) and
/// takes rank 0's parameters and buffers everywhere. After that each `loss.backward()` is collective too, and when it
/// returns, `.grad()` of every parameter is the mean over the ranks: do not divide by the world size again. Forward
/// through the wrapper or through the module itself, both synchronise, since the hooks sit on the parameters; only the
/// wrapper broadcasts buffers and notices what was done to the model meanwhile: a parameter added, replaced, moved or
/// frozen is a UsageError at the next forward.
///
/// `.grad()` lives in memory of the wrapper: use it freely, but do not keep it beyond the next backward.
///
/// Not thread-safe, like the module it wraps. Movable; the module may outlive it.
template <class Module>
class DistributedDataParallel : public DistributedDataParallelBase {
 public:
  DistributedDataParallel(std::shared_ptr<Module> module, ProcessGroup group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallelBase(module, std::move(group), options), module_(std::move(module)) {}

  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, ProcessGroup group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module.ptr(), std::move(group), options) {}

  /// The module's forward, with its arguments and its result.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    before_forward();
    if (!input_device())
      return finish([&]() -> decltype(auto) { return module_->forward(std::forward<Args>(args)...); });
    std::tuple<detail::Placed<Args>...> placed(detail::place(std::forward<Args>(args), *input_device())...);
    return finish([&]() -> decltype(auto) {
      return std::apply([&](auto&... arg) -> decltype(auto) { return module_->forward(std::forward<Args>(arg)...); },
                        placed);
    });
  }

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  const std::shared_ptr<Module>& module() const { return module_; }
  Module* operator->() const { return module_.get(); }

 private:
  template <class Forward>
  decltype(auto) finish(const Forward& run) {
    using Result = decltype(run());
    if constexpr (std::is_void_v<Result>) {
      run();
      after_forward({});
    } else if constexpr (std::is_reference_v<Result>) {
      auto&& result = run();
      look_at(result);
      return static_cast<Result>(result);
    } else {
      auto result = run();
      look_at(result);
      if (output_device())
        TensorsIn<Result>::visit(result, [&](at::Tensor& tensor) { tensor = tensor.to(*output_device()); });
      return result;
    }
  }

  template <class Value>
  void look_at(const Value& result) const {
    std::vector<at::Tensor> outputs;
    TensorsIn<Value>::visit(const_cast<Value&>(result), [&](at::Tensor& tensor) { outputs.push_back(tensor); });
    after_forward(outputs);
  }

  std::shared_ptr<Module> module_;
};

template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, ProcessGroup, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<Module>;
template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, ProcessGroup) -> DistributedDataParallel<Module>;

}  // namespace lockstep
