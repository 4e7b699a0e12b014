#pragma once

#include <sys/stat.h>

#include <string>

#include "base/file_descriptor.h"

// For files in folders that other users can write to, such as /tmp.

namespace lockstep {

/// Returns why an existing file must not be reused: it is not a regular file, or belongs to another user. Empty if it
/// can be reused.
std::string why_not_own_file(const struct stat& status);

/// Opens a file that this user writes, locks or reads back, such as those of a run's folder; `flags` are those of
/// open(), without O_TRUNC. Neither follows a link nor blocks. Returns a closed descriptor if there is no such file.
/// Throws UsageError if it is not a regular file, or belongs neither to this user nor to the owner of its folder:
/// colleagues may share a folder, and NFS gives the files of root to another user. Throws SystemError if it cannot be
/// opened.
FileDescriptor open_own_file(const std::string& path, int flags);

/// Opens a folder in which only this user can create, replace or read files; creates it with mode 0700 if it is
/// missing. Access its files relative to the returned descriptor (openat), because the path could be redirected to
/// another folder. Throws UsageError if the folder is a link, belongs to another user or is accessible to other users,
/// SystemError if it cannot be opened. Both messages end with `remedy`.
FileDescriptor open_private_folder(const std::string& folder, const std::string& remedy);

}  // namespace lockstep
