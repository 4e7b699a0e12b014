#include "backends/mpi/mpi_link.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include <lockstep/error.h>

#include "backends/factories.h"
#include "backends/messages/message_backend.h"
#include "backends/mpi/mpi_library.h"
#include "base/text.h"

namespace lockstep::mpi {
namespace {

using messages::Buffer;
using messages::Channel;
using messages::Direction;
using Clock = std::chrono::steady_clock;

constexpr int kPolls = 2000;  // a few hundred microseconds
constexpr auto kYielding = std::chrono::microseconds(500);
constexpr auto kMaxSleep = std::chrono::milliseconds(1);
constexpr int kKindBits = 2;
constexpr int kUserTagBits = 16;

[[noreturn]] void throw_error(int code, int peer) {
  int kind = MPI_SUCCESS;
  MPI_Error_class(code, &kind);
  auto message = text("MPI error with rank ", peer, ": ", describe_error(code));
  if (kind == MPI_ERR_TRUNCATE) throw MismatchError(message);
  throw PeerError(message);
}

}  // namespace

// --- requests

MpiLink::Request::Request(Request&& other) noexcept
    : link_(other.link_),
      direction_(other.direction_),
      buffer_(other.buffer_),
      request_(std::exchange(other.request_, MPI_REQUEST_NULL)) {}

// MPI can cancel a receive that has not matched a message. Any other request stays with MPI, and its memory must stay
// alive.
MpiLink::Request::~Request() {
  if (request_ == MPI_REQUEST_NULL) return;
  int is_over = 0;
  if (direction_ == Direction::kRecv) MPI_Cancel(&request_);
  if (MPI_Test(&request_, &is_over, MPI_STATUS_IGNORE) != MPI_SUCCESS || !is_over) link_.has_orphans_ = true;
}

bool MpiLink::Request::is_done() {
  if (request_ == MPI_REQUEST_NULL) return true;
  int is_over = 0;
  MPI_Status status;
  if (int code = MPI_Test(&request_, &is_over, &status); code != MPI_SUCCESS) throw_error(code, buffer_.peer);
  if (!is_over || direction_ == Direction::kSend) return is_over != 0;
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  if (static_cast<size_t>(bytes) != buffer_.bytes)
    throw MismatchError(text("rank ", buffer_.peer, " sent ", bytes, " bytes, but ", buffer_.bytes, " were expected"));
  return true;
}

/// A message between two ranks that the user sends. A send is done when it was received.
class MpiLink::Message final : public Transfer {
 public:
  Message(MpiLink& link, Direction direction, const at::Tensor& data, int peer, int tag)
      : link_(link), direction_(direction), peer_(peer), data_(data) {
    char* begin = static_cast<char*>(data.data_ptr());
    const MPI_Comm communicator = link_.communicators_.messages;
    const size_t most = part_bytes(data.nbytes(), Channel::Kind::kOneWay);
    try {
      for (size_t done = 0; done < data.nbytes(); done += most) {
        const Buffer buffer{peer, begin + done, std::min(data.nbytes() - done, most)};
        requests_.push_back(direction == Direction::kSend ? link_.start_send(buffer, tag, communicator, MPI_Issend)
                                                          : link_.start_receive(buffer, tag, communicator));
      }
    } catch (...) {  // MPI may still use the memory of the parts that were started
      requests_.clear();
      link_.keep(data_);
      throw;
    }
    Library::of_process().begin_message();
  }

  ~Message() override {
    Library::of_process().end_message();
    if (requests_.empty()) return;
    requests_.clear();
    link_.keep(data_);
  }

  void wait(Deadline deadline) override {
    link_.wait([this] { return is_done(); }, peer_, direction_, deadline);
  }

  bool is_done() override {
    std::lock_guard lock(mutex_);
    while (!requests_.empty() && requests_.back().is_done()) requests_.pop_back();
    return requests_.empty();
  }

