#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

#include <ATen/core/Tensor.h>

#include <lockstep/backend.h>

#include "backends/messages/link.h"
#include "backends/mpi/communicators.h"
#include "backends/mpi/mpi.h"

namespace lockstep::mpi {

/// The Link of messages::MessageBackend over MPI. Thread-safe.
class MpiLink {
 public:
  class Request;

  static constexpr int64_t kSmallBytes = 32 << 10;
  static constexpr int64_t kPieceBytes = 256 << 10;
  /// Short buffers are split into messages that MPI sends eagerly. No message exceeds the range of int, in which MPI
  /// counts bytes.
  static size_t part_bytes(size_t bytes, messages::Channel::Kind kind) {
    return bytes <= 16 << 10 && kind != messages::Channel::Kind::kOneWay ? 4000 : size_t{1} << 30;
  }

  /// On one host the receiving process copies the data itself: the copy is best made right before the reduction.
  int64_t pieces_ahead() const { return is_on_one_host_ ? 1 : 4; }

  /// Collective.
  explicit MpiLink(const BackendContext& context);
  ~MpiLink();

  Request start(messages::Direction direction, const messages::Buffer& buffer, const messages::Channel& channel);
  void finish(Request& request, Deadline deadline);

  std::unique_ptr<Transfer> start_message(messages::Direction direction, const at::Tensor& data, int peer, uint32_t tag,
                                          uint64_t fingerprint);

  bool advance_messages();

  void abort(std::exception_ptr cause) noexcept;

  /// Keeps the tensor alive until the process ends if MPI may still use the memory of a canceled request.
  void keep(const at::Tensor& tensor);

 private:
  class Message;

  using Send = decltype(&MPI_Isend);

  Request start_receive(const messages::Buffer& buffer, int tag, MPI_Comm communicator);
  Request start_send(const messages::Buffer& buffer, int tag, MPI_Comm communicator, Send send);
  int collective_tag(const messages::Channel& channel) const;
  int message_tag(uint32_t tag, uint64_t fingerprint) const;
  template <class IsDone>
  void wait(const IsDone& is_done, int peer, messages::Direction direction, Deadline deadline);
  void throw_if_aborted();

  Communicators communicators_;  // constant after construction; null for a single rank
  const bool is_on_one_host_;
  const int polls_;  // polls before a waiting thread yields
  std::atomic<bool> is_aborted_{false};
  std::atomic<bool> has_orphans_{false};  // some request could not be canceled
  std::mutex mutex_;
  std::exception_ptr cause_;  // guarded by mutex_
};

/// A message in transit to or from one peer. Not thread-safe.
class MpiLink::Request {
 public:
  Request(Request&& other) noexcept;
  Request& operator=(Request&&) = delete;
  ~Request();

  /// Polls. Throws MismatchError when the number of received bytes is not the expected one, and PeerError for all other
  /// errors of MPI.
  bool is_done();

 private:
  friend class MpiLink;
  Request(MpiLink& link, messages::Direction direction, const messages::Buffer& buffer)
      : link_(link), direction_(direction), buffer_(buffer) {}

  MpiLink& link_;
  const messages::Direction direction_;
  const messages::Buffer buffer_;
  MPI_Request request_ = MPI_REQUEST_NULL;
};

}  // namespace lockstep::mpi
