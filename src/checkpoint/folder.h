#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.h"

// The files of a CheckpointDirectory:
//
//   step-00000100.pt                            a checkpoint
//   step-00000100.shard-0-of-2-9f86d081.pt      its shard of rank 0; the digits differ between saves
//   best.pt                                     a link to the best checkpoint
//   .lock                                       locked and written by the job that uses the folder
//   .unfinished-...                             a file being written, or left behind by a process that died

namespace lockstep::detail {

constexpr const char* kBestFile = "best.pt";

std::string checkpoint_name(const std::string& unit, int64_t number);
std::string shard_name(const std::string& unit, int64_t number, int shard, int shards, const std::string& digits);

/// The files of a folder, by kind.
struct FolderContents {
  std::set<int64_t> numbers;            // of checkpoints with this unit
  std::vector<std::string> shards;      // file names
  std::vector<std::string> unfinished;  // file names
  bool has_best = false;
};

/// Throws SystemError if the folder cannot be read.
FolderContents read_folder(const std::string& folder, const std::string& unit);

/// Returns the checkpoints to remove after `saved` was saved: never `saved` itself, nor checkpoints with a higher
/// number, which belong to an earlier run or are damaged. Pure.
std::vector<int64_t> plan_removals(const std::set<int64_t>& numbers, int64_t saved, int keep_last, int64_t keep_every);

/// Eight hexadecimal digits.
std::string random_digits();

/// Creates the folder if it is missing and locks it for this process, until the result is closed. Writes a description
/// of this process, with random digits, into its lock file. Throws UsageError, which names the owner, if another
/// process holds the lock.
FileDescriptor lock_folder(const std::string& folder);
/// Returns what the process that holds the lock has written; empty if there is no lock file.
std::string read_owner(const std::string& folder);

/// Gives a file a second name, in place of the file that has it. Copies if the file system has no links. Throws
/// NotDurable as AtomicFile::commit() does.
void link_file(const std::string& from, const std::string& to);

/// Removes a file if it exists. Logs a warning if that fails.
void remove_file(const std::string& path);

}  // namespace lockstep::detail
