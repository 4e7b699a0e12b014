#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/backend.h>

#include "comm/nccl/communicator.h"

namespace lockstep::nccl {

/// The messages of one tag from one rank to another. NCCL knows no tags and matches messages in the order of their
/// calls, so that each such route has a communicator and a stream of its own, and none can hold up another. The first
/// message connects the two ranks, while either of them is in wait() or is_done(). Thread-safe.
class Route {
 public:
  enum class End { kSender, kReceiver };

  Route(std::shared_ptr<Store> store, const std::string& key, c10::Device device, End end);

  /// After what the current stream was given so far. The transfer must not outlive the route.
  std::unique_ptr<Transfer> post(const at::Tensor& data);

  void abort(std::exception_ptr cause) noexcept;

 private:
  struct Message;
  class MessageTransfer;

  void advance();

  const End end_;
  const c10::Device device_;
  const c10::cuda::CUDAStream stream_;
  Communicator ranks_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Message>> waiting_;  // guarded by mutex_: for the connection
};

}  // namespace lockstep::nccl
