#pragma once

#include <sys/stat.h>

#include <string>

#include "base/file_descriptor.h"

// For names in folders that other users write to, as /tmp is.

namespace lockstep {

/// Why a file must not be used as one that an earlier process of this user left: it is not a regular file, or another
/// user's. Empty when it may.
std::string why_not_own_file(const struct stat& status);

/// Opens a folder in which nobody but this user can create, replace or read files, and creates it with mode 0700 when
/// it is missing. Use the files in it by way of the result: the name could come to mean another folder. UsageError when
/// the folder is a link, another user's or open to others, SystemError when it cannot be opened; both messages end with
/// `remedy`.
FileDescriptor open_private_folder(const std::string& folder, const std::string& remedy);

}  // namespace lockstep
