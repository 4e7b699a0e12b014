#include "launch/nodes.h"

#include <limits>

#include <lockstep/error.h>

#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/net/address.h"
#include "rendezvous/rendezvous.h"

namespace lockstep {
namespace {

using Lookup = Environment::Lookup;

constexpr const char* kIndex = "JOB_COMPLETION_INDEX";  // of Kubernetes

void check_options(const LaunchOptions& options) {
  if (options.nodes && *options.nodes < 1)
    throw UsageError(text("--nnodes is ", *options.nodes, ": it must be 1 or more"));
  if (options.master_port < 0 || options.master_port > 65535)
    throw UsageError(text("--master-port is ", options.master_port, ": it must be a number from 0 to 65535"));
  if (options.standalone && (options.nodes.value_or(1) > 1 || !options.master_addr.empty() || options.master_port != 0))
    throw UsageError(
        "--standalone starts one node at an address that the launcher chooses: omit --nnodes, --master-addr "
        "and --master-port, or omit --standalone");
}

/// Returns the environment that mpirun or srun set for the launchers; none if neither started them.
std::optional<Environment> find_starter(const Lookup& lookup) {
  if (lookup("RANK") && lookup("WORLD_SIZE")) return std::nullopt;  // a worker of another launcher
  // Hide the remaining variables of a worker: other code reads them, and a single node does not need them.
  auto starters_own = [&](const std::string& variable) -> std::optional<std::string> {
    for (const char* workers : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
      if (variable == workers) return std::nullopt;
    return lookup(variable);
  };
  try {
    auto found = Environment::detect(starters_own);
    if (found.world_size == 1) return std::nullopt;
    return found;
  } catch (const UsageError& error) {
    throw UsageError(text(error.what(), "; or pass --nnodes, --node-rank and --master-addr, or --standalone"));
  }
}

bool leaves_open(const LaunchOptions& options) {
  if (options.standalone || options.nodes == 1) return false;
  return !options.nodes || !options.node_rank || options.master_addr.empty();
}

int find_rank(const LaunchOptions& options, const std::optional<Environment>& starter, int nodes,
              const Lookup& lookup) {
  auto checked = [&](const char* what, int rank, const char* remedy) {
    if (rank >= 0 && rank < nodes) return rank;
    throw UsageError(
        text(what, " is ", rank, ", but with --nnodes ", nodes, " it must be from 0 to ", nodes - 1, remedy));
  };
  if (options.node_rank) return checked("--node-rank", *options.node_rank, "");
  if (nodes == 1) return 0;
  if (starter && starter->world_size != nodes)
    throw UsageError(text("--nnodes is ", nodes, ", but ", starter->source, " started ", starter->world_size,
                          " launchers: omit --nnodes, or pass --node-rank as well"));
  if (starter) return starter->rank;
  const auto index = read_number(lookup, kIndex, 0, std::numeric_limits<int>::max());
  return checked(kIndex, index.value_or(0), ": the Job's completions must equal the number of nodes");
}

std::string find_address(const LaunchOptions& options, const std::optional<Environment>& starter,
                         const Lookup& lookup) {
  if (!options.master_addr.empty()) return options.master_addr;
  if (const auto given = lookup("MASTER_ADDR"); given && !given->empty()) return *given;
  if (!starter)
    throw UsageError(
        "with --nnodes above 1, --master-addr must be the name or address of node 0, the same on all nodes");
  if (!starter->master_addr.empty()) return starter->master_addr;
  if (starter->local_world_size == starter->world_size) return loopback_address();
  throw UsageError(text("of ", starter->world_size, " launchers that ", starter->source, " started only ",
                        starter->local_world_size,
                        " are on this host: set --master-addr or MASTER_ADDR to the name or address of the first "
                        "launcher's host, the same on all nodes"));
}

int choose_port(const LaunchOptions& options, const std::optional<Environment>& starter, const Lookup& lookup) {
  if (options.master_port != 0) return options.master_port;
  if (const auto given = read_number(lookup, "MASTER_PORT", 1, 65535)) return *given;
  return starter ? job_port(lookup) : kDefaultPort;
}

}  // namespace

NodePlace find_node(const LaunchOptions& options, const Lookup& lookup) {
  check_options(options);
  const auto starter = leaves_open(options) ? find_starter(lookup) : std::nullopt;
  NodePlace place;
  place.nodes = options.nodes.value_or(starter ? starter->world_size : 1);
  place.rank = find_rank(options, starter, place.nodes, lookup);
  if (place.nodes == 1)
    place.store = {options.master_addr.empty() ? loopback_address() : options.master_addr, options.master_port};
  else
    place.store = {find_address(options, starter, lookup), choose_port(options, starter, lookup)};
  return place;
}

}  // namespace lockstep
