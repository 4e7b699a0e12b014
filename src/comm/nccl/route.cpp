#include "comm/nccl/route.h"

#include <thread>

#include <c10/cuda/CUDAGuard.h>

#include <lockstep/error.h>

#include "comm/nccl/nccl.h"

namespace lockstep::nccl {
namespace {

constexpr auto kPause = std::chrono::microseconds(20);

}  // namespace

struct Route::Message {
  at::Tensor data;              // kept until it is done
  at::cuda::CUDAEvent begin{};  // when the data is ready, or free to be written
  at::cuda::CUDAEvent end{};    // once it is on its way
  bool is_on_its_way = false;   // guarded by the route's mutex
};

class Route::MessageTransfer final : public Transfer {
 public:
  MessageTransfer(Route& route, std::shared_ptr<Message> message) : route_(route), message_(std::move(message)) {}

  void wait(Deadline deadline) override {
    while (!is_done()) {
      if (std::chrono::steady_clock::now() >= deadline) throw TimeoutError("the message has not arrived in time");
      std::this_thread::sleep_for(kPause);
    }
    route_.ranks_.check_health();
  }

  bool is_done() override {
    c10::cuda::CUDAGuard guard(route_.device_);
    std::lock_guard lock(route_.mutex_);
    route_.advance();
    if (message_->is_on_its_way && message_->end.query()) return true;
    route_.ranks_.check_health();
    return false;
  }

 private:
  Route& route_;
  const std::shared_ptr<Message> message_;
};

Route::Route(std::shared_ptr<Store> store, const std::string& key, c10::Device device, End end)
    : end_(end),
      device_(device),
      stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
      ranks_(std::move(store), key, end == End::kSender ? 0 : 1, 2) {}

std::unique_ptr<Transfer> Route::post(const at::Tensor& data) {
  c10::cuda::CUDAGuard guard(device_);
  auto message = std::make_shared<Message>(Message{data});
  message->begin.record(c10::cuda::getCurrentCUDAStream());
  std::lock_guard lock(mutex_);
  waiting_.push_back(message);
  advance();
  return std::make_unique<MessageTransfer>(*this, std::move(message));
}

void Route::advance() {
  if (waiting_.empty() || !ranks_.is_ready()) return;
  for (; !waiting_.empty(); waiting_.pop_front()) {
    auto& message = *waiting_.front();
    message.begin.block(stream_);
    ranks_.call("a message", [&](ncclComm_t ranks) {
      const auto& data = message.data;
      return end_ == End::kSender ? ncclSend(data.data_ptr(), data.nbytes(), ncclInt8, 1, ranks, stream_)
                                  : ncclRecv(data.data_ptr(), data.nbytes(), ncclInt8, 0, ranks, stream_);
    });
    message.end.record(stream_);
    message.is_on_its_way = true;
  }
}

void Route::abort(std::exception_ptr cause) noexcept {
  ranks_.abort(std::move(cause));
}

}  // namespace lockstep::nccl
