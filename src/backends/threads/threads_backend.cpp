#include "backends/threads/threads_backend.h"

#include <unistd.h>

#include <cstring>
#include <sstream>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "backends/common/reduction.h"
#include "backends/common/slices.h"
#include "backends/threads/thread_group.h"

namespace lockstep {
namespace {

using threads::Hub;
using threads::Post;

class ThreadsTransfer final : public Transfer {
 public:
  ThreadsTransfer(std::shared_ptr<Hub> hub, int from, int to, uint32_t tag, int peer, std::shared_ptr<Post> post)
      : hub_(std::move(hub)), from_(from), to_(to), tag_(tag), peer_(peer), post_(std::move(post)) {}
  ~ThreadsTransfer() override { hub_->withdraw(from_, to_, tag_, post_); }

  void wait(Deadline deadline) override { hub_->wait(*post_, peer_, deadline); }
  bool is_done() override { return hub_->is_done(*post_); }

 private:
  const std::shared_ptr<Hub> hub_;
  const int from_, to_;
  const uint32_t tag_;
  const int peer_;
  const std::shared_ptr<Post> post_;
};

class ThreadsBackend final : public Backend {
 public:
  ThreadsBackend(int rank, int size, std::shared_ptr<Hub> hub) : rank_(rank), size_(size), hub_(std::move(hub)) {}

  at::Tensor allocate(int64_t bytes) override { return at::empty({bytes}, at::kByte); }

  void abort(std::exception_ptr cause) noexcept override { hub_->abort(cause); }

  // Every rank reduces its slice of all tensors and writes the result into all of them.
  void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) override {
    hub_->share(rank_, &data, call, [&] {
      Slice mine = slice_of(data.numel(), size_, rank_);
      auto parts = all_from(mine.begin);
      reduce_elements(parts[0], {parts.data(), parts.size()}, mine.size, data.scalar_type(), op);
      for (int r = 1; r < size_; ++r) std::memcpy(parts[r], parts[0], mine.size * data.element_size());
    });
  }

  void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) override {
    hub_->share(rank_, &data, call, [&] {
      Slice mine = slice_of(data.numel(), size_, rank_);
      auto parts = all_from(mine.begin);
      reduce_elements(parts[root], {parts.data(), parts.size()}, mine.size, data.scalar_type(), op);
    });
  }

  void broadcast(const at::Tensor& data, int root, const CallInfo& call) override {
    hub_->share(rank_, &data, call, [&] {
      if (rank_ != root) std::memcpy(bytes_of(data), bytes_of(hub_->board<at::Tensor>(root)), data.nbytes());
    });
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) override {
    hub_->share(rank_, &input, call, [&] {
      for (int r = 0; r < size_; ++r) {
        const char* from = bytes_of(hub_->board<at::Tensor>(r));
        char* to = bytes_of(output) + r * input.nbytes();
        if (to != from) std::memcpy(to, from, input.nbytes());
      }
    });
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) override {
    hub_->share(rank_, &input, call, [&] {
      auto parts = all_from(rank_ * output.numel());
      reduce_elements(bytes_of(output), {parts.data(), parts.size()}, output.numel(), output.scalar_type(), op);
    });
  }

  void exchange(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                const CallInfo& call) override {
    hub_->share(rank_, &sends, call, [&] {
      for (int r = 0; r < size_; ++r) {
        const at::Tensor& part = hub_->board<std::vector<at::Tensor>>(r)[rank_];
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
    hub_->share(rank_, nullptr, call, [] {});
  }

  std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t tag, uint64_t fingerprint) override {
    auto post =
        std::make_shared<Post>(Post{data.data_ptr(), static_cast<int64_t>(data.nbytes()), fingerprint, false, nullptr});
    hub_->post_send(rank_, to, tag, post);
    return std::make_unique<ThreadsTransfer>(hub_, rank_, to, tag, to, post);
  }

  std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t tag, uint64_t fingerprint) override {
    auto post =
        std::make_shared<Post>(Post{data.data_ptr(), static_cast<int64_t>(data.nbytes()), fingerprint, false, nullptr});
    hub_->post_recv(from, rank_, tag, post);
    return std::make_unique<ThreadsTransfer>(hub_, from, rank_, tag, from, post);
  }

 private:
  // All ranks' tensors, from element `begin` on.
  std::vector<void*> all_from(int64_t begin) const {
    std::vector<void*> result;
    for (int r = 0; r < size_; ++r) {
      const auto& tensor = hub_->board<at::Tensor>(r);
      result.push_back(bytes_of(tensor) + begin * tensor.element_size());
    }
    return result;
  }

  const int rank_;
  const int size_;
  const std::shared_ptr<Hub> hub_;
};

constexpr const char* kHub = "hub";
constexpr const char* kAttached = "attached";
constexpr const char* kComplete = "complete";

// Rank 0 makes the hub and tells the others its address, which means something to them because it is one process.
std::shared_ptr<Hub> host_hub(const BackendContext& context) {
  // Given up for lost when a rank does not come in time: it might still come and look.
  auto* shown = new std::shared_ptr<Hub>(std::make_shared<Hub>(context.size));
  context.store->set(kHub, text(::getpid(), ' ', reinterpret_cast<uintptr_t>(shown)));
  context.store->get(kComplete, context.timeout);
  auto hub = *shown;
  delete shown;
  return hub;
}

std::shared_ptr<Hub> find_hub(const BackendContext& context) {
  std::istringstream where(context.store->get(kHub, context.timeout));
  int64_t pid = 0;
  uintptr_t address = 0;
  where >> pid >> address;
  if (pid != ::getpid())
    throw UsageError(text("rank ", context.rank,
                          ": backend 'threads' joins threads of one process, but rank 0 is process ", pid,
                          " and this is ", ::getpid(), "; use another backend, or run_threads"));
  auto hub = *reinterpret_cast<std::shared_ptr<Hub>*>(address);
  if (context.store->add(kAttached, 1) == context.size - 1) context.store->set(kComplete, "");
  return hub;
}

}  // namespace

std::unique_ptr<Backend> make_threads_backend(const BackendContext& context) {
  std::shared_ptr<Hub> hub = context.size == 1   ? std::make_shared<Hub>(1)
                             : context.rank == 0 ? host_hub(context)
                                                 : find_hub(context);
  return std::make_unique<ThreadsBackend>(context.rank, context.size, std::move(hub));
}

}  // namespace lockstep
