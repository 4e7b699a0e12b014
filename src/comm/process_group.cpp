#include <lockstep/process_group.h>

#include <mutex>
#include <numeric>
#include <tuple>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/collectives.h"
#include "comm/dense.h"
#include "comm/group/group.h"
#include "comm/group/message.h"

namespace lockstep {
namespace {

using detail::Operation;

const at::Tensor* tensor_of(const at::Tensor& tensor) {
  return tensor.defined() ? &tensor : nullptr;
}
const at::Tensor* tensor_of(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? nullptr : tensor_of(tensors.front());
}
template <class Other>
const at::Tensor* tensor_of(const Other&) {
  return nullptr;
}

// Returns the group for the device of the first tensor among the arguments.
template <class... Arguments>
detail::Group& part_for(detail::Group& group, const Arguments&... arguments) {
  const at::Tensor* some = nullptr;
  ((some = some ? some : tensor_of(arguments)), ...);
  return some ? group.for_device(some->device().type()) : group;
}

template <class... Parameters, class... Arguments>
void run_call(detail::Group& whole, const CallOptions& options,
              detail::Group::Call (*make)(const detail::Membership&, Parameters...), const Arguments&... arguments) {
  auto& group = part_for(whole, arguments...);
  group.run(make(group.membership(), arguments...), options);
}

// A call refers to its arguments. An asynchronous call may outlive the caller's arguments, so it gets copies.
template <class... Parameters, class... Arguments>
Work submit(detail::Group& whole, const CallOptions& options,
            detail::Group::Call (*make)(const detail::Membership&, Parameters...), const Arguments&... arguments) {
  auto& group = part_for(whole, arguments...);
  auto kept = std::make_shared<std::tuple<Arguments...>>(arguments...);
  auto call = std::apply([&](const auto&... own) { return make(group.membership(), own...); }, *kept);
  call.kept = kept;
  return group.submit(std::move(call), options);
}

/// A message in transit, with the user's tensor and its dense version.
class MessageInFlight final : public detail::Completion {
 public:
  MessageInFlight(const std::shared_ptr<detail::Group>& group, const at::Tensor& tensor, Operation direction, int peer,
                  uint32_t tag, const CallOptions& options)
      : Completion(group->rank_in_job(), group->activity()), tensor_(tensor), direction_(direction) {
    bool sends = direction == Operation::kSend;
    int me = group->membership().rank;
    detail::check_message(group->membership(), direction, tensor, peer);
    if (!sends) detail::bump_version(tensor);
    dense_ = sends ? *detail::dense_input(tensor) : *detail::dense_output(tensor);
    message_ = std::make_unique<detail::Message>(
        group, sends ? detail::MessageRoute{me, peer, tag} : detail::MessageRoute{peer, me, tag},
        detail::Fingerprint{direction, tensor.scalar_type(), tensor.numel()}, options,
        [&](Backend& backend, uint64_t fingerprint) -> std::unique_ptr<Transfer> {
          if (!dense_.defined()) return nullptr;
          return sends ? backend.start_send(dense_, peer, tag, fingerprint)
                       : backend.start_recv(dense_, peer, tag, fingerprint);
        });
  }

  void wait() override {
    message_->wait();
    std::lock_guard lock(mutex_);
    if (is_stored_) return;
    if (direction_ == Operation::kRecv) detail::store(tensor_, dense_);
    is_stored_ = true;
    done_at_ = std::chrono::steady_clock::now();
  }

  // A message is complete on the device when it has arrived, but its copy to a tensor that is not contiguous may not
  // be.
  void synchronize() override {
    wait();
    if (!tensor_.is_cuda() || dense_.is_same(tensor_)) return;
    c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(tensor_.device()).synchronize();
  }

  bool is_done() override { return message_->is_done(); }

  std::chrono::steady_clock::time_point done_at() override {
    std::lock_guard lock(mutex_);
    return done_at_;
  }

