#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "rendezvous/net/socket.h"
#include "rendezvous/store/protocol.h"

namespace lockstep {

/// One end of the connection between the launcher and its supervisor. Messages are lists of strings, with file
/// descriptors attached. When one process ends for any reason, the other process reads end-of-file. Never blocks on the
/// other end, because both ends may send many bytes at the same time, and either process may be stopped. Not
/// thread-safe.
class Channel {
 public:
  using Fields = std::vector<std::string>;

  explicit Channel(FileDescriptor socket) : socket_(std::move(socket)) {}

  /// Returns both ends, with FD_CLOEXEC set.
  static std::pair<FileDescriptor, FileDescriptor> make_ends();

  int fd() const { return socket_.get(); }
  /// The events to poll fd() for.
  short events() const;

  /// Queues a message and sends as much as the socket accepts now; flush() sends the rest. The files stay open until
  /// they are sent. Throws SystemError if sendmsg fails.
  void send(const Fields& fields, std::vector<FileDescriptor> files = {});
  /// Returns whether queued messages are not sent completely.
  bool has_unsent() const { return !unsent_.empty(); }
  void flush();

  /// Reads the available bytes without blocking. Returns false at end-of-file or on an error.
  bool read_some();
  /// Returns the next complete message that was read, if any.
  std::optional<Fields> next();
  /// Returns the next received file. Throws SystemError if there is none, which happens if this process has reached its
  /// limit of open files.
  FileDescriptor take_file();

 private:
  struct Unsent {
    std::string bytes;
    std::vector<FileDescriptor> files;  // sent with the first byte
    size_t sent = 0;
  };

  ssize_t send_some(const Unsent& message);

  FileDescriptor socket_;
  std::deque<Unsent> unsent_;
  Decoder decoder_;
  std::vector<FileDescriptor> files_;
};

}  // namespace lockstep
