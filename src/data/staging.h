#pragma once

#include <sys/stat.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// A file descriptor that is closed with the object.
class OpenFile {
 public:
  /// SystemError, naming the path, when it cannot be opened.
  OpenFile(const std::filesystem::path& path, int flags);
  ~OpenFile();
  OpenFile(OpenFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

/// Copies the files of a source that a target lacks, a while at a time. See lockstep/stage.h for what it promises.
class Staging {
 public:
  /// Looks at both. Throws SystemError where that fails or where there is no room.
  Staging(std::filesystem::path source, std::filesystem::path target);
  /// Removes a file that is not whole.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  bool is_done() const { return next_ == missing_.size(); }
  uint64_t missing_bytes() const { return missing_bytes_; }

  /// Goes on copying, at least one piece. Throws SystemError.
  void run_for(std::chrono::milliseconds time);

 private:
  struct File {
    std::filesystem::path from;
    std::filesystem::path to;
    struct stat status;
  };
  struct Copy {  // of missing_[next_]
    OpenFile from;
    OpenFile to;
    std::filesystem::path partial;
    uint64_t copied = 0;
  };

  void list(const std::filesystem::path& from, const std::filesystem::path& to);
  void require_room(const std::filesystem::path& folder) const;
  Copy begin() const;
  void copy_piece();
  void finish();

  std::vector<std::filesystem::path> folders_{};  // to be made, outer ones first
  std::vector<File> missing_{};
  uint64_t missing_bytes_ = 0;
  size_t next_ = 0;
  std::optional<Copy> copy_{};
  std::vector<char> buffer_{};
};

}  // namespace lockstep