 private:
  const at::Tensor tensor_;
  const Operation direction_;
  at::Tensor dense_;                          // constant after construction
  std::unique_ptr<detail::Message> message_;  // constant after construction
  std::mutex mutex_;
  bool is_stored_ = false;                           // guarded by mutex_
  std::chrono::steady_clock::time_point done_at_{};  // guarded by mutex_
};

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<detail::Group> group) : group_(std::move(group)) {}

const std::shared_ptr<detail::Group>& detail::group_of(const ProcessGroup& group) {
  return group.group_;
}

int ProcessGroup::rank() const {
  return group_->membership().rank;
}

int ProcessGroup::size() const {
  return group_->membership().size;
}

int ProcessGroup::local_rank() const {
  return group_->membership().local_rank;
}

c10::Device ProcessGroup::device() const {
  return group_->membership().device;
}

std::string ProcessGroup::backend_name() const {
  const auto& name = group_->membership().backend_name;
  const auto& cpu_group = group_->cpu_group();
  return cpu_group ? text("cpu:", cpu_group->membership().backend_name, ",cuda:", name) : name;
}

bool ProcessGroup::supports(c10::DeviceType type) const {
  return group_->for_device(type).membership().device.type() == type;
}

std::chrono::milliseconds ProcessGroup::timeout() const {
  return group_->membership().timeout;
}

const std::string& ProcessGroup::name() const {
  return group_->membership().name;
}

bool ProcessGroup::contains_me() const {
  return rank() != detail::Membership::kNotAMember;
}

std::vector<int> ProcessGroup::global_ranks() const {
  return ranks_in_job(group_->membership());
}

int ProcessGroup::global_rank(int group_rank) const {
  if (group_rank < 0 || group_rank >= size())
    throw UsageError(text("group '", name(), "' has ranks 0 to ", size() - 1, ", not ", group_rank));
  return group_->membership().peers[group_rank].rank;
}

int ProcessGroup::group_rank(int global_rank) const {
  return rank_in_group(group_->membership(), global_rank);
}

// Returns the group for a call that only members may make. Throws UsageError on other ranks.
detail::Group& ProcessGroup::member() const {
  group_->check_process();
  if (group_->membership().rank == detail::Membership::kNotAMember) group_->backend();  // throws
  return *group_;
}

void ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op, const CallOptions& options) const {
  run_call(member(), options, detail::all_reduce_call, tensor, op);
}

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor, ReduceOp op, const CallOptions& options) const {
  return submit(member(), options, detail::all_reduce_call, tensor, op);
}

void ProcessGroup::reduce(const at::Tensor& tensor, int dst, ReduceOp op, const CallOptions& options) const {
  run_call(member(), options, detail::reduce_call, tensor, dst, op);
}

Work ProcessGroup::reduce_async(const at::Tensor& tensor, int dst, ReduceOp op, const CallOptions& options) const {
  return submit(member(), options, detail::reduce_call, tensor, dst, op);
}

void ProcessGroup::broadcast(const at::Tensor& tensor, int src, const CallOptions& options) const {
  run_call(member(), options, detail::broadcast_call, tensor, src);
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor, int src, const CallOptions& options) const {
  return submit(member(), options, detail::broadcast_call, tensor, src);
}

void ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input, const CallOptions& options) const {
  run_call(member(), options, detail::all_gather_call, output, input);
}

Work ProcessGroup::all_gather_async(const at::Tensor& output, const at::Tensor& input,
                                    const CallOptions& options) const {
  return submit(member(), options, detail::all_gather_call, output, input);
}

void ProcessGroup::all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                              const CallOptions& options) const {
  run_call(member(), options, detail::all_gather_list_call, outputs, input);
}

Work ProcessGroup::all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                    const CallOptions& options) const {
  return submit(member(), options, detail::all_gather_list_call, outputs, input);
}

void ProcessGroup::gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst,
                          const CallOptions& options) const {
  run_call(member(), options, detail::gather_call, outputs, input, dst);
}

Work ProcessGroup::gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst,
                                const CallOptions& options) const {
  return submit(member(), options, detail::gather_call, outputs, input, dst);
}

void ProcessGroup::scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src,
                           const CallOptions& options) const {
  run_call(member(), options, detail::scatter_call, output, inputs, src);
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src,
                                 const CallOptions& options) const {
  return submit(member(), options, detail::scatter_call, output, inputs, src);
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                  const CallOptions& options) const {
  run_call(member(), options, detail::reduce_scatter_call, output, input, op);
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                        const CallOptions& options) const {
  return submit(member(), options, detail::reduce_scatter_call, output, input, op);
}

void ProcessGroup::all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                              const CallOptions& options) const {
  run_call(member(), options, detail::all_to_all_call, outputs, inputs);
}

Work ProcessGroup::all_to_all_async(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                    const CallOptions& options) const {
  return submit(member(), options, detail::all_to_all_call, outputs, inputs);
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, ReduceOp op,
                                  const CallOptions& options) const {
  run_call(member(), options, detail::reduce_scatter_list_call, output, inputs, op);
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, ReduceOp op,
                                        const CallOptions& options) const {
  return submit(member(), options, detail::reduce_scatter_list_call, output, inputs, op);
}

void ProcessGroup::all_to_all(const at::Tensor& output, const at::Tensor& input, const Splits& splits,
                              const CallOptions& options) const {
  run_call(member(), options, detail::all_to_all_rows_call, output, input, splits);
}

Work ProcessGroup::all_to_all_async(const at::Tensor& output, const at::Tensor& input, const Splits& splits,
                                    const CallOptions& options) const {
  return submit(member(), options, detail::all_to_all_rows_call, output, input, splits);
}

namespace {

/// One number in a tensor of a device that the group supports.
template <class Number>
at::Tensor tensor_with(const ProcessGroup& group, Number value) {
  const auto device = group.supports(c10::kCPU) ? c10::Device(c10::kCPU) : group.device();
  return at::full({1}, value, at::TensorOptions(c10::CppTypeToScalarType<Number>::value).device(device));
}

// Synchronizes first: after an aborted call the memory on a GPU must not be mistaken for a result.
template <class Number>
std::vector<Number> numbers_in(const ProcessGroup& group, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) group.synchronize();
  const auto local = tensor.cpu();
  const auto* first = local.data_ptr<Number>();
  return {first, first + local.numel()};
}

