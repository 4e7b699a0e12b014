#include "comm/setup/init_process_group.h"

#include <algorithm>
#include <thread>

#include <lockstep/environment.h>
#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "base/variables.h"
#include "comm/setup/choose_device.h"
#include "comm/setup/make_group.h"
#include "rendezvous/join_request.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/rendezvous.h"
#include "rendezvous/store/tcp_store.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// --- options

constexpr int kMaxRanksOfAJob = 1 << 16;

struct JobPlace {
  int rank = 0;
  int world_size = 1;
};

JobPlace find_place(const ProcessGroupOptions& options) {
  if (options.rank.has_value() != options.world_size.has_value())
    throw UsageError(text("init_process_group: ", options.rank ? "rank" : "world_size", " is given without ",
                          options.rank ? "world_size" : "rank",
                          "; give both, or none to take them from the environment"));
  JobPlace place;
  if (options.rank) {
    place = {*options.rank, *options.world_size};
  } else {
    auto environment = Environment::detect();
    place = {environment.rank, environment.world_size};
  }
  if (place.world_size < 1 || place.rank < 0 || place.rank >= place.world_size)
    throw UsageError(text("init_process_group: rank ", place.rank, " of ", place.world_size,
                          " is not a valid rank; ranks count from 0 to world_size - 1"));
  if (place.world_size > kMaxRanksOfAJob)
    throw UsageError(text("init_process_group: world_size is ", place.world_size, "; a job has at most ",
                          kMaxRanksOfAJob, " ranks: check WORLD_SIZE"));
  return place;
}

milliseconds checked_duration(const char* option, milliseconds value, milliseconds least) {
  if (value < least)
    throw UsageError(
        text("init_process_group: ", option, " is ", value.count(), " ms; it must be at least ", least.count(), " ms"));
  return value;
}

/// LOCKSTEP_HEARTBEAT_LIMIT is for programs that leave the option at its default.
milliseconds heartbeat_limit_of(const ProcessGroupOptions& options) {
  constexpr const char* kVariable = "LOCKSTEP_HEARTBEAT_LIMIT";
  const auto value = process_variable(kVariable);
  if (!value || options.heartbeat_limit != ProcessGroupOptions().heartbeat_limit) return options.heartbeat_limit;
  constexpr double kLeast = 0.5, kMost = 1e6;
  const auto seconds = parse_number<double>(*value);
  if (!seconds || !(*seconds >= kLeast && *seconds <= kMost))
    refuse_value(kVariable, *value, text("a number of seconds from ", kLeast, " to ", static_cast<int64_t>(kMost)));
  return std::chrono::duration_cast<milliseconds>(std::chrono::duration<double>(*seconds));
}

// --- rendezvous

/// The peers and the store of a job that this rank has joined.
struct JoinedJob {
  std::vector<Peer> peers;
  std::shared_ptr<Store> store;
  std::string key_prefix{};  // of the store
  std::shared_ptr<StoreClient> client{};
  std::unique_ptr<StoreServer> server{};
  int joins_before = 0;  // number of earlier joins of this process at this store
};

/// Joins the job: waits for all ranks and connects this rank to the job's store.
class Rendezvous {
 public:
  Rendezvous(const JoinRequest& request, milliseconds timeout, milliseconds heartbeat_limit)
      : request_(request), timeout_(timeout), heartbeat_limit_(heartbeat_limit), deadline_(deadline_after(timeout)) {}

  JoinedJob alone() const {
    auto store = make_memory_store();
    return {wait_for_all_ranks(*store, request_, timeout_), store};
  }

