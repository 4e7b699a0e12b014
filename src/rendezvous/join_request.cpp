#include "rendezvous/join_request.h"

#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "base/deadline.h"
#include "base/log.h"
#include "base/text.h"
#include "base/wait_notice.h"

namespace lockstep {
namespace {

struct Announcement {
  JoinRequest request{};
  Peer peer{};
  std::string version{};
  std::string nonce{};  // distinguishes this call even if pid and host are equal
};

std::string request_key(const JoinRequest& request, int rank) {
  return text("join_request/", request.joins_before, "/", rank);
}

std::string first_request_key(const JoinRequest& request) {
  return text("join_request/", request.joins_before, "/first");
}

std::string random_nonce() {
  std::random_device random;
  return text(random(), '-', random(), '-', random(), '-', random());
}

// Reads the GNU build id from the ELF notes of the program, which is the first loaded object.
int read_build_id(dl_phdr_info* object, size_t, void* result) {
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& segment = object->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const char* at = reinterpret_cast<const char*>(object->dlpi_addr + segment.p_vaddr);
    const char* end = at + segment.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof note);
      auto padded = [](size_t size) { return (size + 3) & ~size_t{3}; };
      const char* name = at + sizeof note;
      const char* bytes = name + padded(note.n_namesz);
      at = bytes + padded(note.n_descsz);
      if (at > end || note.n_type != NT_GNU_BUILD_ID ||
          std::string_view(name, note.n_namesz) != std::string_view("GNU", 4))
        continue;
      std::ostringstream hex;
      for (size_t b = 0; b < note.n_descsz; ++b)
        hex << "0123456789abcdef"[(bytes[b] >> 4) & 15] << "0123456789abcdef"[bytes[b] & 15];
      *static_cast<std::string*>(result) = hex.str();
    }
  }
  return 1;  // the first object only
}

std::string build_id() {
  std::string id;
  ::dl_iterate_phdr(read_build_id, &id);
  return id;
}

// One line per field, because names may contain any other character.
std::string write_announcement(const Announcement& a) {
  return text(a.version, '\n', a.request.world_size, '\n', a.request.backend, '\n', a.request.job, '\n',
              a.request.generation, '\n', a.request.rank, '\n', a.peer.process.pid, '\n', a.peer.process.host, '\n',
              a.peer.process.host_id, '\n', a.peer.build_id, '\n', a.nonce, '\n');
}

Announcement read_announcement(const std::string& value) {
  std::istringstream in(value);
  auto line = [&] {
    std::string next;
    std::getline(in, next);
    return next;
  };
  auto number = [&] { return std::atoll(line().c_str()); };
  Announcement a;
  a.version = line();
  a.request.world_size = static_cast<int>(number());
  a.request.backend = line();
  a.request.job = line();
  a.request.generation = static_cast<int>(number());
  a.peer.rank = a.request.rank = static_cast<int>(number());
  a.peer.process.pid = number();
  a.peer.process.host = line();
  a.peer.process.host_id = line();
  a.peer.build_id = line();
  a.nonce = line();
  return a;
}

void check_agreement(const Announcement& own, const Announcement& other) {
  auto differ = [&](const char* what, const auto& own_value, const auto& other_value, const char* remedy) {
    throw MismatchError(text("rank ", own.peer.rank, " (", describe(own.peer.process), "): ", what, " is ", own_value,
                             " here, but ", other_value, " for ", describe(other.peer), "; ", remedy),
                        own.peer.rank, {});
  };
  const JoinRequest& own_request = own.request;
  const JoinRequest& other_request = other.request;
  if (other.version != own.version)
    differ("lockstep", own.version, other.version, "install the same version everywhere");
  if (!own_request.job.empty() && !other_request.job.empty() && own_request.job != other_request.job)
    differ("the job", own_request.job, other_request.job,
           "two jobs rendezvous at the same place: give each job its own port or file");
  if (own_request.generation != other_request.generation)
    differ("the restart count", own_request.generation, other_request.generation,
           "a process of an earlier start is still running: end it");
  if (own_request.world_size != other_request.world_size)
    differ("world size", own_request.world_size, other_request.world_size, "start all ranks with the same WORLD_SIZE");
  if (own_request.backend != other_request.backend)
    differ("the backend", own_request.backend, other_request.backend, "choose the same backend on all ranks");
}

// The first rank to join defines the job. If this rank does not match it, but the other ranks wait for this rank
// number, it still claims its key, so that the other ranks learn about the mismatch.
void compare_with_first(Store& store, const Announcement& own, const Claim& claim) {
  auto first = read_announcement(store.compare_set(first_request_key(own.request), "", write_announcement(own)));
  try {
    check_agreement(own, first);
  } catch (const MismatchError& mismatch) {
    try {
      if (own.peer.rank < first.request.world_size)
        claim(request_key(own.request, own.peer.rank), write_announcement(own));
    } catch (const Error&) {  // the other ranks have failed already
    }
    throw mismatch;
  }
}

