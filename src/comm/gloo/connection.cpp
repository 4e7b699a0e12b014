#include "comm/gloo/connection.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include <gloo/common/error.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::gloo_backend {
namespace {

/// Our store, as Gloo wants to see it.
class GlooStore final : public ::gloo::rendezvous::Store {
 public:
  GlooStore(lockstep::Store& store, std::chrono::milliseconds timeout) : store_(store), timeout_(timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(key, std::string(data.begin(), data.end()));
  }

  std::vector<char> get(const std::string& key) override {
    std::string value = store_.get(key, timeout_);
    return {value.begin(), value.end()};
  }

  void wait(const std::vector<std::string>& keys) override { store_.wait(keys, timeout_); }

  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }

 private:
  lockstep::Store& store_;
  const std::chrono::milliseconds timeout_;
};

// One host talks over loopback, where nobody else can listen in; several over the address that this host's name has,
// or over the interface that the user names.
std::shared_ptr<::gloo::transport::Device> open_device(bool one_host) {
  ::gloo::transport::tcp::attr attributes;
  if (const char* interface = std::getenv("LOCKSTEP_INTERFACE"); interface && *interface) {
    attributes.iface = interface;
  } else if (one_host) {
    attributes.hostname = "127.0.0.1";
  } else {
    char name[256] = {};
    ::gethostname(name, sizeof name - 1);
    attributes.hostname = name;
  }
  try {
    return ::gloo::transport::tcp::CreateDevice(attributes);
  } catch (const std::exception& error) {
    throw SystemError(
        text("gloo cannot listen on ",
             attributes.iface.empty() ? "address " + attributes.hostname : "interface " + attributes.iface, ": ",
             error.what(), ". Set LOCKSTEP_INTERFACE to an interface that the other hosts can reach"));
  }
}

// Gloo writes to sockets without asking for errors instead of signals: a peer that is gone would end this process
// without a word. A program that handles the signal itself keeps its handler.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

constexpr std::chrono::hours kForever(24 * 365);  // Gloo counts in nanoseconds
constexpr auto kAbortWait = std::chrono::milliseconds(1);
constexpr uint64_t kAbortSlot = ~uint64_t{0};

}  // namespace

Shipment::Shipment(::gloo::Context& context, Direction direction, const Parcel& parcel, uint64_t slot)
    : peer_(parcel.peer), direction_(direction), buffer_(context.createUnboundBuffer(parcel.data, parcel.bytes)) {
  direction == Direction::kSend ? buffer_->send(parcel.peer, slot) : buffer_->recv(parcel.peer, slot);
}

bool Shipment::wait(std::chrono::milliseconds limit) {
  return is_send() ? buffer_->waitSend(limit) : buffer_->waitRecv(limit);
}

void Shipment::interrupt() {
  is_send() ? buffer_->abortWaitSend() : buffer_->abortWaitRecv();
}

Connection::Connection(const BackendContext& context) : rank_(context.rank), size_(context.size) {
  if (size_ == 1) return;
  ignore_broken_pipes();
  auto device = open_device(context.one_host);
  auto connected = std::make_shared<::gloo::rendezvous::Context>(rank_, size_);
  connected->setTimeout(
      std::max(context.timeout / 5, std::chrono::milliseconds(1)));  // it takes five of them to connect
  GlooStore store(*context.store, context.timeout);
  try {
    connected->connectFullMesh(store, device);
  } catch (const ::gloo::Exception& error) {
    throw PeerError(text("rank ", rank_, ": gloo could not connect all ", size_, " ranks: ", error.what()));
  } catch (const TimeoutError& error) {
    throw TimeoutError(text("rank ", rank_, ": gloo could not connect all ", size_, " ranks: ", error.what()));
  }
  context_ = std::move(connected);
}

void Connection::throw_if_aborted() {
  std::lock_guard lock(mutex_);
  if (cause_) std::rethrow_exception(cause_);
}

Shipment Connection::start(Direction direction, const Parcel& parcel, uint64_t slot) {
  throw_if_aborted();
  try {
    return Shipment(*context_, direction, parcel, slot);
  } catch (const ::gloo::Exception& error) {
    throw PeerError(text("rank ", parcel.peer, " is gone: ", error.what()));
  }
}

bool Connection::wait(Shipment& shipment, std::chrono::milliseconds limit) {
  {
    std::lock_guard lock(mutex_);
    if (cause_) std::rethrow_exception(cause_);
    waited_for_.push_back(&shipment);
  }
  struct Release {
    Connection& connection;
    Shipment* shipment;
    ~Release() {
      std::lock_guard lock(connection.mutex_);
      std::erase(connection.waited_for_, shipment);
    }
  } release{*this, &shipment};
  return shipment.wait(limit);
}

void Connection::finish(Shipment& shipment, Deadline deadline) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  auto limit = std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(1), kForever);
  try {
    if (wait(shipment, limit)) return;
    throw_if_aborted();
    throw PeerError(text("the message of rank ", shipment.peer(), " was withdrawn on this rank"));
  } catch (const ::gloo::Exception& error) {
    throw_if_aborted();
    if (std::chrono::steady_clock::now() >= deadline)
      throw TimeoutError(text("time-out: rank ", shipment.peer(),
                              shipment.is_send() ? " did not take" : " did not send", " its part of this call"));
    throw PeerError(text("rank ", shipment.peer(), " is gone: ", error.what()));
  }
}

void Connection::abort(std::exception_ptr cause) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (cause_) return;
    cause_ = cause;
    for (Shipment* shipment : waited_for_) shipment->interrupt();
  }
  if (!context_) return;
  // The other ranks must see this one gone. Gloo closes connections for good when a wait on any of them times out; one
  // that is broken already refuses the receive at once, so try until one does wait.
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    try {
      char nothing = 0;
      auto buffer = context_->createUnboundBuffer(&nothing, 1);
      buffer->recv(peer, kAbortSlot);
      buffer->waitRecv(kAbortWait);
    } catch (const std::exception&) {
      // as intended
    }
  }
}

}  // namespace lockstep::gloo_backend
