#pragma once

#include <sys/stat.h>

#include <string>

#include "base/file_descriptor.h"

// For files in folders that other users can write to, such as /tmp.

namespace lockstep {

/// Returns why an existing file must not be reused: it is not a regular file, or belongs to another user. Empty if it
/// can be reused.
std::string why_not_own_file(const struct stat& status);

/// Opens a folder in which only this user can create, replace or read files; creates it with mode 0700 if it is
/// missing. Access its files relative to the returned descriptor (openat), because the path could be redirected to
/// another folder. Throws UsageError if the folder is a link, belongs to another user or is accessible to other users,
/// SystemError if it cannot be opened. Both messages end with `remedy`.
FileDescriptor open_private_folder(const std::string& folder, const std::string& remedy);

}  // namespace lockstep
