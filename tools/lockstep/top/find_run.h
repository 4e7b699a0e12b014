#pragma once

#include <filesystem>

namespace lockstep::top {

/// The run to show. `given` is the folder of a run, or a folder with runs up to three levels below: the one whose ranks
/// wrote last. Without `given` that is the folder runs. Throws UsageError if there is no such folder or no such run.
std::filesystem::path find_run(const std::filesystem::path& given);

}  // namespace lockstep::top
