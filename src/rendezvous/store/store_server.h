#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "base/owner_process.h"
#include "rendezvous/failure.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/net/socket.h"

namespace lockstep {

/// Hosts the store of one job: a thread that listens on a port and speaks only with those who know the job's secret.
///
/// Before a connection has proved that, it may send 4 KiB and take 2 s, and there may be 64 such; of more, the oldest
/// goes. None can delay another: nothing here waits for one connection alone. Thread-safe.
class StoreServer {
 public:
  struct Options {
    Endpoint endpoint;  // the address to listen at, and no other; port 0: the system chooses
    Secret secret;
    int generation = 0;              // the key's: see Secret::key
    std::string role = "the store";  // who hosts it, for people: "rank 0", "lockstep run"
  };

  /// Why the job is over, and which rank failed first, where it was a rank.
  struct FirstCause {
    Failure failure;
    std::optional<int64_t> rank{};
  };

  /// SystemError when it cannot listen there: for a port in use, naming the owner.
  explicit StoreServer(Options options);
  /// Tells all that the store ends in order, and waits half a second at most for them to let go.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const;

  /// Tells all ranks that the job is over, unless they know already. Returns the first cause when all ranks know it, or
  /// after a second: some may be frozen.
  FirstCause end_job(const FirstCause& cause);
  /// None while the job goes on.
  std::optional<FirstCause> first_cause() const;
  /// The ranks that have joined so far, those that have left included.
  std::set<int64_t> joined() const;

  /// Waits until nobody who knows the secret is connected, or the time is up: for a host that gives up, so that the
  /// others can still find out why.
  void await_departures(std::chrono::milliseconds limit) const;

 private:
  class Loop;
  const OwnerProcess owner_{};
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

/// What both sides call the key of a generation.
std::string key_identity(int generation);

}  // namespace lockstep
