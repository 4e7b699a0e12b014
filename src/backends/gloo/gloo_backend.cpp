#include "backends/factories.h"

#include <future>
#include <mutex>
#include <variant>

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

// Gloo matches sends and receives of the same slot in order. A message without a matching receive waits on the sender's
// side. In the slots of collectives the highest bit is clear and the lowest two bits hold the kind of the channel. In
// the slots of point-to-point messages the highest bit is set.
constexpr uint64_t kUpperBit = 1ull << 63;
constexpr uint64_t kKindBits = 3;

uint64_t collective_slot(const Channel& channel) {
  return (channel.fingerprint & ~kUpperBit & ~kKindBits) | static_cast<uint64_t>(channel.kind);
}

uint64_t message_slot(uint64_t fingerprint) {
  return fingerprint | kUpperBit;
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

/// The Link of messages::MessageBackend. Gloo carries messages between two ranks and messages of the kind kOneWay,
/// which must wait for their receive. The calling thread moves all others itself.
class GlooLink {
 public:
  using Request = std::variant<gloo_backend::Request, SocketExchange::Request>;

  static constexpr int64_t kSmallBytes = 32 << 10;
  static constexpr int64_t kPieceBytes = 256 << 10;
  static size_t part_bytes(size_t bytes, Channel::Kind) { return bytes; }
  static int64_t pieces_ahead() { return 4; }

  explicit GlooLink(const BackendContext& context) : connection_(context) {}

  Request start(Direction direction, const Buffer& buffer, const Channel& channel) {
    if (channel.kind == Channel::Kind::kOneWay) return connection_.start(direction, buffer, collective_slot(channel));
    return connection_.exchange().start(direction, buffer, collective_slot(channel));
  }

  void finish(Request& request, Deadline deadline) {
    if (auto* of_gloo = std::get_if<gloo_backend::Request>(&request)) return connection_.finish(*of_gloo, deadline);
    connection_.exchange().finish(std::get<SocketExchange::Request>(request), deadline);
  }

  std::unique_ptr<Transfer> start_message(Direction direction, const at::Tensor& data, int peer, uint32_t,
                                          uint64_t fingerprint) {
    Buffer buffer{peer, data.data_ptr(), data.nbytes()};
    return std::make_unique<GlooTransfer>(connection_, connection_.start(direction, buffer, message_slot(fingerprint)));
  }

  void abort(std::exception_ptr cause) noexcept { connection_.abort(cause); }

  void keep(const at::Tensor&) {}  // Gloo does not use a buffer after its request was destroyed

 private:
  Connection connection_;
};

}  // namespace

std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context) {
  return std::make_unique<messages::MessageBackend<GlooLink>>(context);
}

}  // namespace lockstep
