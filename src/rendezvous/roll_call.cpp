#include "rendezvous/roll_call.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "base/text.h"

namespace lockstep {
namespace {

struct Announcement {
  Peer peer;
  int world_size = 0;
  std::string version;
};

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "unknown-host";
  return name;
}

std::string host_id() {
  if (const char* set = std::getenv("LOCKSTEP_HOST_ID"); set && *set) return set;
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? host_name() : id;
}

std::string key_of(int rank) {
  return text("roll_call/", rank);
}

// One line for each field, so that any host name survives.
std::string write(const Announcement& a) {
  return text(a.world_size, '\n', a.version, '\n', a.peer.pid, '\n', a.peer.host, '\n', a.peer.host_id, '\n');
}

Announcement read(int rank, const std::string& value) {
  Announcement a;
  std::istringstream in(value);
  a.peer.rank = rank;
  in >> a.world_size >> a.version >> a.peer.pid >> std::ws;
  std::getline(in, a.peer.host);
  std::getline(in, a.peer.host_id);
  return a;
}

std::string describe(const Peer& peer) {
  return text("rank ", peer.rank, " (pid ", peer.pid, " on ", peer.host, ")");
}

void check_agreement(int rank, int world_size, const Announcement& other) {
  if (other.world_size != world_size)
    throw MismatchError(text("rank ", rank, ": world size is ", world_size, " here, but ", other.world_size, " for ",
                             describe(other.peer), "; start all ranks with the same WORLD_SIZE"));
  if (other.version != LOCKSTEP_VERSION_STRING)
    throw MismatchError(text("rank ", rank, ": lockstep is ", LOCKSTEP_VERSION_STRING, " here, but ", other.version,
                             " for ", describe(other.peer), "; install the same version everywhere"));
}

[[noreturn]] void throw_missing(Store& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  std::vector<int> missing;
  for (int r = 0; r < world_size; ++r) {
    if (store.check({key_of(r)}))
      check_agreement(rank, world_size, read(r, store.get(key_of(r), timeout)));  // a better reason than absence
    else
      missing.push_back(r);
  }
  throw TimeoutError(text("rank ", rank, ": ", world_size - static_cast<int>(missing.size()), " of ", world_size,
                          " ranks joined within ", timeout.count(), " ms; missing: rank ", enumerate(missing),
                          ". Were they started, with the same WORLD_SIZE and init_method?"));
}

}  // namespace

std::vector<Peer> call_roll(Store& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  Announcement mine{{rank, host_name(), host_id(), ::getpid()}, world_size, LOCKSTEP_VERSION_STRING};
  std::string standing = store.compare_set(key_of(rank), "", write(mine));
  if (standing != write(mine)) {
    throw MismatchError(text("rank ", rank, ": pid ", mine.peer.pid, " on ", mine.peer.host, " wants to join, but ",
                             describe(read(rank, standing).peer),
                             " has already joined. Either two processes were started with the same rank, or this is a "
                             "store that an earlier job left behind: use a fresh one (for file://, remove the file)"));
  }

  std::vector<std::string> keys;
  for (int r = 0; r < world_size; ++r) keys.push_back(key_of(r));
  try {
    store.wait(keys, timeout);
  } catch (const TimeoutError&) {
    throw_missing(store, rank, world_size, timeout);
  }

  std::vector<Peer> peers;
  for (int r = 0; r < world_size; ++r) {
    Announcement other = read(r, store.get(keys[r], timeout));
    check_agreement(rank, world_size, other);
    peers.push_back(other.peer);
  }
  return peers;
}

}  // namespace lockstep
