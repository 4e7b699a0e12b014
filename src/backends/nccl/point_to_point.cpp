#include "backends/nccl/point_to_point.h"

#include <algorithm>
#include <thread>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/error.h>

#include "backends/nccl/communicator.h"
#include "base/text.h"

namespace lockstep::nccl {
namespace {

constexpr int64_t kMaxTags = 64;  // a connection takes several MiB of GPU memory and is freed with the group
constexpr auto kProgressPause = std::chrono::microseconds(20);

}  // namespace

struct PointToPoint::Message {
  std::shared_ptr<Channel> channel;
  at::Tensor data;                    // kept alive until the message is done
  at::cuda::CUDAEvent begin{};        // when the data is ready to be read or written
  mutable at::cuda::CUDAEvent end{};  // recorded once the message is queued on the device
  bool is_queued = false;
};

/// Messages of one tag from one rank to another.
class PointToPoint::Channel {
 public:
  Channel(std::shared_ptr<Store> store, const Key& key, bool is_sender, c10::Device device)
      : is_sender_(is_sender),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        ranks_(std::move(store),
               text("point_to_point/", std::get<0>(key), '/', std::get<1>(key), '/', std::get<2>(key)),
               is_sender ? 0 : 1, 2) {}

  void post(std::shared_ptr<Message> message) { waiting_.push_back(std::move(message)); }

  /// Queues waiting messages on the device, as far as possible. Never blocks on the other rank, which may be waiting
  /// for another channel.
  void advance() {
    if (waiting_.empty() || !ranks_.is_ready()) return;
    for (; !waiting_.empty(); waiting_.pop_front()) {
      auto& message = *waiting_.front();
      if (!is_beginning_) begin(message);
      is_beginning_ = true;
      if (!ranks_.has_begun(kDoing)) return;
      is_beginning_ = false;
      message.end.record(stream_);
      message.is_queued = true;
    }
  }

  Communicator& ranks() { return ranks_; }

 private:
  static constexpr const char* kDoing = "a send or recv";

  void begin(Message& message) {
    message.begin.block(stream_);
    ranks_.begin(kDoing, [&](ncclComm_t ranks) {
      const auto& data = message.data;
      return is_sender_ ? ncclSend(data.data_ptr(), data.nbytes(), ncclInt8, 1, ranks, stream_)
                        : ncclRecv(data.data_ptr(), data.nbytes(), ncclInt8, 0, ranks, stream_);
    });
  }

  const bool is_sender_;
  const c10::cuda::CUDAStream stream_;
  Communicator ranks_;
  std::deque<std::shared_ptr<Message>> waiting_;  // messages that wait for the connection
  bool is_beginning_ = false;                     // the first waiting message
};

class PointToPoint::MessageTransfer final : public Transfer {
 public:
  MessageTransfer(PointToPoint& point_to_point, std::shared_ptr<Message> message)
      : point_to_point_(point_to_point), message_(std::move(message)) {}

  void wait(Deadline deadline) override {
    while (!is_done()) {
      if (std::chrono::steady_clock::now() >= deadline) throw TimeoutError("timed out: the message did not arrive");
      std::this_thread::sleep_for(kProgressPause);
    }
  }

  bool is_done() override { return point_to_point_.is_done(*message_); }

 private:
  PointToPoint& point_to_point_;
  const std::shared_ptr<Message> message_;
};

PointToPoint::PointToPoint(std::shared_ptr<Store> store, int rank, c10::Device device)
    : store_(std::move(store)), rank_(rank), device_(device) {}

PointToPoint::~PointToPoint() = default;

std::unique_ptr<Transfer> PointToPoint::send(const at::Tensor& data, int to, uint32_t tag) {
  return post({rank_, to, tag}, data);
}

std::unique_ptr<Transfer> PointToPoint::receive(const at::Tensor& data, int from, uint32_t tag) {
  return post({from, rank_, tag}, data);
}

std::unique_ptr<Transfer> PointToPoint::post(const Key& key, const at::Tensor& data) {
  c10::cuda::CUDAGuard guard(device_);
  std::lock_guard work(work_mutex_);
  const auto channel = channel_of(key);
  auto message = std::make_shared<Message>(Message{channel, data});
  message->begin.record(c10::cuda::getCurrentCUDAStream());
  channel->post(message);
  channel->advance();
  return std::make_unique<MessageTransfer>(*this, std::move(message));
}

bool PointToPoint::advance() {
  c10::cuda::CUDAGuard guard(device_);
  std::lock_guard work(work_mutex_);
  const auto all = channels();
  for (const auto& channel : all) channel->advance();
  return !all.empty();
}

// Advances all channels, not only the one of this message: another rank may be waiting for them.
bool PointToPoint::is_done(const Message& message) {
  c10::cuda::CUDAGuard guard(device_);
  std::lock_guard work(work_mutex_);
  for (const auto& channel : channels()) channel->advance();
  if (message.is_queued && message.end.query()) return true;
  message.channel->ranks().check_health();
  return false;
}

std::shared_ptr<PointToPoint::Channel> PointToPoint::channel_of(const Key& key) {
  std::lock_guard lock(mutex_);
  if (cause_) std::rethrow_exception(cause_);
  if (const auto found = channels_.find(key); found != channels_.end()) return found->second;
  const auto [from, to, tag] = key;
  const auto tags = std::count_if(channels_.begin(), channels_.end(), [&](const auto& entry) {
    return std::get<0>(entry.first) == from && std::get<1>(entry.first) == to;
  });
  if (tags >= kMaxTags)
    throw UsageError(text("backend 'nccl' supports ", kMaxTags, " different tags from one rank to another; tag ", tag,
                          " from rank ", from, " to rank ", to,
                          " exceeds that. Each tag has its own connection: reuse tags"));
  return channels_[key] = std::make_shared<Channel>(store_, key, from == rank_, device_);
}

std::vector<std::shared_ptr<PointToPoint::Channel>> PointToPoint::channels() {
  std::lock_guard lock(mutex_);
  if (cause_) std::rethrow_exception(cause_);
  std::vector<std::shared_ptr<Channel>> result;
  for (const auto& [key, channel] : channels_) result.push_back(channel);
  return result;
}

void PointToPoint::abort(std::exception_ptr cause) noexcept {
  std::vector<std::shared_ptr<Channel>> channels;
  {
    std::lock_guard lock(mutex_);
    if (cause_) return;
    cause_ = cause;
    for (auto& [key, channel] : channels_) channels.push_back(channel);
  }
  for (auto& channel : channels) channel->ranks().abort(cause);
}

}  // namespace lockstep::nccl
