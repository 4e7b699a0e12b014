#pragma once

#include <sys/stat.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"

namespace lockstep {

/// Copies the files of a source that are missing in a target, incrementally. See lockstep/stage.h for the guarantees.
class Staging {
 public:
  /// Compares source and target and creates the target's folders. Throws SystemError if this fails or if the disk has
  /// too little space.
  Staging(std::filesystem::path source, std::filesystem::path target);
  /// Removes a partially copied file.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  bool is_done() const { return next_ == missing_.size(); }
  uint64_t missing_bytes() const { return missing_bytes_; }

  /// Continues copying for about `time`, at least one piece. Throws SystemError if a file cannot be read or written.
  void run_for(std::chrono::milliseconds time);

 private:
  struct File {
    std::filesystem::path from;
    std::filesystem::path to;
    struct stat status;
  };
  struct Copy {  // of missing_[next_]
    FileDescriptor from;
    FileDescriptor to;
    std::filesystem::path partial;
    uint64_t copied = 0;
    uint64_t on_disk = 0;
  };

  using Inode = std::pair<dev_t, ino_t>;

  void list(const std::filesystem::path& from, const std::filesystem::path& to, std::vector<Inode>& inside);
  void require_room(const std::filesystem::path& folder) const;
  Copy begin() const;
  void copy_piece();
  void finish();

  std::vector<std::filesystem::path> folders_{};  // to create, outer folders first
  std::vector<File> missing_{};
  uint64_t missing_bytes_ = 0;
  size_t next_ = 0;
  std::optional<Copy> copy_{};
  std::vector<char> buffer_{};
};

}  // namespace lockstep
