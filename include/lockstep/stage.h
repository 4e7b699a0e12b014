#pragma once

#include <filesystem>

#include <lockstep/export.h>

namespace lockstep {

class ProcessGroup;

/// Copies a file, or a folder and all in it, from a file system that the hosts share to a disk of each host, and
/// returns where the copy is: `folder`, which is made if need be, and the name of `source`. Every rank of the group
/// calls it; one on each host copies, and all return when all have it. The group must move CPU tensors.
///
/// A file that is there already, with the same size and time of change, is not copied again. A file appears when all of
/// it is on disk, so that a job which is ended leaves no half; nothing else in `folder` is touched. However long it
/// takes, no rank times out while another copies.
///
/// Where one fails, all ranks throw SystemError, which says for each why: when `source` cannot be read, changes
/// meanwhile, or has no room.
LOCKSTEP_EXPORT std::filesystem::path stage(const ProcessGroup& group, const std::filesystem::path& source,
                                            const std::filesystem::path& folder);

}  // namespace lockstep
