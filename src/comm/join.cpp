#include "comm/join.h"

#include <algorithm>

#include <lockstep/environment.h>
#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "base/log.h"
#include "base/text.h"
#include "comm/backend_registry.h"
#include "rendezvous/roll_call.h"

namespace lockstep {
namespace {

struct Place {
  int rank = 0;
  int world_size = 1;
};

Place find_place(const ProcessGroupOptions& options) {
  if (options.rank.has_value() != options.world_size.has_value())
    throw UsageError(text("init_process_group: ", options.rank ? "rank" : "world_size", " is given without ",
                          options.rank ? "world_size" : "rank",
                          "; give both, or none to take them from the environment"));
  Place place;
  if (options.rank) {
    place = {*options.rank, *options.world_size};
  } else {
    auto environment = Environment::detect();
    place = {environment.rank, environment.world_size};
  }
  if (place.world_size < 1 || place.rank < 0 || place.rank >= place.world_size)
    throw UsageError(text("init_process_group: rank ", place.rank, " of ", place.world_size,
                          " makes no sense; ranks count from 0 to world_size - 1"));
  return place;
}

std::shared_ptr<Store> meet_at(const std::string& init_method, int world_size) {
  constexpr std::string_view kFile = "file://";
  if (init_method.starts_with(kFile) && init_method.size() > kFile.size())
    return open_file_store(init_method.substr(kFile.size()));
  if (init_method == "env://") {
    const char* place = std::getenv("LOCKSTEP_INIT_METHOD");
    if (place && std::string(place) != "env://") return meet_at(place, world_size);
    throw UsageError(
        text("init_process_group: world size is ", world_size,
             " and LOCKSTEP_INIT_METHOD is not set, so the ranks cannot find each other; set it to the same "
             "file:///path on all of them, a file that does not exist yet"));
  }
  throw UsageError(text("init_process_group: init_method is '", init_method, "'; use file:///path or env://"));
}

std::string choose_backend(const std::string& asked, int world_size) {
  if (asked != "auto") return asked;
  if (world_size == 1) return "threads";
  auto available = available_backends();
  if (std::find(available.begin(), available.end(), "gloo") != available.end()) return "gloo";
  throw UsageError(text("init_process_group: this build has no backend that joins processes (it has ",
                        enumerate(available), "); install libgloo-dev and build again, or use run_threads"));
}

int local_rank_of(const std::vector<Peer>& peers, int rank) {
  auto before_me = peers.begin() + rank;
  return static_cast<int>(
      std::count_if(peers.begin(), before_me, [&](const Peer& peer) { return peer.host_id == before_me->host_id; }));
}

bool on_one_host(const std::vector<Peer>& peers) {
  return std::all_of(peers.begin(), peers.end(),
                     [&](const Peer& peer) { return peer.host_id == peers.front().host_id; });
}

c10::Device choose_device(const ProcessGroupOptions& options) {
  c10::Device device = options.device.value_or(c10::Device(c10::kCPU));
  if (device.type() != c10::kCPU)
    throw UsageError(text("init_process_group: device is ", device, "; this build moves cpu tensors only"));
  return device;
}

// Longer than a year counts as never: a deadline must stay within what the clock can count.
std::chrono::milliseconds checked_timeout(const ProcessGroupOptions& options) {
  if (options.timeout <= std::chrono::milliseconds(0))
    throw UsageError(text("init_process_group: timeout is ", options.timeout.count(), " ms; it must be above 0"));
  return std::min<std::chrono::milliseconds>(options.timeout, std::chrono::hours(24 * 365));
}

}  // namespace

std::shared_ptr<detail::Group> detail::join(const ProcessGroupOptions& options) {
  auto device = choose_device(options);
  auto timeout = checked_timeout(options);
  auto [rank, world_size] = find_place(options);
  auto backend_name = choose_backend(options.backend, world_size);
  auto make_backend = find_backend(backend_name);

  std::shared_ptr<Store> store = options.store     ? options.store
                                 : world_size == 1 ? make_memory_store()
                                                   : meet_at(options.init_method, world_size);
  auto peers = call_roll(*store, {rank, world_size, backend_name}, timeout);
  detail::Membership membership{rank, world_size, local_rank_of(peers, rank), device, backend_name, timeout};
  auto backend = make_backend({rank, world_size, with_prefix(store, "world/"), on_one_host(peers), timeout});
  log_info(text("rank ", rank, " of ", world_size, " joined, backend ", backend_name));
  return std::make_shared<Group>(std::move(membership), std::move(store), std::move(backend));
}

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  return ProcessGroup(detail::join(options));
}

}  // namespace lockstep
