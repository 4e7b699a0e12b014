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

/// The messages of one rank. NCCL knows no tags and matches messages in the order of its calls, so that those of one
/// tag from one rank to another have a communicator and a stream of their own, a channel, and no channel can hold up
/// another. The first message of a channel connects its two ranks, while each of them is in wait() or is_done() of any
/// message. Thread-safe.
class PointToPoint {
 public:
  PointToPoint(std::shared_ptr<Store> store, int rank, c10::Device device);
  ~PointToPoint();

  /// After what the current stream was given so far. The transfer must not outlive the point_to_point.
  std::unique_ptr<Transfer> send(const at::Tensor& data, int to, uint32_t tag);
  std::unique_ptr<Transfer> receive(const at::Tensor& data, int from, uint32_t tag);

  /// Ends what waits; all of the above throw `cause` from then on. May take a while.
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
  std::mutex work_mutex_;  // whose holder moves messages, and may be stuck until an abort
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Channel>> channels_;  // guarded by mutex_; they by work_mutex_, but for abort()
  std::exception_ptr cause_;                          // guarded by mutex_: why it is aborted
};

}  // namespace lockstep::nccl
