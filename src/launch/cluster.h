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

/// How an attempt ended on one node.
struct Outcome {
  std::vector<WorkerEnd> ends;  // in the order in which the workers ended
  std::optional<int> signal;    // that told this launcher, or another, to stop
  std::string broken;           // why the launcher cannot go on; empty: it can
};

/// A rank that has not joined the job yet.
struct MissingRank {
  int rank = 0;
  std::string where;  // "node 1 on host b"
};

/// What all nodes do when an attempt has ended on all.
struct Verdict {
  bool restart = false;
  LaunchReport report;
};

/// The launchers of all nodes of a job, and the store that their workers meet at. Node 0 decides; what happens on one
/// happens on all. One thread at a time.
class Cluster {
 public:
  virtual ~Cluster() = default;

  /// Prints a line for people.
  using PrintStatus = std::function<void(const std::string&)>;

  /// Opens the store for an attempt and waits for the other nodes, which `print_status` reports when it takes long.
  /// None when a signal came first. TimeoutError, naming the nodes that did not come; SystemError when the port is
  /// taken, naming by whom.
  virtual std::optional<Layout> begin(int generation, Signals& signals, const PrintStatus& print_status) = 0;

  /// The ranks of all nodes that have not joined yet. None where another node's launcher knows.
  virtual std::optional<std::vector<MissingRank>> missing_ranks() = 0;

  /// A worker of this node failed: every rank is told, unless it knows of an earlier failure, before this returns, and
  /// every node stops its workers.
  virtual void tell_failure(const StoreServer::FirstCause& cause) = 0;
  /// Whether a rank of the job may have been told: one has joined, as far as this node knows.
  virtual bool has_joined_ranks() = 0;
  /// This launcher was told to stop, and passes that on.
  virtual void tell_signal(int number) = 0;

  /// Readable when next_order or verdict may have something; -1: never.
  virtual int fd() const = 0;
  /// What another node wants: a signal for the workers, 0 when they must be stopped after a failure.
  virtual std::optional<int> next_order() = 0;

  /// All workers of this node have ended. Then, once that is so on all nodes, verdict() has what follows.
  virtual void tell_outcome(const Outcome& outcome) = 0;
  virtual std::optional<Verdict> verdict() = 0;
};

/// What follows from how an attempt ended.
Verdict decide(const Outcome& outcome, const std::optional<StoreServer::FirstCause>& cause, int generation,
               int max_restarts);

/// The cluster of one node.
std::unique_ptr<Cluster> make_single_node(const LaunchOptions& options, const Plan& plan, const Secret& secret);

/// That of several: node 0 hosts a store for the launchers at --master-port, and for each attempt one for the ranks.
/// MismatchError when nodes were started with options that do not fit; PeerError when a launcher is gone.
std::unique_ptr<Cluster> make_several_nodes(const LaunchOptions& options, const Plan& plan, const Secret& secret);

}  // namespace lockstep
