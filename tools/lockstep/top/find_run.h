#pragma once

#include <filesystem>
#include <string>

namespace lockstep::top {

struct FoundRun {
  std::string name{};              // the path as the user would write it
  std::filesystem::path folder{};  // the canonical path
};

/// The run to show. `given` is the folder of a run, or a folder with runs up to three levels below, of which the run
/// whose ranks wrote last is shown. The default of `given` is the folder `runs`. Links below the folder are left out.
/// Throws UsageError, which mentions links that were left out, if there is no such folder or no such run.
FoundRun find_run(const std::filesystem::path& given);

}  // namespace lockstep::top