 private:
  MpiLink& link_;
  const Direction direction_;
  const int peer_;
  const at::Tensor data_;
  std::mutex mutex_;
  std::vector<Request> requests_;  // guarded by mutex_: unfinished requests
};

// --- the link

MpiLink::MpiLink(const BackendContext& context)
    : is_on_one_host_(context.one_host), polls_(context.size <= ::sysconf(_SC_NPROCESSORS_ONLN) ? kPolls : 1) {
  if (context.size == 1) return;
  communicators_ = make_communicators(context);
  Library::of_process().enter();
}

// The communicators of a broken group are not freed: MPI could reuse them, and old messages could reach a new group.
MpiLink::~MpiLink() {
  if (communicators_.collectives == MPI_COMM_NULL) return;
  const bool in_order = !is_aborted_ && !has_orphans_;
  if (in_order) free(communicators_);
  Library::of_process().leave(in_order);
}

// Tags have fewer bits than fingerprints, so different calls may get equal tags. That is harmless for ranks that make
// the same calls, because they send and receive in the same order. The bits detect ranks that make different calls.
int MpiLink::collective_tag(const Channel& channel) const {
  const int bits = communicators_.tag_bits - kKindBits;
  return static_cast<int>(channel.fingerprint >> (64 - bits)) << kKindBits | static_cast<int>(channel.kind);
}

// Messages with different tags may be received in a different order than they were sent, so the tag must contain the
// whole user tag. MPI keeps messages with equal tags in order. The remaining bits detect ends that do not match.
int MpiLink::message_tag(uint32_t tag, uint64_t fingerprint) const {
  const int user_bits = std::min(kUserTagBits, communicators_.tag_bits);
  const int bits = communicators_.tag_bits - user_bits;
  if (tag >> user_bits != 0)
    throw UsageError(text("backend 'mpi' supports tags from 0 to ", (1 << user_bits) - 1, ", but this tag is ", tag));
  return static_cast<int>(tag) << bits | static_cast<int>(bits == 0 ? 0 : fingerprint >> (64 - bits));
}

MpiLink::Request MpiLink::start(Direction direction, const Buffer& buffer, const Channel& channel) {
  const int tag = collective_tag(channel);
  if (direction == Direction::kRecv) return start_receive(buffer, tag, communicators_.collectives);
  return start_send(buffer, tag, communicators_.collectives,
                    channel.kind == Channel::Kind::kOneWay ? MPI_Issend : MPI_Isend);
}

MpiLink::Request MpiLink::start_receive(const Buffer& buffer, int tag, MPI_Comm communicator) {
  throw_if_aborted();
  Request request(*this, Direction::kRecv, buffer);
  const int code = MPI_Irecv(buffer.data, static_cast<int>(buffer.bytes), MPI_BYTE, buffer.peer, tag, communicator,
                             &request.request_);
  if (code != MPI_SUCCESS) throw_error(code, buffer.peer);
  return request;
}

MpiLink::Request MpiLink::start_send(const Buffer& buffer, int tag, MPI_Comm communicator, Send send) {
  throw_if_aborted();
  Request request(*this, Direction::kSend, buffer);
  const int code =
      send(buffer.data, static_cast<int>(buffer.bytes), MPI_BYTE, buffer.peer, tag, communicator, &request.request_);
  if (code != MPI_SUCCESS) throw_error(code, buffer.peer);
  return request;
}

std::unique_ptr<Transfer> MpiLink::start_message(Direction direction, const at::Tensor& data, int peer, uint32_t tag,
                                                 uint64_t fingerprint) {
  return std::make_unique<Message>(*this, direction, data, peer, message_tag(tag, fingerprint));
}

// Any call makes progress with all messages.
bool MpiLink::advance_messages() {
  int has_message = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicators_.messages, &has_message, MPI_STATUS_IGNORE);
  return true;
}

void MpiLink::finish(Request& request, Deadline deadline) {
  wait([&] { return request.is_done(); }, request.buffer_.peer, request.direction_, deadline);
}

// Polling makes progress in MPI. The longer the wait, the longer the thread sleeps between polls.
template <class IsDone>
void MpiLink::wait(const IsDone& is_done, int peer, Direction direction, Deadline deadline) {
  for (int poll = 0; poll < polls_; ++poll)
    if (is_done()) return;
  for (const auto begin = Clock::now(); !is_done();) {
    throw_if_aborted();
    const auto now = Clock::now();
    if (now >= deadline)
      throw TimeoutError(text("timed out: rank ", peer,
                              direction == Direction::kSend ? " did not receive" : " did not send",
                              " the data of this call"));
    const auto waited = now - begin;
    if (waited < kYielding)
      ::sched_yield();
    else
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 16, kMaxSleep));
  }
}

void MpiLink::throw_if_aborted() {
  if (!is_aborted_) return;
  std::lock_guard lock(mutex_);
  std::rethrow_exception(cause_);
}

void MpiLink::abort(std::exception_ptr cause) noexcept {
  std::lock_guard lock(mutex_);
  if (is_aborted_) return;
  cause_ = cause;
  is_aborted_ = true;
}

void MpiLink::keep(const at::Tensor& tensor) {
  if (has_orphans_) Library::of_process().keep(tensor);
}

}  // namespace lockstep::mpi

namespace lockstep {

std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context) {
  return std::make_unique<messages::MessageBackend<mpi::MpiLink>>(context);
}

}  // namespace lockstep
