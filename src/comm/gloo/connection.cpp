#include "comm/gloo/connection.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/text.h"
#include "rendezvous/wire.h"

namespace lockstep::gloo_backend {
namespace {

constexpr std::chrono::hours kForever(24 * 365);  // Gloo counts in nanoseconds
constexpr auto kAbortWait = std::chrono::milliseconds(1);
constexpr uint64_t kAbortSlot = ~uint64_t{0};

// Ranks on one host use loopback, where no other host can listen in. Ranks on several hosts use the interface that the
// user names, or the address from which this host reaches the job's store, or the address of its host name.
TransportOptions choose_options(const BackendContext& context) {
  TransportOptions options{.rank = context.rank, .size = context.size};
  options.connect_timeout = std::clamp<std::chrono::milliseconds>(context.timeout / 5, std::chrono::milliseconds(1),
                                                                  kForever);  // Gloo waits up to five times as long
  if (const char* interface = std::getenv("LOCKSTEP_INTERFACE"); interface && *interface) {
    options.interface = interface;
  } else if (context.one_host) {
    options.address = "127.0.0.1";
  } else if (!context.address.empty()) {
    options.address = context.address;
  } else {
    char name[256] = {};
    ::gethostname(name, sizeof name - 1);
    options.address = name;
  }
  return options;
}

std::unique_ptr<Transport> listen(const BackendContext& context) {
  const auto options = choose_options(context);
  try {
    return open_transport(options);
  } catch (const SystemError&) {
    throw;
  } catch (const std::exception& error) {
    throw SystemError(text("gloo cannot listen on ",
                           options.interface.empty() ? "address " + options.address : "interface " + options.interface,
                           ": ", error.what(),
                           ". Set LOCKSTEP_INTERFACE to an interface that the other hosts can reach"));
  }
}

// Gloo writes to sockets without asking for errors instead of signals: a peer that is gone would end this process
// without a word. A program that handles the signal itself keeps its handler.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

Shipment::Shipment(Transport& transport, Direction direction, const Parcel& parcel, uint64_t slot)
    : peer_(parcel.peer),
      direction_(direction),
      request_(direction == Direction::kSend ? transport.send(parcel.peer, parcel.data, parcel.bytes, slot)
                                             : transport.recv(parcel.peer, parcel.data, parcel.bytes, slot)) {}

Connection::Connection(const BackendContext& context) : rank_(context.rank), size_(context.size) {
  if (size_ == 1) return;
  ignore_broken_pipes();
  transport_ = listen(context);
  connect(context);
}

/// Exchanges addresses through the job's store. Gives up when the job fails meanwhile.
void Connection::connect(const BackendContext& context) {
  const auto deadline = deadline_after(context.timeout);
  std::vector<std::string> mine(size_);
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) mine[peer] = transport_->listen(peer);
  std::mutex mutex;
  std::exception_ptr cause;
  auto give_up = [&](std::exception_ptr error) {
    std::lock_guard lock(mutex);
    cause = error;
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_) transport_->close(peer);
  };
  auto alarm = context.on_failure ? context.on_failure(give_up) : nullptr;
  auto key = [](int peer) { return text("gloo/", peer); };
  context.store->set(key(rank_), pack(mine));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    std::string error;
    const auto address = unpack(context.store->get(key(peer), context.timeout)).at(rank_);
    try {
      transport_->connect(peer, address);
    } catch (const std::exception& exception) {  // closed in the middle, Gloo throws more than its own
      error = exception.what();
    }
    std::lock_guard lock(mutex);
    if (cause) std::rethrow_exception(cause);
    if (error.empty()) continue;
    if (std::chrono::steady_clock::now() >= deadline)
      throw TimeoutError(
          text("gloo could not connect to rank ", peer, " within ", context.timeout.count(), " ms: ", error));
    throw PeerError(text("gloo could not connect to rank ", peer, ": ", error));
  }
}

void Connection::throw_if_aborted() {
  std::lock_guard lock(mutex_);
  if (cause_) std::rethrow_exception(cause_);
}

Shipment Connection::start(Direction direction, const Parcel& parcel, uint64_t slot) {
  throw_if_aborted();
  try {
    return Shipment(*transport_, direction, parcel, slot);
  } catch (const TransportError& error) {
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
  } catch (const TransportError& error) {
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
  if (!transport_) return;
  // The other ranks must see this one gone. Gloo closes connections for good when a wait on any of them times out; one
  // that is broken already refuses the receive at once, so try until one does wait.
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    try {
      char nothing = 0;
      transport_->recv(peer, &nothing, 1, kAbortSlot)->wait(kAbortWait);
    } catch (const std::exception&) {
      // as intended
    }
  }
}

}  // namespace lockstep::gloo_backend