  // The rendezvous uses the job's store from the start, so the death of a rank is noticed while other ranks still join.
  JoinedJob at_port(const RendezvousPort& place) const {
    JoinedJob joined;
    auto secret = find_secret(is_loopback(place.endpoint.host), process_variable);
    if (request_.rank == 0 && place.rank_zero_hosts) joined.server = host(place.endpoint, secret);
    connect_to_new_store(joined, place, secret);
    auto request = request_;
    request.joins_before = joined.joins_before;
    try {
      joined.peers = wait_for_all_ranks(
          *joined.store, request, time_left(),
          [&](const std::string& key, const std::string& value) { return join(*joined.client, key, value); });
    } catch (...) {
      give_up(joined);
    }
    // Hides keys that an earlier group of this process left in the store.
    const auto join_prefix = text("join/", joined.joins_before, "/");
    joined.store = with_prefix(joined.store, join_prefix);
    joined.key_prefix += join_prefix;
    return joined;
  }

  // The ranks find each other in a file or in a store of the user. Then rank 0 hosts the job's store and publishes its
  // endpoint and secret in `shared_store`.
  JoinedJob through_store(Store& shared_store) const {
    JoinedJob joined;
    joined.peers = wait_for_all_ranks(shared_store, request_, time_left());
    constexpr const char* kJobStore = "job_store";
    if (request_.rank == 0) {
      auto secret = Secret::random();
      Endpoint endpoint{own_address(joined.peers), 0};
      joined.server = host(endpoint, secret);
      endpoint.port = joined.server->port();
      shared_store.set(kJobStore, pack({to_string(endpoint), secret.bytes()}));
      connect(joined, endpoint, secret);
    } else {
      auto fields = unpack(shared_store.get(kJobStore, time_left()));
      connect(joined, parse_endpoint(fields.at(0)), Secret::from_bytes(fields.at(1)));
    }
    try {
      std::vector<std::string> keys;
      for (int rank = 0; rank < request_.world_size; ++rank) keys.push_back(text("joined/", rank));
      join(*joined.client, keys[request_.rank], "here");
      try {
        joined.store->wait(keys, time_left());
      } catch (const TimeoutError& error) {
        throw TimeoutError(text("not all ranks that joined have connected to the job's store: ", error.what()));
      }
    } catch (...) {
      give_up(joined);
    }
    return joined;
  }

 private:
  milliseconds time_left() const {
    return std::max(std::chrono::ceil<milliseconds>(deadline_ - Clock::now()), milliseconds(1));
  }

  std::string prefix() const { return text("start/", request_.generation, "/"); }

  std::unique_ptr<StoreServer> host(const Endpoint& endpoint, const Secret& secret) const {
    return std::make_unique<StoreServer>(StoreServer::Options{endpoint, secret, request_.generation, "rank 0", 0});
  }

  void connect(JoinedJob& joined, Endpoint endpoint, const Secret& secret) const {
    try {
      joined.client = make_shared_owned<StoreClient>(StoreClient::Options{
          endpoint, secret.key(request_.generation), request_.generation, deadline_, heartbeat_limit_});
    } catch (const TimeoutError& error) {
      throw TimeoutError(request_.rank,
                         text("missing: the host of the job's store (rank 0 or the launcher). ", error.what()));
    }
    joined.key_prefix = prefix();
    joined.store = with_prefix(make_remote_store(joined.client), joined.key_prefix);
  }

  // A store that rank 0 hosts serves one group. While the store of the group that this process has left is still up,
  // this function waits for the next store.
  void connect_to_new_store(JoinedJob& joined, const RendezvousPort& place, const Secret& secret) const {
    constexpr milliseconds kPause(20);
    bool has_seen_old_store = false;
    do {
      try {
        connect(joined, place.endpoint, secret);
      } catch (const TimeoutError&) {
        if (!has_seen_old_store) throw;
        break;
      }
      try {
        joined.joins_before = count_join(*joined.store, request_.rank);
        if (joined.joins_before == 0 || !place.rank_zero_hosts) return;
        has_seen_old_store = true;
      } catch (const PeerError&) {
        if (joined.client->over() || !place.rank_zero_hosts) throw;  // otherwise the store has just ended cleanly
      }
      std::this_thread::sleep_for(kPause);
    } while (Clock::now() < deadline_);
    throw TimeoutError(request_.rank,
                       text("this process has joined at ", to_string(place.endpoint),
                            " before, but rank 0 has not opened a store for the next group there; destroy the group on "
                            "rank 0 too, and call init_process_group equally often on all ranks"));
  }

