#pragma once

#include <sys/types.h>

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

// The names of checkpoint files, and the files in a folder. Without std::filesystem: the libtorch.so of some wheels
// exports a copy of it that crashes.

namespace lockstep::checkpoint {

/// "step-00000100.pt" is {"step", 100}.
struct Numbered {
  std::string unit;
  int64_t number = 0;
};

/// The unit and number of a main file, whose number has at least 8 digits; none for other names.
std::optional<Numbered> parse_name(const std::string& name);

/// The name of the main file that a shard belongs to: "step-00000100.pt" for "step-00000100.shard-0-of-2-1a2b3c4d.pt";
/// empty if `name` is not the name of a shard.
std::string main_of_shard(const std::string& name);

/// A file with its shards.
struct CheckpointFile {
  std::string path{};
  std::string name{};
  std::optional<Numbered> numbered{};
  uint64_t bytes = 0;  // of this file alone
  std::time_t modified = 0;
  std::vector<CheckpointFile> shards{};  // in the same folder, by name; shards themselves have none
  std::string link_target{};             // as stored in the link; empty if the file is not a symbolic link
  dev_t device = 0;                      // with `inode`: identifies the file, after links are followed
  ino_t inode = 0;

  uint64_t bytes_with_shards() const;
  bool is_link() const { return !link_target.empty(); }
  bool is_same_file(const CheckpointFile& other) const { return device == other.device && inode == other.inode; }
};

struct Folder {
  std::vector<CheckpointFile> files{};    // by unit and number, then files without a number by name
  std::vector<CheckpointFile> orphans{};  // shards without a main file
};

bool is_folder(const std::string& path);
bool is_file(const std::string& path);
/// The folder of a path, with the slash; "." if the path has none.
std::string folder_of(const std::string& path);

/// Lists the files .pt, .pth and .safetensors in a folder. Throws UsageError if there is no such folder, SystemError if
/// it cannot be read.
Folder list_folder(const std::string& path);

/// The files at these paths, and all files in paths that are folders. Throws UsageError for a path that does not exist.
std::vector<CheckpointFile> find_files(const std::vector<std::string>& paths);

/// The newest checkpoint of a run's folder, which has a folder `checkpoints`, or of a folder with checkpoint files: the
/// file with the highest number of its unit; with several units, the file among these that was written last. Without
/// numbered files, the file that was written last. Throws UsageError if there is no checkpoint file.
CheckpointFile newest_in(const std::string& folder);

/// Throws UsageError unless the path refers to a file.
void require_file(const std::string& path);

}  // namespace lockstep::checkpoint