template <class Number>
Number reduced(const ProcessGroup& group, Number value, ReduceOp op, const CallOptions& options) {
  const auto tensor = tensor_with(group, value);
  group.all_reduce(tensor, op, options);
  return numbers_in<Number>(group, tensor)[0];
}

template <class Number>
Number copied(const ProcessGroup& group, Number value, int src, const CallOptions& options) {
  const auto tensor = tensor_with(group, value);
  group.broadcast(tensor, src, options);
  return numbers_in<Number>(group, tensor)[0];
}

template <class Number>
std::vector<Number> gathered(const ProcessGroup& group, Number value, const CallOptions& options) {
  const auto own = tensor_with(group, value);
  const auto all = at::empty({group.size()}, own.options());
  group.all_gather(all, own, options);
  return numbers_in<Number>(group, all);
}

}  // namespace

double ProcessGroup::all_reduce_number(double value, ReduceOp op, const CallOptions& options) const {
  return reduced(*this, value, op, options);
}

int64_t ProcessGroup::all_reduce_number(int64_t value, ReduceOp op, const CallOptions& options) const {
  return reduced(*this, value, op, options);
}

double ProcessGroup::broadcast_number(double value, int src, const CallOptions& options) const {
  return copied(*this, value, src, options);
}

int64_t ProcessGroup::broadcast_number(int64_t value, int src, const CallOptions& options) const {
  return copied(*this, value, src, options);
}

std::vector<double> ProcessGroup::all_gather_number(double value, const CallOptions& options) const {
  return gathered(*this, value, options);
}

std::vector<int64_t> ProcessGroup::all_gather_number(int64_t value, const CallOptions& options) const {
  return gathered(*this, value, options);
}

void ProcessGroup::send(const at::Tensor& tensor, int dst, uint32_t tag, const CallOptions& options) const {
  send_async(tensor, dst, tag, options).wait();
}

Work ProcessGroup::send_async(const at::Tensor& tensor, int dst, uint32_t tag, const CallOptions& options) const {
  member();
  return Work(make_shared_owned<MessageInFlight>(part_for(*group_, tensor).shared_from_this(), tensor, Operation::kSend,
                                                 dst, tag, options));
}

void ProcessGroup::recv(const at::Tensor& tensor, int src, uint32_t tag, const CallOptions& options) const {
  recv_async(tensor, src, tag, options).wait();
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int src, uint32_t tag, const CallOptions& options) const {
  member();
  return Work(make_shared_owned<MessageInFlight>(part_for(*group_, tensor).shared_from_this(), tensor, Operation::kRecv,
                                                 src, tag, options));
}

int ProcessGroup::recv_any(const at::Tensor& tensor, uint32_t tag, const CallOptions& options) const {
  member();
  auto& group = part_for(*group_, tensor);
  const auto& me = group.membership();
  if (me.size > 1) detail::check_message(me, Operation::kRecv, tensor, (me.rank + 1) % me.size);
  const auto [src, rest] = group.await_sender(tag, options);
  recv(tensor, src, tag, rest);
  return src;
}

std::vector<Work> ProcessGroup::exchange_async(const std::vector<Message>& messages, const CallOptions& options) const {
  member();
  const auto sends = [](const Message& message) { return message.direction == Message::Direction::kSend; };
  for (const auto& message : messages)
    detail::check_message(part_for(*group_, message.tensor).membership(),
                          sends(message) ? Operation::kSend : Operation::kRecv, message.tensor, message.peer);
  std::vector<Work> started;
  for (const auto& message : messages)
    started.push_back(sends(message) ? send_async(message.tensor, message.peer, message.tag, options)
                                     : recv_async(message.tensor, message.peer, message.tag, options));
  return started;
}

void ProcessGroup::exchange(const std::vector<Message>& messages, const CallOptions& options) const {
  for (const auto& work : exchange_async(messages, options)) work.wait();
}

void ProcessGroup::synchronize() const {
  member().synchronize();
}

void ProcessGroup::barrier(const CallOptions& options) const {
  member().for_control().run(detail::barrier_call(), options);
}

Work ProcessGroup::barrier_async(const CallOptions& options) const {
  return member().for_control().submit(detail::barrier_call(), options);
}

at::Tensor ProcessGroup::allocate(at::IntArrayRef sizes, at::ScalarType dtype) const {
  int64_t elements = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(dtype));
  return group_->backend()->allocate(bytes).view(dtype).view(sizes);
}

void ProcessGroup::destroy() const {
  group_->destroy();
}

void ProcessGroup::abort(const std::string& reason) const {
  member().abort(std::make_exception_ptr(PeerError(text("rank ", rank(), " gave up: ", reason), {},
                                                   Culprit{member().job()->rank(), CulpritRole::kGaveUp})));
}

}  // namespace lockstep
