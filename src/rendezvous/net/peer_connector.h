#pragma once

#include <chrono>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/store.h>

#include "base/file_descriptor.h"
#include "rendezvous/net/rejection_log.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/net/socket.h"

namespace lockstep {

/// Connects each rank of a group with every other by TCP, and lets nobody else in.
///
/// Each rank listens, and leaves its address and a fresh key in the group's store, which only processes that know the
/// job's secret can read. Of two ranks, the higher one connects to the lower one. Each proves to the other that it
/// knows the key (peer_proof.h) before the socket is used for anything else. Connections that do not prove it are
/// turned away as the store turns them away: they may take 2 s, there may be 64 at a time, and of more the oldest is
/// closed. A rank that was closed so connects again. What is sent on the sockets afterwards is neither encrypted nor
/// authenticated.
class PeerConnector {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    std::string host{};              // the address to listen at, and no other
    std::shared_ptr<Store> store{};  // of this group alone
    std::chrono::milliseconds timeout{};
    const char* remedy = nullptr;  // for an address at which this rank cannot listen, or that others cannot reach
  };

  /// Listens. SystemError when it cannot.
  explicit PeerConnector(Options options);
  ~PeerConnector();
  PeerConnector(const PeerConnector&) = delete;
  PeerConnector& operator=(const PeerConnector&) = delete;

  /// Collective, once. Returns a nonblocking socket for each rank, none for this one. The port is closed afterwards.
  /// TimeoutError naming the rank that could not be reached, or those that did not connect.
  std::vector<FileDescriptor> connect();

  /// Ends connect(), which throws `cause`. Thread-safe.
  void give_up(std::exception_ptr cause) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Caller;

  FileDescriptor reach(int peer);
  FileDescriptor try_to_reach(int peer, const Endpoint& endpoint, const Secret& key, std::string& reason);
  std::string receive(const FileDescriptor& socket, size_t bytes, std::string& reason);
  bool wait(int descriptor, short events, Clock::time_point until);
  void throw_if_given_up();

  void accept_higher_ranks(std::vector<FileDescriptor>& sockets);
  void accept_callers();
  void make_room(int error);
  void hear(std::list<Caller>::iterator caller, std::vector<FileDescriptor>& sockets);
  void turn_away(std::list<Caller>::iterator caller, const std::string& why);
  std::string describe_missing(const std::vector<FileDescriptor>& sockets) const;
  std::string with_remedy(const std::string& message) const;

  const Options options_;
  const Secret key_ = Secret::random();  // of this rank's listener
  const FileDescriptor waker_;

  std::mutex mutex_;
  std::exception_ptr cause_;  // guarded by mutex_: why connect() ends

  // All below: the thread of connect().
  FileDescriptor listener_;
  Clock::time_point deadline_{};
  std::list<Caller> callers_;  // who has proved nothing yet, the oldest first
  int64_t strangers_ = 0;      // who were turned away
  RejectionLog turned_away_;
};

}  // namespace lockstep
