#pragma once

#include <filesystem>

#include <lockstep/export.h>

namespace lockstep {

class ProcessGroup;

/// Copies a file, or a directory with its contents, from a shared file system to a local disk of each host. Returns the
/// path of the copy: `folder` / name of `source`. Creates `folder` if it does not exist.
///
/// Collective: every rank of the group calls it, and all return when every host has the copy. One rank on each host
/// copies; a rank that cannot see that copy, for example in a container, makes its own. The group must support CPU
/// tensors. No rank times out while another rank copies.
///
/// A file that already exists with the same size and modification time is not copied again. A file appears under its
/// name only when it is completely on disk, so an aborted job leaves no partial file. Other files in `folder` are not
/// touched.
///
/// Throws SystemError on all ranks, with the reason of each failed rank, if `source` cannot be read or changes during
/// the copy, or the disk has no room. The group still works.
LOCKSTEP_EXPORT std::filesystem::path stage(const ProcessGroup& group, const std::filesystem::path& source,
                                            const std::filesystem::path& folder);

}  // namespace lockstep
