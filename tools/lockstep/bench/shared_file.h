#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::bench {

/// An open file that other processes of this user reach by its path, for as long as this lives.
class SharedFile {
 public:
  /// Takes what `call` has returned. SystemError when that is no file.
  SharedFile(int file, const char* call) : file_(file) {
    if (file_ < 0) throw SystemError(fmt::format("{}: {}", call, std::strerror(errno)));
  }
  ~SharedFile() { close(); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  /// Empty, and on no disk.
  static SharedFile in_memory() { return {::memfd_create("lockstep-bench", MFD_CLOEXEC), "memfd_create"}; }

  int get() const { return file_; }
  std::string path() const { return fmt::format("/proc/{}/fd/{}", ::getpid(), file_); }
  void close() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
  }

 private:
  int file_;
};

}  // namespace lockstep::bench
