#include "backends/factories.h"

#include <unistd.h>

#include <cstring>
#include <sstream>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "backends/common/reduction.h"
#include "backends/common/slices.h"
#include "backends/threads/thread_group.h"
#include "base/text.h"

namespace lockstep {
namespace {

using threads::MessageEnd;
using threads::ThreadGroup;

class ThreadsTransfer final : public Transfer {
 public:
  ThreadsTransfer(std::shared_ptr<ThreadGroup> group, int from, int to, uint32_t tag, int peer,
                  std::shared_ptr<MessageEnd> end)
      : group_(std::move(group)), from_(from), to_(to), tag_(tag), peer_(peer), end_(std::move(end)) {}
  ~ThreadsTransfer() override { group_->withdraw(from_, to_, tag_, end_); }

  void wait(Deadline deadline) override { group_->wait(*end_, peer_, deadline); }
  bool is_done() override { return group_->is_done(*end_); }

 private:
  const std::shared_ptr<ThreadGroup> group_;
  const int from_, to_;
  const uint32_t tag_;
  const int peer_;
  const std::shared_ptr<MessageEnd> end_;
};

class ThreadsBackend final : public Backend {
 public:
  ThreadsBackend(int rank, int size, std::shared_ptr<ThreadGroup> group)
      : rank_(rank), size_(size), group_(std::move(group)) {}

  at::Tensor allocate(int64_t bytes) override { return at::empty({bytes}, at::kByte); }

  void abort(std::exception_ptr cause) noexcept override { group_->abort(cause); }

  // Every rank reduces its slice of all tensors and writes the result to all tensors.
  void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) override {
    group_->share(rank_, &data, call, [&] {
      Slice own_slice = slice_of(data.numel(), size_, rank_);
      auto parts = all_from(own_slice.begin);
      reduce_elements(parts[0], {parts.data(), parts.size()}, own_slice.size, data.scalar_type(), op);
      for (int r = 1; r < size_; ++r) std::memcpy(parts[r], parts[0], own_slice.size * data.element_size());
    });
  }

  void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) override {
    group_->share(rank_, &data, call, [&] {
      Slice own_slice = slice_of(data.numel(), size_, rank_);
      auto parts = all_from(own_slice.begin);
      reduce_elements(parts[root], {parts.data(), parts.size()}, own_slice.size, data.scalar_type(), op);
    });
  }

  void broadcast(const at::Tensor& data, int root, const CallInfo& call) override {
    group_->share(rank_, &data, call, [&] {
      if (rank_ != root) std::memcpy(bytes_of(data), bytes_of(group_->published<at::Tensor>(root)), data.nbytes());
    });
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) override {
    group_->share(rank_, &input, call, [&] {
      for (int r = 0; r < size_; ++r) {
        const char* from = bytes_of(group_->published<at::Tensor>(r));
        char* to = bytes_of(output) + r * input.nbytes();
        if (to != from) std::memcpy(to, from, input.nbytes());
      }
    });
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) override {
    group_->share(rank_, &input, call, [&] {
      auto parts = all_from(rank_ * output.numel());
      reduce_elements(bytes_of(output), {parts.data(), parts.size()}, output.numel(), output.scalar_type(), op);
    });
  }

  void all_to_all_v(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                    const CallInfo& call) override {
    group_->share(rank_, &sends, call, [&] {
      for (int r = 0; r < size_; ++r) {
        const at::Tensor& part = group_->published<std::vector<at::Tensor>>(r)[rank_];
        size_t sent = part.defined() ? part.nbytes() : 0;
        size_t expected = receives[r].defined() ? receives[r].nbytes() : 0;
        if (sent != expected)
          throw MismatchError(text("rank ", r, " sends ", sent, " bytes, but rank ", rank_, " expects ", expected));
        if (sent > 0 && bytes_of(receives[r]) != bytes_of(part))
          std::memcpy(bytes_of(receives[r]), bytes_of(part), sent);
      }
    });
  }

  void barrier(const CallInfo& call) override {
    group_->share(rank_, nullptr, call, [] {});
  }

