#pragma once

#include <sys/stat.h>

#include <fstream>
#include <string>

#include "support/temporary_folder.h"

namespace lockstep::tool {

/// A program in the folder that stands in for another; its path.
inline std::string make_script(const TemporaryFolder& folder, const std::string& name, const std::string& text) {
  const std::string path = folder.path() / name;
  std::ofstream(path) << "#!/bin/sh\n" << text << '\n';
  ::chmod(path.c_str(), 0755);
  return path;
}

}  // namespace lockstep::tool