std::string why_missing(int joins_before) {
  if (joins_before == 0) return "Check that they were started with the same WORLD_SIZE and init_method";
  return text("They took part in join ", joins_before, " but not in join ", joins_before + 1,
              ": call init_process_group the same number of times on all ranks");
}

[[noreturn]] void throw_missing(Store& store, const Announcement& own, std::chrono::milliseconds timeout) {
  const int world_size = own.request.world_size;
  std::vector<int> missing;
  for (int r = 0; r < world_size; ++r) {
    const auto key = request_key(own.request, r);
    if (store.check({key}))
      check_agreement(own, read_announcement(store.get(key, timeout)));  // a mismatch explains more than a missing rank
    else
      missing.push_back(r);
  }
  const auto message = text("rank ", own.peer.rank, ": ", world_size - static_cast<int>(missing.size()), " of ",
                            world_size, " ranks joined within ", timeout.count(), " ms; missing: rank ",
                            enumerate(missing), ". ", why_missing(own.request.joins_before));
  std::optional<Culprit> culprit;
  if (!missing.empty()) culprit = Culprit{missing.front(), CulpritRole::kLate};
  throw TimeoutError(message, own.peer.rank, culprit);
}

/// Logs the missing ranks. Only the lowest rank that has joined logs.
void print_missing(Store& store, const Announcement& own, const std::vector<std::string>& keys, int64_t seconds) {
  std::vector<int> missing;
  for (int rank = 0; rank < own.request.world_size; ++rank) {
    if (!store.check({keys[rank]}))
      missing.push_back(rank);
    else if (rank < own.peer.rank)
      return;
  }
  if (missing.empty()) return;
  log_warning(text("rank ", own.peer.rank, ": has waited for ", seconds, " s for ",
                   missing.size() == 1 ? "rank " : "ranks ", enumerate(missing), " to join; ",
                   keys.size() - missing.size(), " of ", keys.size(), " ranks have joined. ",
                   why_missing(own.request.joins_before)));
}

/// Blocks until every key has a value and returns the values. Logs the missing ranks while it waits.
std::vector<std::string> wait_for_values(Store& store, const Announcement& own, const std::vector<std::string>& keys,
                                         std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = deadline_after(timeout);
  WaitNotice notice;
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(std::min(deadline, notice.due()) - Clock::now());
    try {
      return store.multi_get(keys, std::max(left, std::chrono::milliseconds(1)));
    } catch (const TimeoutError&) {
      if (Clock::now() >= deadline) throw;
    }
    if (notice.is_due(Clock::now())) print_missing(store, own, keys, notice.seconds(Clock::now()));
  }
}

void warn_of_other_programs(const Announcement& own, const std::vector<Peer>& peers) {
  if (own.peer.rank != 0 || own.peer.build_id.empty()) return;
  std::vector<std::string> others;
  for (const auto& peer : peers)
    if (!peer.build_id.empty() && peer.build_id != own.peer.build_id) others.push_back(describe(peer));
  if (!others.empty())
    log_warning(text(enumerate(others),
                     " run a different build of the program than rank 0; if this is not intended, copy "
                     "the same build to every host"));
}

}  // namespace

std::string describe(const Peer& peer) {
  return text("rank ", peer.rank, " (", describe(peer.process), ")");
}

int count_join(Store& store, int rank) {
  static const std::string process = random_nonce();  // a process in another container may have the same pid and host
  return static_cast<int>(store.add(text("joins/", rank, "/", process, "/", ::getpid()), 1)) - 1;
}

std::vector<Peer> wait_for_all_ranks(Store& store, const JoinRequest& request, std::chrono::milliseconds timeout,
                                     Claim claim) {
  if (!claim) claim = [&](const auto& key, const auto& value) { return store.compare_set(key, "", value); };
  Announcement own{request, {request.rank, this_process(), build_id()}, LOCKSTEP_VERSION_STRING, random_nonce()};
  compare_with_first(store, own, claim);
  std::string existing = claim(request_key(request, request.rank), write_announcement(own));
  if (existing != write_announcement(own)) {
    throw MismatchError(
        request.rank,
        text(describe(own.peer.process), " wants to join, but ", describe(read_announcement(existing).peer),
             " has already joined. Either two processes were started with the same rank, or an "
             "earlier job left this store behind: use a new store (for file://, remove the file)"));
  }

  std::vector<std::string> keys;
  for (int r = 0; r < request.world_size; ++r) keys.push_back(request_key(request, r));
  std::vector<std::string> announcements;
  try {
    announcements = wait_for_values(store, own, keys, timeout);
  } catch (const TimeoutError& late) {
    try {
      throw_missing(store, own, timeout);
    } catch (const PeerError&) {  // the store has shut down in the meantime
      throw late;
    }
  }

  std::vector<Peer> peers;
  for (const auto& announcement : announcements) {
    const Announcement other = read_announcement(announcement);
    check_agreement(own, other);
    peers.push_back(other.peer);
  }
  warn_of_other_programs(own, peers);
  return peers;
}

}  // namespace lockstep
