#include "comm/gloo/connection.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include <gloo/common/error.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/text.h"
#include "rendezvous/wire.h"

namespace lockstep::gloo_backend {
namespace {

// One host talks over loopback, where nobody else can listen in; several over the interface that the user names, or the
// address by which this host reaches the job's store, or the one that its name has.
std::shared_ptr<::gloo::transport::Device> open_device(const BackendContext& context) {
  ::gloo::transport::tcp::attr attributes;
  if (const char* interface = std::getenv("LOCKSTEP_INTERFACE"); interface && *interface) {
    attributes.iface = interface;
  } else if (context.one_host) {
    attributes.hostname = "127.0.0.1";
  } else if (!context.address.empty()) {
    attributes.hostname = context.address;
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

/// A context that connects its ranks by our store, and lets go when the job fails meanwhile.
class Connection::Mesh final : public ::gloo::Context {
 public:
  Mesh(const BackendContext& facts, const std::shared_ptr<::gloo::transport::Device>& device)
      : ::gloo::Context(facts.rank, facts.size) {
    auto patience = std::clamp<std::chrono::milliseconds>(facts.timeout / 5, std::chrono::milliseconds(1),
                                                          kForever);  // it takes five of them to connect
    setTimeout(patience);
    device_ = device;
    transportContext_ = device->createContext(rank, size);
    transportContext_->setTimeout(patience);
  }

  void connect(const BackendContext& facts) {
    auto deadline = deadline_after(facts.timeout);
    std::vector<std::string> mine(size);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      auto address = transportContext_->createPair(peer)->address().bytes();
      mine[peer].assign(address.begin(), address.end());
    }
    std::mutex mutex;
    std::exception_ptr cause;
    auto give_up = [&](std::exception_ptr error) {
      std::lock_guard lock(mutex);
      cause = error;
      for (int peer = 0; peer < size; ++peer)
        if (peer != rank) getPair(peer)->close();
    };
    auto alarm = facts.on_failure ? facts.on_failure(give_up) : nullptr;
    auto key = [](int peer) { return text("gloo/", peer); };
    facts.store->set(key(rank), pack(mine));
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      std::string error;
      auto address = unpack(facts.store->get(key(peer), facts.timeout)).at(rank);
      try {
        getPair(peer)->connect({address.begin(), address.end()});
      } catch (const std::exception& exception) {  // closed in the middle, Gloo throws more than its own
        error = exception.what();
      }
      std::lock_guard lock(mutex);
      if (cause) std::rethrow_exception(cause);
      if (error.empty()) continue;
      if (std::chrono::steady_clock::now() >= deadline)
        throw TimeoutError(
            text("gloo could not connect to rank ", peer, " within ", facts.timeout.count(), " ms: ", error));
      throw PeerError(text("gloo could not connect to rank ", peer, ": ", error));
    }
  }
};

Connection::Connection(const BackendContext& context) : rank_(context.rank), size_(context.size) {
  if (size_ == 1) return;
  ignore_broken_pipes();
  auto mesh = std::make_shared<Mesh>(context, open_device(context));
  mesh->connect(context);
  context_ = std::move(mesh);
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