  std::string join(StoreClient& client, const std::string& key, const std::string& value) const {
    auto me = this_process();
    return client
        .call(Verb::kJoin, {prefix() + key, value, std::to_string(request_.rank), me.host, me.host_id,
                            std::to_string(me.pid), std::to_string(heartbeat_limit_.count())})
        .at(0);
  }

  // Sends the waiting ranks the reason why this rank fails. The host of the store keeps it up until the other ranks
  // have disconnected, at most one second.
  [[noreturn]] static void give_up(JoinedJob& joined) {
    const auto failure = to_failure(std::current_exception());
    if (failure.culprit) joined.client->send_async(Verb::kBlame, to_fields(failure));
    joined.client->leave_job(failure);
    joined.client.reset();
    joined.store.reset();
    if (joined.server) joined.server->await_departures(std::chrono::seconds(1));
    throw;
  }

  static std::string own_address(const std::vector<Peer>& peers) {
    const auto& own = peers.front().process;
    bool one_host =
        std::all_of(peers.begin(), peers.end(), [&](const Peer& peer) { return peer.process.host_id == own.host_id; });
    if (one_host) return loopback_address();
    std::string address = process_variable("MASTER_ADDR").value_or(own.host);
    if (is_loopback(address))
      throw UsageError(0, text("this host's name, ", address,
                               ", is a loopback address here, which other hosts cannot reach; set MASTER_ADDR to an "
                               "address of rank 0's host that they can reach"));
    return address;
  }

  const JoinRequest request_;
  const milliseconds timeout_;
  const milliseconds heartbeat_limit_;
  const Clock::time_point deadline_;
};

JoinedJob join_job(const ProcessGroupOptions& options, const Rendezvous& rendezvous, int world_size) {
  if (options.store) return rendezvous.through_store(*options.store);
  if (world_size == 1) return rendezvous.alone();
  // Only env:// reads the launcher's variables. Ranks with an explicit rank and another init_method do not need them.
  bool is_explicit = options.rank && options.init_method != "env://";
  auto environment = is_explicit ? Environment() : Environment::detect();
  auto place = find_rendezvous(options.init_method, environment, process_variable);
  if (auto* file = std::get_if<RendezvousFile>(&place)) return rendezvous.through_store(*open_file_store(file->path));
  return rendezvous.at_port(std::get<RendezvousPort>(place));
}

}  // namespace

std::shared_ptr<detail::Group> detail::init_group(const ProcessGroupOptions& options) {
  auto device = choose_device(options, parse_backends(options.backend));
  auto timeout = checked_duration("timeout", options.timeout, milliseconds(1));
  auto heartbeat_limit = checked_duration("heartbeat_limit", heartbeat_limit_of(options), milliseconds(500));
  auto [rank, world_size] = find_place(options);

  JoinRequest request{rank, world_size, options.backend, job_name(process_variable), restart_count(process_variable)};
  auto [peers, store, key_prefix, client, server, joins_before] = [&, rank = rank, world_size = world_size] {
    try {
      return join_job(options, {request, timeout, heartbeat_limit}, world_size);
    } catch (const Error& error) {
      rethrow_with_prefix(std::current_exception(), error.rank() == rank ? "" : text("rank ", rank, ": joining: "), "",
                          rank);
    }
  }();
  auto job = make_shared_owned<Job>(std::move(peers), rank, joins_before, std::move(store), std::move(key_prefix),
                                    std::move(client), std::move(server));
  std::vector<int> ranks(world_size);
  for (int r = 0; r < world_size; ++r) ranks[r] = r;
  try {
    return make_group(job, {kWorld, std::move(ranks), options.backend, device, timeout});
  } catch (...) {
    job->give_up(std::current_exception());
    throw;
  }
}

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  return ProcessGroup(detail::init_group(options));
}

}  // namespace lockstep
