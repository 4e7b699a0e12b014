#pragma once

#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>

#include "base/file_descriptor.h"

/// A pipe with a name, and whether any process has opened it. To open a pipe for reading ends the wait of a process
/// that opens it for writing, which then gets SIGPIPE.
class WatchedPipe {
 public:
  explicit WatchedPipe(const std::filesystem::path& path) : events_(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)) {
    if (::mkfifo(path.c_str(), 0600) != 0 || ::inotify_add_watch(events_.get(), path.c_str(), IN_OPEN) < 0)
      throw std::runtime_error("cannot watch a pipe");
    const lockstep::FileDescriptor opened(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!was_opened()) throw std::runtime_error("this file system does not tell that a file is opened");
  }

  /// Since the last call, or the construction.
  bool was_opened() const {
    alignas(inotify_event) char events[4096];
    return ::read(events_.get(), events, sizeof events) > 0;
  }

 private:
  lockstep::FileDescriptor events_;
};
