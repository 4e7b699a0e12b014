#include "backends/factories.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/error.h>

#include "backends/nccl/communicator.h"
#include "backends/nccl/fold.h"
#include "backends/nccl/gpu.h"
#include "backends/nccl/nccl.h"
#include "backends/nccl/point_to_point.h"
#include "backends/nccl/queued_on_stream.h"
#include "backends/shm/call_log.h"
#include "base/start_thread.h"
#include "base/text.h"
#include "rendezvous/process_id.h"
#include "rendezvous/store/protocol.h"

namespace lockstep {
namespace {

using namespace nccl;

constexpr int64_t kFoldBytes = 64 << 20;  // largest buffer for the parts of all ranks
constexpr auto kAbortPause = std::chrono::microseconds(20);

cudaStream_t current_cuda_stream() {
  return c10::cuda::getCurrentCUDAStream();
}

// NCCL itself reports shared GPUs only in the first call, and does not name the ranks.
void refuse_shared_gpus(const BackendContext& context) {
  const char* host = std::getenv("NCCL_HOSTID");  // overrides NCCL's identification of the host
  const auto gpus =
      context.store->all_gather("gpu", context.rank, context.size,
                                pack({host ? host : this_process().host_id, bus_id(context.device)}), context.timeout);
  std::map<std::string, int> owners;
  for (int rank = 0; rank < context.size; ++rank) {
    const auto& gpu = gpus[rank];
    const auto [owner, is_new] = owners.emplace(gpu, rank);
    if (!is_new)
      throw UsageError(text("ranks ", owner->second, " and ", rank, " have the same GPU (", unpack(gpu).at(1),
                            "), but NCCL needs one GPU per rank; start at most one rank per GPU on each host, or set "
                            ".device = cpu"));
  }
}

class NcclBackend final : public Backend {
 public:
  explicit NcclBackend(const BackendContext& context)
      : rank_(context.rank),
        size_(context.size),
        device_(context.device),
        store_(context.store),
        own_stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index())),
        point_to_point_(std::make_shared<PointToPoint>(store_, rank_, device_)) {
    refuse_shared_gpus(context);
    c10::cuda::CUDAGuard guard(device_);
    communicator_ = std::make_shared<Communicator>(store_, "communicator", rank_, size_);
    call_log_ = std::make_unique<shm::CallLog>(context);
  }

  at::Tensor allocate(int64_t bytes) override {
    return at::empty({bytes}, at::TensorOptions(at::kByte).device(device_));
  }

  // Aborting NCCL calls takes long. A background thread does it, so that the failure is reported without delay.
  void abort(std::exception_ptr cause) noexcept override {
    if (is_aborted_.exchange(true)) return;
    const auto end_calls = [communicator = communicator_, point_to_point = point_to_point_, cause] {
      communicator->abort(cause);
      point_to_point->abort(cause);
    };
    try {
      run_in_background("aborting NCCL's calls", end_calls);
    } catch (const Error&) {  // no thread available: aborts on this thread
      end_calls();
    }
  }

  // --- streams

  bool is_queueing() const override { return true; }

  std::shared_ptr<QueuedCall> queue(const std::function<void()>& call, Stream where) override {
    c10::cuda::CUDAGuard guard(device_);
    const auto current = c10::cuda::getCurrentCUDAStream();
    const auto& stream = where == Stream::kOwn ? own_stream_ : current;
    if (where == Stream::kOwn) {
      fork_.record(current);
      fork_.block(own_stream_);
    }
    if (last_) last_->end().order(stream);
    c10::cuda::CUDAStreamGuard stream_guard(stream);
    call();
    last_ = std::make_shared<QueuedOnStream>(stream, communicator_);
    return last_;
  }

  // --- collectives, on the current stream

