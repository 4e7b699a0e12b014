// The only file that calls Gloo; transport.h says why it is a module of its own.

#include <gloo/common/error.h>
#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include "comm/direct/link.h"
#include "comm/gloo/transport.h"

namespace lockstep::gloo_backend {
namespace {

using direct::Direction;

template <class Call>
auto translate_errors(const Call& call) {
  try {
    return call();
  } catch (const ::gloo::Exception& error) {
    throw TransportError(error.what());
  }
}

class GlooRequest final : public TransportRequest {
 public:
  GlooRequest(std::unique_ptr<::gloo::transport::UnboundBuffer> buffer, Direction direction)
      : buffer_(std::move(buffer)), direction_(direction) {}

  bool wait(std::chrono::milliseconds limit) override {
    return translate_errors(
        [&] { return direction_ == Direction::kSend ? buffer_->waitSend(limit) : buffer_->waitRecv(limit); });
  }

  void interrupt() override { direction_ == Direction::kSend ? buffer_->abortWaitSend() : buffer_->abortWaitRecv(); }

 private:
  const std::unique_ptr<::gloo::transport::UnboundBuffer> buffer_;
  const Direction direction_;
};

class GlooTransport final : public Transport, private ::gloo::Context {
 public:
  explicit GlooTransport(const TransportOptions& options) : ::gloo::Context(options.rank, options.size) {
    ::gloo::transport::tcp::attr attributes;
    attributes.iface = options.interface;
    attributes.hostname = options.address;
    setTimeout(options.connect_timeout);
    device_ = ::gloo::transport::tcp::CreateDevice(attributes);
    transportContext_ = device_->createContext(rank, size);
    transportContext_->setTimeout(options.connect_timeout);
  }

  std::string listen(int peer) override {
    const auto address = transportContext_->createPair(peer)->address().bytes();
    return {address.begin(), address.end()};
  }

  void connect(int peer, const std::string& address) override {
    getPair(peer)->connect({address.begin(), address.end()});
  }

  void close(int peer) override { getPair(peer)->close(); }

  std::unique_ptr<TransportRequest> send(int peer, const void* data, size_t bytes, uint64_t slot) override {
    return translate_errors([&] {
      auto buffer = createUnboundBuffer(const_cast<void*>(data), bytes);  // Gloo has one class for both directions
      buffer->send(peer, slot);
      return std::make_unique<GlooRequest>(std::move(buffer), Direction::kSend);
    });
  }

  std::unique_ptr<TransportRequest> recv(int peer, void* data, size_t bytes, uint64_t slot) override {
    return translate_errors([&] {
      auto buffer = createUnboundBuffer(data, bytes);
      buffer->recv(peer, slot);
      return std::make_unique<GlooRequest>(std::move(buffer), Direction::kRecv);
    });
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) Transport* lockstep_open_gloo(const TransportOptions& options) {
  return new GlooTransport(options);
}

}  // namespace lockstep::gloo_backend
