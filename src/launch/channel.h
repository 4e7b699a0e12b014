#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "rendezvous/net/socket.h"
#include "rendezvous/store/protocol.h"

namespace lockstep {

/// One end of the line between the launcher and its warden: messages that are lists of strings, and open files that go
/// with them. When a process ends, however, the other hears it as the end of the line. Never waits for the other end:
/// both may have much to say at the same time, and either may be stopped. One thread at a time.
class Channel {
 public:
  using Fields = std::vector<std::string>;

  explicit Channel(FileDescriptor socket) : socket_(std::move(socket)) {}

  /// Both ends; neither survives an exec by itself.
  static std::pair<FileDescriptor, FileDescriptor> make_ends();

  int fd() const { return socket_.get(); }
  /// What fd() is to be polled for.
  short events() const;

  /// Queues a message and sends what the other end takes now; flush() sends the rest. The files stay open until they
  /// are sent. SystemError when the system refuses to send them.
  void send(const Fields& fields, std::vector<FileDescriptor> files = {});
  /// Whether some of what was queued is not sent yet.
  bool has_unsent() const { return !unsent_.empty(); }
  void flush();

  /// Reads what has come. False when the other end is gone and all it said was taken.
  bool read_some();
  /// The next whole message of what was read.
  std::optional<Fields> next();
  /// The next file that came. SystemError when there is none, as when this process may open no more.
  FileDescriptor take_file();

 private:
  struct Unsent {
    std::string bytes;
    std::vector<FileDescriptor> files;  // go with the first byte
    size_t sent = 0;
  };

  ssize_t send_some(const Unsent& message);

  FileDescriptor socket_;
  std::deque<Unsent> unsent_;
  Decoder decoder_;
  std::vector<FileDescriptor> files_;
};

}  // namespace lockstep
