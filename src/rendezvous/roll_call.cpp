#include "rendezvous/roll_call.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "base/text.h"

namespace lockstep {
namespace {

struct Announcement {
  Enrolment enrolment;
  Peer peer;
  std::string version;
  std::string nonce;  // tells this process's call from any other, whatever pid and host they have
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

std::string random_nonce() {
  std::random_device random;
  return text(random(), '-', random(), '-', random(), '-', random());
}

// One line for each field, so that any name survives.
std::string write(const Announcement& a) {
  return text(a.version, '\n', a.enrolment.world_size, '\n', a.enrolment.backend, '\n', a.peer.pid, '\n', a.peer.host,
              '\n', a.peer.host_id, '\n', a.nonce, '\n');
}

Announcement read(int rank, const std::string& value) {
  std::istringstream in(value);
  auto line = [&] {
    std::string next;
    std::getline(in, next);
    return next;
  };
  Announcement a;
  a.version = line();
  a.enrolment = {rank, std::atoi(line().c_str()), line()};
  a.peer.rank = rank;
  a.peer.pid = std::atoll(line().c_str());
  a.peer.host = line();
  a.peer.host_id = line();
  a.nonce = line();
  return a;
}

std::string describe(const Peer& peer) {
  return text("rank ", peer.rank, " (pid ", peer.pid, " on ", peer.host, ")");
}

void check_agreement(const Enrolment& mine, const Announcement& other) {
  auto differ = [&](const char* what, const auto& here, const auto& there, const char* remedy) {
    throw MismatchError(text("rank ", mine.rank, ": ", what, " is ", here, " here, but ", there, " for ",
                             describe(other.peer), "; ", remedy));
  };
  if (other.version != LOCKSTEP_VERSION_STRING)
    differ("lockstep", LOCKSTEP_VERSION_STRING, other.version, "install the same version everywhere");
  if (other.enrolment.world_size != mine.world_size)
    differ("world size", mine.world_size, other.enrolment.world_size, "start all ranks with the same WORLD_SIZE");
  if (other.enrolment.backend != mine.backend)
    differ("the backend", mine.backend, other.enrolment.backend, "choose the same backend on all ranks");
}

[[noreturn]] void throw_missing(Store& store, const Enrolment& mine, std::chrono::milliseconds timeout) {
  std::vector<int> missing;
  for (int r = 0; r < mine.world_size; ++r) {
    if (store.check({key_of(r)}))
      check_agreement(mine, read(r, store.get(key_of(r), timeout)));  // a better reason than absence
    else
      missing.push_back(r);
  }
  throw TimeoutError(text("rank ", mine.rank, ": ", mine.world_size - static_cast<int>(missing.size()), " of ",
                          mine.world_size, " ranks joined within ", timeout.count(), " ms; missing: rank ",
                          enumerate(missing), ". Were they started, with the same WORLD_SIZE and init_method?"));
}

}  // namespace

std::vector<Peer> call_roll(Store& store, const Enrolment& mine, std::chrono::milliseconds timeout) {
  Announcement own{mine, {mine.rank, host_name(), host_id(), ::getpid()}, LOCKSTEP_VERSION_STRING, random_nonce()};
  std::string standing = store.compare_set(key_of(mine.rank), "", write(own));
  if (standing != write(own)) {
    throw MismatchError(text("rank ", mine.rank, ": pid ", own.peer.pid, " on ", own.peer.host, " wants to join, but ",
                             describe(read(mine.rank, standing).peer),
                             " has already joined. Either two processes were started with the same rank, or this is a "
                             "store that an earlier job left behind: use a fresh one (for file://, remove the file)"));
  }

  std::vector<std::string> keys;
  for (int r = 0; r < mine.world_size; ++r) keys.push_back(key_of(r));
  try {
    store.wait(keys, timeout);
  } catch (const TimeoutError&) {
    throw_missing(store, mine, timeout);
  }

  std::vector<Peer> peers;
  for (int r = 0; r < mine.world_size; ++r) {
    Announcement other = read(r, store.get(keys[r], timeout));
    check_agreement(mine, other);
    peers.push_back(other.peer);
  }
  return peers;
}

}  // namespace lockstep
