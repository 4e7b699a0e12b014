#include <lockstep/process_group.h>

#include <mutex>
#include <numeric>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/collectives.h"
#include "comm/dense.h"
#include "comm/group.h"

namespace lockstep {
namespace {

enum class Direction { kSend, kRecv };

/// A message under way, with the user's tensor and its dense stand-in.
class Message final : public detail::Completion {
 public:
  Message(std::shared_ptr<detail::Group> group, const at::Tensor& tensor, Direction direction, int peer, uint32_t tag)
      : group_(std::move(group)), tensor_(tensor), direction_(direction) {
    bool sends = direction == Direction::kSend;
    detail::check_message(group_->membership(), name(), tensor, peer, !sends);
    dense_ = sends ? detail::dense_input(tensor) : detail::dense_output(tensor);
    if (!dense_.defined()) return;
    group_->guard(name(), [&](Deadline) {
      auto& backend = group_->backend();
      transfer_ = sends ? backend.start_send(dense_, peer, tag) : backend.start_recv(dense_, peer, tag);
    });
  }

  void wait() override {
    auto transfer = current();
    if (!transfer) return;
    group_->guard(name(), [&](Deadline deadline) { transfer->wait(deadline); });
    std::lock_guard lock(mutex_);
    if (!transfer_) return;  // another thread has waited too
    transfer_.reset();
    if (direction_ == Direction::kRecv) detail::store(tensor_, dense_);
  }

  bool is_done() override {
    auto transfer = current();
    return !transfer || transfer->is_done();
  }

 private:
  std::shared_ptr<Transfer> current() {
    std::lock_guard lock(mutex_);
    return transfer_;
  }

  const char* name() const { return direction_ == Direction::kSend ? "send" : "recv"; }

  const std::shared_ptr<detail::Group> group_;
  const at::Tensor tensor_;
  const Direction direction_;
  at::Tensor dense_;  // constant after construction
  std::mutex mutex_;
  std::shared_ptr<Transfer> transfer_;  // guarded by mutex_; empty when done
};

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<detail::Group> group) : group_(std::move(group)) {}

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

const std::string& ProcessGroup::backend_name() const {
  return group_->membership().backend_name;
}

std::chrono::milliseconds ProcessGroup::timeout() const {
  return group_->membership().timeout;
}

void ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  group_->run("all_reduce", all_reduce_call(group_->membership(), tensor, op));
}

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor, ReduceOp op) const {
  return group_->submit("all_reduce", all_reduce_call(group_->membership(), tensor, op));
}

void ProcessGroup::reduce(const at::Tensor& tensor, int dst, ReduceOp op) const {
  group_->run("reduce", reduce_call(group_->membership(), tensor, dst, op));
}

Work ProcessGroup::reduce_async(const at::Tensor& tensor, int dst, ReduceOp op) const {
  return group_->submit("reduce", reduce_call(group_->membership(), tensor, dst, op));
}

void ProcessGroup::broadcast(const at::Tensor& tensor, int src) const {
  group_->run("broadcast", broadcast_call(group_->membership(), tensor, src));
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor, int src) const {
  return group_->submit("broadcast", broadcast_call(group_->membership(), tensor, src));
}

void ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  group_->run("all_gather", all_gather_call(group_->membership(), output, input));
}

Work ProcessGroup::all_gather_async(const at::Tensor& output, const at::Tensor& input) const {
  return group_->submit("all_gather", all_gather_call(group_->membership(), output, input));
}

void ProcessGroup::all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) const {
  group_->run("all_gather", all_gather_call(group_->membership(), outputs, input));
}

Work ProcessGroup::all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input) const {
  return group_->submit("all_gather", all_gather_call(group_->membership(), outputs, input));
}

void ProcessGroup::gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst) const {
  group_->run("gather", gather_call(group_->membership(), outputs, input, dst));
}

Work ProcessGroup::gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst) const {
  return group_->submit("gather", gather_call(group_->membership(), outputs, input, dst));
}

void ProcessGroup::scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src) const {
  group_->run("scatter", scatter_call(group_->membership(), output, inputs, src));
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src) const {
  return group_->submit("scatter", scatter_call(group_->membership(), output, inputs, src));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  group_->run("reduce_scatter", reduce_scatter_call(group_->membership(), output, input, op));
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  return group_->submit("reduce_scatter", reduce_scatter_call(group_->membership(), output, input, op));
}

void ProcessGroup::all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) const {
  group_->run("all_to_all", all_to_all_call(group_->membership(), outputs, inputs));
}

Work ProcessGroup::all_to_all_async(const std::vector<at::Tensor>& outputs,
                                    const std::vector<at::Tensor>& inputs) const {
  return group_->submit("all_to_all", all_to_all_call(group_->membership(), outputs, inputs));
}

void ProcessGroup::send(const at::Tensor& tensor, int dst, uint32_t tag) const {
  send_async(tensor, dst, tag).wait();
}

Work ProcessGroup::send_async(const at::Tensor& tensor, int dst, uint32_t tag) const {
  return Work(std::make_shared<Message>(group_, tensor, Direction::kSend, dst, tag));
}

void ProcessGroup::recv(const at::Tensor& tensor, int src, uint32_t tag) const {
  recv_async(tensor, src, tag).wait();
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int src, uint32_t tag) const {
  return Work(std::make_shared<Message>(group_, tensor, Direction::kRecv, src, tag));
}

void ProcessGroup::barrier() const {
  group_->run("barrier", detail::barrier_call());
}

Work ProcessGroup::barrier_async() const {
  return group_->submit("barrier", detail::barrier_call());
}

at::Tensor ProcessGroup::allocate(at::IntArrayRef sizes, at::ScalarType dtype) const {
  int64_t elements = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(dtype));
  return group_->backend().allocate(bytes).view(dtype).view(sizes);
}

void ProcessGroup::abort(const std::string& reason) const {
  group_->abort(std::make_exception_ptr(PeerError(text("rank ", rank(), " gave up: ", reason))));
}

}  // namespace lockstep
