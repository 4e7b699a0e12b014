#pragma once

#include <optional>
#include <string>
#include <vector>

#include "rendezvous/socket.h"
#include "rendezvous/wire.h"

namespace lockstep {

/// One end of the line between the launcher and its warden: messages that are lists of strings, and open files that go
/// with them. When a process ends, however, the other hears it as the end of the line. One thread at a time.
class Channel {
 public:
  using Fields = std::vector<std::string>;

  explicit Channel(FileDescriptor socket) : socket_(std::move(socket)) {}

  /// Both ends; neither survives an exec by itself.
  static std::pair<FileDescriptor, FileDescriptor> make_ends();

  int fd() const { return socket_.get(); }

  /// Whether the other end was there to take it.
  bool send(const Fields& fields, const std::vector<int>& files = {});

  /// Reads what has come, waiting for it when `wait`. False when the other end is gone and all it said was taken.
  bool read_some(bool wait);
  /// The next whole message of what was read.
  std::optional<Fields> next();
  /// The next file that came. SystemError when there is none, as when this process may open no more.
  FileDescriptor take_file();

 private:
  FileDescriptor socket_;
  Decoder decoder_;
  std::vector<FileDescriptor> files_;
};

}  // namespace lockstep
