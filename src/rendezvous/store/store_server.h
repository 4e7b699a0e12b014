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
#include "rendezvous/store/coordinator.h"

namespace lockstep {

/// Hosts the store of one job on a background thread. Clients must authenticate with the job's secret (TLS-PSK).
///
/// A connection that has not authenticated may send 4 KiB and stay open for 2 s. At most 64 such connections are open;
/// beyond that, the oldest is closed. The thread never blocks on a single connection, so no connection can delay
/// another. Thread-safe.
class StoreServer {
 public:
  struct Options {
    Endpoint endpoint;  // the only address to listen at; port 0: the system chooses
    Secret secret;
    int generation = 0;              // selects the key: see Secret::key
    std::string role = "the store";  // of the hosting process, in messages: "rank 0", "lockstep run"
    std::optional<int> rank{};       // of the hosting process, if it is a rank
    Coordinator::Members members = Coordinator::Members::kRanks;
  };

  /// Throws SystemError if it cannot listen at the endpoint; if the port is in use, the message names its owner.
  explicit StoreServer(Options options);
  /// Sends kClosing to all clients and waits up to 0.5 s for them to disconnect.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const;

  /// Ends the job with this cause, unless it has failed already, and notifies all ranks. Blocks until all ranks have
  /// acknowledged, or for 1 s, because ranks may be frozen. Returns the first cause.
  Failure end_job(const Failure& cause);
  /// Why the job failed, with the rank that failed first if the cause is a rank; none while the job runs.
  std::optional<Failure> first_cause() const;
  /// The ranks that have joined so far, including ranks that have left.
  std::set<int> joined() const;
  /// The number of keys that have a value.
  size_t keys() const;

  /// Blocks until no authenticated client is connected, or until `limit` has passed. A host that gives up calls it so
  /// that the other processes can still read the reason.
  void await_departures(std::chrono::milliseconds limit) const;

 private:
  class Loop;
  const OwnerProcess owner_{};
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

/// The TLS identity of the key of a generation; client and server use the same.
std::string key_identity(int generation);

}  // namespace lockstep
