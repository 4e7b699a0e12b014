#include <lockstep/distributed_data_parallel.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <ostream>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/strings.h"
#include "parallel/ddp/ddp_state.h"
#include "parallel/ddp/logging_data.h"

namespace lockstep {
namespace detail {

DdpState& ddp_state(const DistributedDataParallelBase& ddp) {
  return *ddp.replica_;
}

NoSync::NoSync(std::shared_ptr<DdpState> replica)
    : replica_(std::move(replica)), was_enabled_(replica_->reducer().is_enabled()) {
  replica_->begin_no_sync();
}

NoSync::~NoSync() {
  replica_->end_no_sync(was_enabled_);
}

}  // namespace detail

namespace {

std::shared_ptr<detail::DdpState> make_replica(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                                               const DistributedDataParallelOptions& options) {
  if (!module)
    throw UsageError(group.rank(), "DistributedDataParallel: the module is empty; pass a constructed module");
  return std::make_shared<detail::DdpState>(std::move(module), std::move(group), options);
}

}  // namespace

DistributedDataParallelBase::DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                                                         const DistributedDataParallelOptions& options)
    : replica_(make_replica(std::move(module), std::move(group), options)) {}

std::vector<at::Tensor> DistributedDataParallelBase::parameters() const {
  std::vector<at::Tensor> result;
  for (const auto& [name, tensor] : replica_->wrapped().all_parameters()) result.push_back(tensor);
  return result;
}

NamedTensors DistributedDataParallelBase::named_parameters() const {
  NamedTensors result;
  for (const auto& [name, tensor] : replica_->wrapped().all_parameters()) result.emplace_back(name, tensor);
  return result;
}

const ProcessGroup& DistributedDataParallelBase::process_group() const {
  return replica_->group();
}

void DistributedDataParallelBase::train(bool on) {
  replica_->wrapped().module().train(on);
}

void DistributedDataParallelBase::eval() {
  train(false);
}

detail::NoSync DistributedDataParallelBase::no_sync() const {
  return detail::NoSync(replica_);
}

void DistributedDataParallelBase::set_batch_weight(double samples) {
  replica_->set_batch_weight(samples);
}

void DistributedDataParallelBase::join(const std::function<void()>& loop, const JoinOptions& options) {
  lockstep::join({this}, options, loop);
}

void DistributedDataParallelBase::register_comm_hook(CommHook hook) {
  if (!hook) throw UsageError(replica_->group().rank(), "register_comm_hook: the hook is empty; pass a function");
  replica_->reducer().set_hook(std::move(hook));
}

void DistributedDataParallelBase::set_static_graph() {
  replica_->reducer().set_static_graph();
}

void DistributedDataParallelBase::sync_buffers() {
  replica_->broadcast_buffers(0);
}

void DistributedDataParallelBase::sync_parameters_and_buffers() {
  replica_->broadcast_parameters_and_buffers(0);
}

void DistributedDataParallelBase::check_replicas() const {
  replica_->check_replicas();
}

BucketPlan DistributedDataParallelBase::bucket_plan() const {
  return replica_->reducer().plan();
}

// --- logging

DdpLoggingData DistributedDataParallelBase::logging_data() const {
  const auto& group = replica_->group();
  DdpLoggingData data{.rank = group.rank(),
                      .world_size = group.size(),
                      .backend = group.backend_name(),
                      .module = replica_->wrapped().module().name()};
  for (const auto& [name, tensor] : replica_->reducer().parameters()) {
    ++data.parameters;
    data.bytes += static_cast<int64_t>(tensor.nbytes());
  }
  data.is_static_graph = replica_->reducer().is_static_graph();
  data.steps = replica_->recorder().count();
  const auto steps = replica_->recorder().steps();
  if (!steps.empty()) describe_step(steps.back(), data);
  return data;
}

void DistributedDataParallelBase::write_trace(const std::string& path) const {
  const auto& group = replica_->group();
  const auto all = gather_strings(group, trace_events(group.rank(), replica_->recorder().steps()), 0);
  if (group.rank() != 0) return;
  std::ofstream file(path);
  file << trace_file(all) << std::flush;
  if (!file) throw SystemError(0, text("cannot write the trace to ", path, ": ", std::strerror(errno)));
}

std::string DistributedDataParallelBase::to_string() const {
  const auto data = logging_data();
  return text("DistributedDataParallel(", data.module, ", rank ", data.rank, " of ", data.world_size, ", ",
              data.backend, ", ", data.parameters, " parameters, ", data.bytes, " bytes in ",
              bucket_plan().buckets.size(), " buckets)");
}

std::ostream& operator<<(std::ostream& out, const DistributedDataParallelBase& ddp) {
  return out << ddp.to_string();
}

// --- forward

void DistributedDataParallelBase::before_forward() const {
  replica_->before_forward();
}

void DistributedDataParallelBase::after_forward(const std::vector<at::Tensor>& outputs) const {
  replica_->after_forward(outputs);
}

const std::optional<c10::Device>& DistributedDataParallelBase::input_device() const {
  return replica_->input_device();
}

const std::optional<c10::Device>& DistributedDataParallelBase::output_device() const {
  return replica_->options().output_device;
}

// --- Joinable

ProcessGroup DistributedDataParallelBase::join_group() const {
  return replica_->group();
}

void DistributedDataParallelBase::enter_join(std::shared_ptr<detail::JoinContext> context, bool is_first) {
  replica_->enter_join(std::move(context), is_first);
}

void DistributedDataParallelBase::shadow(const detail::JoinRound& round) {
  replica_->shadow(round);
}

void DistributedDataParallelBase::copy_state_from(int source) {
  replica_->broadcast_parameters_and_buffers(source);
}

void DistributedDataParallelBase::leave_join() noexcept {
  replica_->leave_join();
}

}  // namespace lockstep
