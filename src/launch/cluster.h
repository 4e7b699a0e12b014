#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/launch_options.h>

#include "launch/launch_plan.h"
#include "launch/report.h"
#include "launch/signals.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/store/store_server.h"

namespace lockstep {

/// A rank that has not joined the job yet.
struct MissingRank {
  int rank = 0;
  std::string where;  // "node 1 on host b"
};

/// The launchers of all nodes of a job, and the store of their ranks. Node 0 decides; a failure, signal or restart on
/// one node takes effect on all nodes. Not thread-safe.
class Cluster {
 public:
  virtual ~Cluster() = default;

  /// Prints a status line.
  using PrintStatus = std::function<void(const std::string&)>;

  /// Opens the store for an attempt and blocks until the other nodes have joined; reports a long wait to
  /// `print_status`. Returns none if a signal arrives first. Throws TimeoutError, naming the missing nodes, and
  /// SystemError if the port is in use, naming its owner.
  virtual std::optional<Layout> begin(int generation, Signals& signals, const PrintStatus& print_status) = 0;

  /// The ranks of all nodes that have not joined yet. None on nodes that do not host the store.
  virtual std::optional<std::vector<MissingRank>> missing_ranks() = 0;

  /// Reports that a worker of this node failed. Before it returns, all ranks are notified, unless they were notified of
  /// an earlier failure; the wait is limited to a few seconds. Every node then stops its workers.
  virtual void report_failure(const Failure& cause) = 0;
  /// Returns whether a rank has joined, and may thus have been notified, as far as this node knows.
  virtual bool has_joined_ranks() = 0;
  /// Forwards a signal that this launcher received to the other nodes.
  virtual void forward_signal(int number) = 0;

  /// Readable if next_order() or verdict() may have a result; -1 if that never happens.
  virtual int fd() const = 0;
  /// The next order from another node: a signal for the workers, or 0 to stop them after a failure.
  virtual std::optional<int> next_order() = 0;

  /// Reports that all workers of this node have ended. verdict() returns the decision once all nodes have reported.
  virtual void report_outcome(const Outcome& outcome) = 0;
  virtual std::optional<Verdict> verdict() = 0;
};

/// Returns the cluster of a job on one node.
std::unique_ptr<Cluster> make_single_node(const LaunchOptions& options, const Plan& plan, const Secret& secret);

/// Returns the cluster of a job on several nodes. Node 0 hosts a store for the launchers at --master-port, and one
/// store for the ranks of each attempt. Throws SystemError if node 0 cannot listen at --master-port. begin() also
/// throws MismatchError if the nodes were started with different options, and PeerError if a launcher is gone.
std::unique_ptr<Cluster> make_several_nodes(const LaunchOptions& options, const Plan& plan, const Secret& secret);

}  // namespace lockstep