  bool shares_memory() const override { return true; }

  at::Tensor allocate_shared(int64_t bytes, const CallInfo& call) override {
    auto memory = rank_ == 0 ? at::zeros({bytes}, at::kByte) : at::Tensor();
    group_->share(rank_, &memory, call, [&] {
      if (rank_ != 0) memory = group_->published<at::Tensor>(0);
    });
    // Ranks share the bytes, as over shm, but not the tensor and its storage.
    return at::from_blob(
        memory.data_ptr(), {bytes}, [memory](void*) {}, at::kByte);
  }

  void reduce_ranges(const at::Tensor& data, ReduceOp op, const std::vector<Range>& ranges, const Consume& consume,
                     const CallInfo& call) override {
    group_->share(rank_, &data, call, [&] {
      const auto all = all_from(0);
      reduce_ranges_in_cache({all.data(), all.size()}, data, op, ranges, consume);
    });
  }

  std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t tag, uint64_t fingerprint) override {
    auto end = std::make_shared<MessageEnd>(
        MessageEnd{data.data_ptr(), static_cast<int64_t>(data.nbytes()), fingerprint, false, nullptr});
    group_->post_send(rank_, to, tag, end);
    return std::make_unique<ThreadsTransfer>(group_, rank_, to, tag, to, end);
  }

  std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t tag, uint64_t fingerprint) override {
    auto end = std::make_shared<MessageEnd>(
        MessageEnd{data.data_ptr(), static_cast<int64_t>(data.nbytes()), fingerprint, false, nullptr});
    group_->post_recv(from, rank_, tag, end);
    return std::make_unique<ThreadsTransfer>(group_, from, rank_, tag, from, end);
  }

 private:
  // Pointers to element `begin` of the tensors of all ranks.
  std::vector<void*> all_from(int64_t begin) const {
    std::vector<void*> result;
    for (int r = 0; r < size_; ++r) {
      const auto& tensor = group_->published<at::Tensor>(r);
      result.push_back(bytes_of(tensor) + begin * tensor.element_size());
    }
    return result;
  }

  const int rank_;
  const int size_;
  const std::shared_ptr<ThreadGroup> group_;
};

constexpr const char* kGroupKey = "group";
constexpr const char* kAttached = "attached";
constexpr const char* kComplete = "complete";

// Rank 0 creates the group and publishes its address in the store. The address is valid for all ranks of one process.
std::shared_ptr<ThreadGroup> host_group(const BackendContext& context) {
  // Leaked when a rank does not arrive before the time-out: that rank may still read it later.
  auto* shown = new std::shared_ptr<ThreadGroup>(std::make_shared<ThreadGroup>(context.size));
  context.store->set(kGroupKey, text(::getpid(), ' ', reinterpret_cast<uintptr_t>(shown)));
  context.store->get(kComplete, context.timeout);
  auto group = *shown;
  delete shown;
  return group;
}

std::shared_ptr<ThreadGroup> find_group(const BackendContext& context) {
  std::istringstream where(context.store->get(kGroupKey, context.timeout));
  int64_t pid = 0;
  uintptr_t address = 0;
  where >> pid >> address;
  if (pid != ::getpid())
    throw UsageError(context.rank, text("backend 'threads' needs all ranks in one process, but rank 0 is in process ",
                                        pid, " and this rank in ", ::getpid(),
                                        "; use another backend, or start the ranks with run_threads"));
  auto group = *reinterpret_cast<std::shared_ptr<ThreadGroup>*>(address);
  if (context.store->add(kAttached, 1) == context.size - 1) context.store->set(kComplete, "");
  return group;
}

}  // namespace

std::unique_ptr<Backend> make_threads_backend(const BackendContext& context) {
  std::shared_ptr<ThreadGroup> group = context.size == 1   ? std::make_shared<ThreadGroup>(1)
                                       : context.rank == 0 ? host_group(context)
                                                           : find_group(context);
  return std::make_unique<ThreadsBackend>(context.rank, context.size, std::move(group));
}

}  // namespace lockstep
