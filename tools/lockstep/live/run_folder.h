#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"

namespace lockstep::live {

/// The reason that Error has for a link.
inline constexpr const char* kLinkProblem = "it is a symbolic link, which is not followed";

/// The time of the last modification, Unix seconds.
double modified_at(const struct stat& status);

/// A regular file that is open for reading.
struct OpenFile {
  FileDescriptor file{};
  struct stat status {};

  /// The size when the file was opened.
  size_t size() const { return static_cast<size_t>(status.st_size); }

  /// Reads up to `count` bytes from `offset` on, fewer only if the file ends before. Throws Error with the reason.
  std::string read(size_t offset, size_t count) const;
};

/// The folder of a run, for reading its files. Programs and users that write into the folder must not choose which
/// other files are shown, so `lockstep ui` and `lockstep top` open every file of a run through this class. No symbolic
/// link is followed, neither at the file nor at a folder above it, and no call blocks on a pipe. Links in the path that
/// the user names on the command line are resolved before, by std::filesystem::canonical. Hard links are not special.
class RunFolder {
 public:
  /// `path` must be canonical: if a component has been replaced by a link since, the folder does not exist.
  explicit RunFolder(const std::filesystem::path& path);

  /// Opens a file, such as "live/rank-00003.json". None if there is no such file. Throws Error with the reason if the
  /// file or its folder is a link, or if it is not a regular file, which is then not opened, or if opening it fails.
  std::optional<OpenFile> open(const std::filesystem::path& name) const;

  /// The names in a folder, sorted. Empty if there is no such folder. Throws Error as open() does.
  std::vector<std::string> names(const std::filesystem::path& folder) const;

  /// The status of a file, a folder or a link itself. None if it does not exist.
  std::optional<struct stat> status(const std::filesystem::path& name) const;
  bool has_folder(const std::filesystem::path& name) const;
  bool has_link(const std::filesystem::path& name) const;

  /// Whether the folder is a run: it has a metrics.jsonl, a summary.json or live files.
  bool is_run() const;
  /// Whether the folder has a folder `live` with files of ranks or launchers, or a folder `live` that cannot be read. A
  /// folder `live` without such files may be another run.
  bool has_live_files() const;

 private:
  FileDescriptor open_below(const std::filesystem::path& name, int flags) const;

  FileDescriptor folder_;
  int error_ = 0;  // why `folder_` is not open
};

}  // namespace lockstep::live
