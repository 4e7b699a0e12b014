#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/backend.h>

namespace lockstep::nccl {

/// Send and receive over NCCL. NCCL has no tags and matches messages in the order of calls. So each combination of
/// sender, receiver and tag is a channel with its own communicator and stream, and no channel blocks another. The first
/// message of a channel connects its two ranks, while both ranks are in wait() or is_done() of any message.
/// Thread-safe.
class PointToPoint {
 public:
  PointToPoint(std::shared_ptr<Store> store, int rank, c10::Device device);
  ~PointToPoint();

  /// Start after the work queued on the current stream so far. The transfer must not outlive this object.
  std::unique_ptr<Transfer> send(const at::Tensor& data, int to, uint32_t tag);
  std::unique_ptr<Transfer> receive(const at::Tensor& data, int from, uint32_t tag);

  /// Queues waiting messages on the device, as far as possible, without blocking. Returns whether there are channels.
  bool advance();

  /// Aborts all messages. All functions above throw `cause` afterwards. May block.
  void abort(std::exception_ptr cause) noexcept;

 private:
  struct Message;
  class Channel;
  class MessageTransfer;
  using Key = std::tuple<int, int, uint32_t>;  // from, to, tag

  std::unique_ptr<Transfer> post(const Key& key, const at::Tensor& data);
  std::shared_ptr<Channel> channel_of(const Key& key);
  std::vector<std::shared_ptr<Channel>> channels();
  bool is_done(const Message& message);

  const std::shared_ptr<Store> store_;
  const int rank_;
  const c10::Device device_;
  std::mutex work_mutex_;  // held while messages are queued; its holder may block in NCCL until an abort
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Channel>> channels_;  // guarded by mutex_; contents by work_mutex_ except in abort()
  std::exception_ptr cause_;                          // guarded by mutex_: why this was aborted
};

}  // namespace lockstep::nccl
