#include "backends/factories.h"

#include <future>
#include <mutex>
#include <optional>

#include <lockstep/error.h>

#include "backends/gloo/connection.h"
#include "backends/messages/message_backend.h"
#include "base/text.h"

namespace lockstep {
namespace {

using gloo_backend::Connection;
using gloo_backend::SocketExchange;
using messages::Buffer;
using messages::Channel;
using messages::Direction;

// The lowest two bits of the slots of collectives hold the kind of the channel, or kAcknowledgement.
constexpr uint64_t kKindBits = 3;
constexpr uint64_t kAcknowledgement = 3;

uint64_t collective_slot(const Channel& channel) {
  return (channel.fingerprint & ~kKindBits) | static_cast<uint64_t>(channel.kind);
}

uint64_t acknowledgement_slot(const Channel& channel) {
  return channel.fingerprint | kAcknowledgement;
}

/// Gloo can only block, not poll, and a wait that times out closes all connections. So is_done() starts a thread that
/// waits for the transfer.
class GlooTransfer final : public Transfer {
 public:
  GlooTransfer(Connection& connection, gloo_backend::Request request)
      : connection_(connection), request_(std::move(request)) {}

  // Gloo cannot cancel a message: the connection would stay blocked behind it. So the whole connection is aborted.
  ~GlooTransfer() override {
    if (done_.valid() && done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) return;
    connection_.abort(
        std::make_exception_ptr(PeerError(text("the Work of a send_async or recv_async with rank ", request_.peer(),
                                               " was destroyed before it was done; keep the Work and call wait()"))));
    if (done_.valid()) done_.wait();
  }

  void wait(Deadline deadline) override {
    std::unique_lock lock(mutex_);
    if (!done_.valid()) {
      std::packaged_task<void()> waiting([&] { connection_.finish(request_, deadline); });
      done_ = waiting.get_future().share();
      lock.unlock();
      waiting();
    } else {
      lock.unlock();
      if (done_.wait_until(deadline) != std::future_status::ready)
        throw TimeoutError(text("timed out: rank ", request_.peer(), " did not post its end of this message"));
    }
    done_.get();
  }

  bool is_done() override {
    std::lock_guard lock(mutex_);
    if (!done_.valid())
      done_ = std::async(std::launch::async, [this] { connection_.finish(request_, Deadline::max()); }).share();
    return done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

 private:
  Connection& connection_;
  gloo_backend::Request request_;
  std::mutex mutex_;
  std::shared_future<void> done_;  // guarded by mutex_ until valid, then constant
};

/// The Link of messages::MessageBackend. The calling thread moves the messages of collectives itself. Messages between
/// two ranks make progress outside of calls, so Gloo's thread moves them.
class GlooLink {
 public:
  struct Request {
    SocketExchange::Request data;
    Channel channel;
    int peer = 0;
    std::optional<SocketExchange::Request> acknowledgement{};  // if the kind is kOneWay: from receiver to sender
  };

  static constexpr int64_t kSmallBytes = 32 << 10;
  static constexpr int64_t kPieceBytes = 256 << 10;
  static size_t part_bytes(size_t bytes, Channel::Kind) { return bytes; }
  static int64_t pieces_ahead() { return 4; }

  explicit GlooLink(const BackendContext& context) : connection_(context) {}

  Request start(Direction direction, const Buffer& buffer, const Channel& channel) {
    Request request{exchange().start(direction, buffer, collective_slot(channel)), channel, buffer.peer};
    if (direction == Direction::kSend && channel.kind == Channel::Kind::kOneWay)
      request.acknowledgement.emplace(
          exchange().start(Direction::kRecv, token_for(buffer.peer), acknowledgement_slot(channel)));
    return request;
  }

  void finish(Request& request, Deadline deadline) {
    exchange().finish(request.data, deadline);
    if (request.channel.kind != Channel::Kind::kOneWay) return;
    if (!request.acknowledgement)
      request.acknowledgement.emplace(
          exchange().start(Direction::kSend, token_for(request.peer), acknowledgement_slot(request.channel)));
    exchange().finish(*request.acknowledgement, deadline);
  }

  std::unique_ptr<Transfer> start_message(Direction direction, const at::Tensor& data, int peer, uint32_t,
                                          uint64_t fingerprint) {
    Buffer buffer{peer, data.data_ptr(), data.nbytes()};
    return std::make_unique<GlooTransfer>(connection_, connection_.start(direction, buffer, fingerprint));
  }

  void abort(std::exception_ptr cause) noexcept { connection_.abort(cause); }

  void keep(const at::Tensor&) {}  // no thread uses a buffer after its request was destroyed

 private:
  SocketExchange& exchange() { return connection_.exchange(); }
  Buffer token_for(int peer) { return {peer, &token_, sizeof token_}; }

  Connection connection_;
  char token_ = 0;  // the content of acknowledgements
};

}  // namespace

std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context) {
  return std::make_unique<messages::MessageBackend<GlooLink>>(context);
}

}  // namespace lockstep
