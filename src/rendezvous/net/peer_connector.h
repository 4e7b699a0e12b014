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

/// Connects every pair of ranks of a group by TCP and rejects all other connections.
///
/// Each rank listens and publishes its address and a random key in the group's store, which only processes with the
/// job's secret can read. Of two ranks, the higher rank connects to the lower rank. Both prove that they know the key
/// (peer_proof.h) before the socket carries anything else. Connections that have not authenticated are limited as in
/// StoreServer: they may stay open for 2 s, at most 64 more than the group has ranks may be open, and beyond that the
/// oldest is closed. A rank whose connection was closed that way connects again. Data sent on the sockets afterwards is
/// neither encrypted nor authenticated.
class PeerConnector {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    std::string host{};              // the only address to listen at
    std::shared_ptr<Store> store{};  // of this group only
    std::chrono::milliseconds timeout{};
    const char* remedy = nullptr;  // appended to the errors of listening and connecting
  };

  /// Starts to listen. Throws SystemError on failure.
  explicit PeerConnector(Options options);
  ~PeerConnector();
  PeerConnector(const PeerConnector&) = delete;
  PeerConnector& operator=(const PeerConnector&) = delete;

  /// Blocks until all ranks are connected and returns a nonblocking socket for each rank; this rank's own entry is not
  /// open. Closes the port. Collective; call it once. Throws TimeoutError, naming the rank that could not be reached or
  /// the ranks that did not connect, and PeerError if a rank refuses the connection.
  std::vector<FileDescriptor> connect();

  /// Makes connect() throw `cause`. Thread-safe.
  void give_up(std::exception_ptr cause) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Caller;

  std::vector<std::string> addresses_of_lower_ranks();
  FileDescriptor reach(int peer, const std::string& address);
  FileDescriptor try_to_reach(int peer, const Endpoint& endpoint, const Secret& key, std::string& reason);
  std::string receive(const FileDescriptor& socket, size_t bytes, std::string& reason);
  bool wait(int descriptor, short events, Clock::time_point until);
  void throw_if_given_up();

  void accept_higher_ranks(std::vector<FileDescriptor>& sockets);
  void accept_callers();
  void make_room(int error);
  void receive_answer(std::list<Caller>::iterator caller, std::vector<FileDescriptor>& sockets);
  void reject(std::list<Caller>::iterator caller, const std::string& why);
  std::string describe_missing(const std::vector<FileDescriptor>& sockets) const;
  std::string with_remedy(const std::string& message) const;

  const Options options_;
  const Secret key_ = Secret::random();  // published for the ranks that connect to this rank
  const FileDescriptor waker_;

  std::mutex mutex_;
  std::exception_ptr cause_;  // guarded by mutex_: set by give_up()

  // Used by the thread of connect() only:
  FileDescriptor listener_;
  Clock::time_point deadline_{};
  std::list<Caller> callers_;   // not authenticated yet, oldest first
  int64_t rejected_count_ = 0;  // number of rejected connections
  RejectionLog rejections_;
};

}  // namespace lockstep