  void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) override {
    if (!reduces(op, data.scalar_type())) return fold_everywhere(data, op, call, true);
    with_ranks(call, "all_reduce", [&](ncclComm_t ranks) {
      return ncclAllReduce(data.data_ptr(), data.data_ptr(), data.numel(), data_type(data.scalar_type()),
                           operation_over_ranks(op), ranks, current_cuda_stream());
    });
  }

  void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) override {
    if (!reduces(op, data.scalar_type())) return fold_everywhere(data, op, call, rank_ == root);
    with_ranks(call, "reduce", [&](ncclComm_t ranks) {
      return ncclReduce(data.data_ptr(), data.data_ptr(), data.numel(), data_type(data.scalar_type()),
                        operation_over_ranks(op), root, ranks, current_cuda_stream());
    });
  }

  void broadcast(const at::Tensor& data, int root, const CallInfo& call) override {
    with_ranks(call, "broadcast", [&](ncclComm_t ranks) {
      return ncclBroadcast(data.data_ptr(), data.data_ptr(), data.nbytes(), ncclInt8, root, ranks,
                           current_cuda_stream());
    });
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) override {
    with_ranks(call, "all_gather", [&](ncclComm_t ranks) {
      return ncclAllGather(input.data_ptr(), output.data_ptr(), input.nbytes(), ncclInt8, ranks, current_cuda_stream());
    });
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) override {
    if (reduces(op, input.scalar_type()))
      return with_ranks(call, "reduce_scatter", [&](ncclComm_t ranks) {
        return ncclReduceScatter(input.data_ptr(), output.data_ptr(), output.numel(), data_type(input.scalar_type()),
                                 operation_over_ranks(op), ranks, current_cuda_stream());
      });
    c10::NoGradGuard no_grad;
    auto rows = at::empty({size_, output.numel()}, output.options());
    all_to_all_v(rows.unbind(), input.view({size_, -1}).unbind(), call);
    output.view({-1}).copy_(fold(rows, op));
  }

  void reduce_scatter_v(const at::Tensor& output, const std::vector<at::Tensor>& inputs, ReduceOp op,
                        const CallInfo& call) override {
    const auto any = std::find_if(inputs.begin(), inputs.end(), [](const at::Tensor& part) { return part.defined(); });
    if (any == inputs.end()) return;
    if (reduces(op, any->scalar_type()))
      return with_ranks(call, "reduce_scatter", [&](ncclComm_t ranks) {
        check(ncclGroupStart(), "reduce_scatter");  // errors of the calls below are returned by ncclGroupEnd
        for (int root = 0; root < size_; ++root)
          if (const auto& part = inputs[root]; part.defined())
            ncclReduce(part.data_ptr(), root == rank_ ? output.data_ptr() : nullptr, part.numel(),
                       data_type(part.scalar_type()), operation_over_ranks(op), root, ranks, current_cuda_stream());
        return ncclGroupEnd();
      });
    c10::NoGradGuard no_grad;
    std::vector<at::Tensor> received(inputs.size());
    at::Tensor rows;
    if (output.defined()) received = (rows = at::empty({size_, output.numel()}, output.options())).unbind();
    all_to_all_v(received, inputs, call);
    if (output.defined()) output.view({-1}).copy_(fold(rows, op));
  }

  void all_to_all_v(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                    const CallInfo& call) override {
    if (receives[rank_].defined() && !receives[rank_].is_same(sends[rank_])) {
      c10::NoGradGuard no_grad;
      receives[rank_].view({-1}).copy_(sends[rank_].view({-1}));
    }
    with_ranks(call, "all_to_all", [&](ncclComm_t ranks) {
      check(ncclGroupStart(), "all_to_all");  // errors of the calls below are returned by ncclGroupEnd
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        const auto& out = sends[peer];
        const auto& in = receives[peer];
        if (out.defined()) ncclSend(out.data_ptr(), out.nbytes(), ncclInt8, peer, ranks, current_cuda_stream());
        if (in.defined()) ncclRecv(in.data_ptr(), in.nbytes(), ncclInt8, peer, ranks, current_cuda_stream());
      }
      return ncclGroupEnd();
    });
  }

  // The only collective that blocks the host.
  void barrier(const CallInfo& call) override {
    auto token = at::zeros({1}, at::TensorOptions(at::kByte).device(device_));
    all_reduce(token, ReduceOp::kSum, call);
    QueuedOnStream end(c10::cuda::getCurrentCUDAStream(), communicator_);
    while (!end.is_done()) {
      if (std::chrono::steady_clock::now() >= call.deadline)
        throw TimeoutError("timed out: not all ranks reached the barrier");
      std::this_thread::sleep_for(kAbortPause);
    }
    communicator_->check_health();  // an aborted call is done too; this throws the cause
  }

  // --- messages

  std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t tag,
                                       uint64_t /*fingerprint*/) override {
    return point_to_point_->send(data, to, tag);
  }
  std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t tag,
                                       uint64_t /*fingerprint*/) override {
    return point_to_point_->receive(data, from, tag);
  }
  bool advance_messages() override { return point_to_point_->advance(); }

 private:
  // With one rank, NCCL reads and writes all data for an average, but nothing for a sum.
  ncclRedOp_t operation_over_ranks(ReduceOp op) const {
    return operation(size_ == 1 && op == ReduceOp::kAvg ? ReduceOp::kSum : op);
  }

  void with_ranks(const CallInfo& call, const char* doing, const std::function<ncclResult_t(ncclComm_t)>& calls) {
    call_log_->write(call.fingerprint);
    communicator_->await(call.deadline);
    communicator_->call(doing, call.deadline, calls);
  }

  // Every rank gathers the tensors of all ranks and reduces them itself.
  void fold_everywhere(const at::Tensor& data, ReduceOp op, const CallInfo& call, bool keeps_result) {
    c10::NoGradGuard no_grad;
    const auto flat = data.view({-1});
    const auto width = static_cast<int64_t>(data.element_size());
    const int64_t piece = std::max<int64_t>(kFoldBytes / width / size_, 1);
    for (int64_t begin = 0; begin < flat.numel(); begin += piece) {
      auto part = flat.narrow(0, begin, std::min(piece, flat.numel() - begin));
      auto rows = at::empty({size_, part.numel()}, part.options());
      all_gather(rows, part, call);
      if (keeps_result) part.copy_(fold(rows, op));
    }
  }

  const int rank_;
  const int size_;
  const c10::Device device_;
  const std::shared_ptr<Store> store_;
  const c10::cuda::CUDAStream own_stream_;
  std::shared_ptr<Communicator> communicator_;  // constant after construction
  std::unique_ptr<shm::CallLog> call_log_;      // constant after construction; used only by the executing thread
  const std::shared_ptr<PointToPoint> point_to_point_;
  at::cuda::CUDAEvent fork_;              // used only by the thread whose call is executing
  std::shared_ptr<QueuedOnStream> last_;  // used only by the thread whose call is executing
  std::atomic<bool> is_aborted_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_nccl_backend(const BackendContext& context) {
  if (!context.device.is_cuda())
    throw UsageError(
        "backend 'nccl' moves CUDA tensors, but this group is for the CPU; leave .device unset, or set it to a GPU");
  return std::make_unique<NcclBackend>(context);
}

}  // namespace lockstep
